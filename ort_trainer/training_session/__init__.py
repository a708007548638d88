"""``TrainingSession``: the second face of the trainer, for ONNX models with their loss inside."""

from .node_arg import NodeArg
from .parameters import TrainingParameters
from .session import TrainingSession
from .trainer_session import TrainerSession

__all__ = ["NodeArg", "TrainerSession", "TrainingParameters", "TrainingSession"]
