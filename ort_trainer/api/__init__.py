"""Trains from exported artifacts, with nothing but NumPy, ONNX Runtime and xxhash."""

from typing import TYPE_CHECKING

from ..core.lazy import lazily

if TYPE_CHECKING:
    from .adapters import Adapters
    from .checkpoint_state import CheckpointState, Parameter, Parameters, Properties
    from .lr_scheduler import LinearLRScheduler
    from .module import Module
    from .optimizer import Optimizer
    from .random_numbers import set_seed
    from .training_session import TrainingSession

__all__ = [
    "Adapters",
    "CheckpointState",
    "LinearLRScheduler",
    "Module",
    "Optimizer",
    "Parameter",
    "Parameters",
    "Properties",
    "TrainingSession",
    "set_seed",
]

# Lazy, because inspecting and converting files must not require ONNX Runtime.
_PLACES = {
    "Adapters": "adapters",
    "CheckpointState": "checkpoint_state",
    "LinearLRScheduler": "lr_scheduler",
    "Module": "module",
    "Optimizer": "optimizer",
    "Parameter": "checkpoint_state",
    "Parameters": "checkpoint_state",
    "Properties": "checkpoint_state",
    "TrainingSession": "training_session",
    "set_seed": "random_numbers",
}
__getattr__, __dir__ = lazily(__name__, _PLACES)
