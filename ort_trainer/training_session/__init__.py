"""``TrainingSession``: the second face of the trainer, for ONNX models with their loss inside."""

from .parameters import TrainingParameters
from .session import NodeArg, TrainingSession

__all__ = ["NodeArg", "TrainingParameters", "TrainingSession"]
