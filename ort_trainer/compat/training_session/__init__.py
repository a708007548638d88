"""``TrainingSession``: the trainer's second interface, for ONNX models that include their loss."""

from .parameters import TrainingParameters
from .session import NodeArg, TrainerSession, TrainingSession

__all__ = ["NodeArg", "TrainerSession", "TrainingParameters", "TrainingSession"]
