"""Train PyTorch models on ONNX Runtime behind the interface of the legacy ``ORTTrainer``."""

from typing import TYPE_CHECKING, Any

from . import amp, optim
from .checkpoint import read_user_dict
from .errors import CheckpointError, ExportError
from .optim.step_info import TrainStepInfo
from .options import ORTTrainerOptions
from .sources.torch import register_operator
from .trainer import ORTTrainer

if TYPE_CHECKING:
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
    "read_user_dict",
    "register_operator",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports what only ONNX models need when it is asked for: that takes as long as all the rest."""
    if name in ("TrainingParameters", "TrainingSession"):
        from . import training_session

        return getattr(training_session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
