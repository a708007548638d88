"""Trains from the artifacts of an export, with nothing but NumPy, ONNX Runtime and safetensors."""

from .checkpoint_state import CheckpointState, Parameter, Parameters, Properties
from .lr_scheduler import LinearLRScheduler
from .module import Module
from .optimizer import Optimizer
from .random_numbers import set_seed
from .training_session import TrainingSession

__all__ = [
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
