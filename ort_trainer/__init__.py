"""Train PyTorch models on ONNX Runtime behind the interface of the legacy ``ORTTrainer``."""

from . import amp, optim
from .errors import CheckpointError, ExportError
from .options import ORTTrainerOptions
from .step_info import TrainStepInfo
from .trainer import ORTTrainer
from .training_parameters import TrainingParameters
from .training_session import TrainingSession

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
]
__version__ = "0.1.0"
