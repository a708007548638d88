"""``TrainingSession``: the second face of the trainer, for ONNX models with their loss inside."""

from .node_arg import NodeArg
from .parameters import TrainingParameters
from .session import TrainingSession

__all__ = ["NodeArg", "TrainingParameters", "TrainingSession"]
