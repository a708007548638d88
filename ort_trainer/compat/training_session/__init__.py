"""``TrainingSession``: the trainer's second interface, for ONNX models that include their loss."""

from .node_arg import NodeArg
from .parameters import TrainingParameters
from .session import TrainingSession
from .trainer_session import TrainerSession

__all__ = ["NodeArg", "TrainerSession", "TrainingParameters", "TrainingSession"]
