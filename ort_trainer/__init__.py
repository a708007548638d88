"""Train PyTorch models on ONNX Runtime behind the interface of the legacy ``ORTTrainer``."""

from . import amp, optim
from .errors import CheckpointError, ExportError
from .optim.step_info import TrainStepInfo
from .options import ORTTrainerOptions
from .sources.torch import register_operator
from .trainer import ORTTrainer
from .training_session import TrainingParameters, TrainingSession

__all__ = [
    "CheckpointError",
    "ExportError",
    "ORTTrainer",
    "ORTTrainerOptions",
    "TrainStepInfo",
    "TrainingParameters",
    "TrainingSession",
    "amp",
    "optim",
    "register_operator",
]
__version__ = "0.1.0"
