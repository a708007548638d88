"""The training session: owns every tensor and runs the graphs on ONNX Runtime."""

from .training_session import TrainingSession

__all__ = ["TrainingSession"]
