"""The training session: owns every tensor and runs the graphs on ONNX Runtime."""

from .step_session import StepSession

__all__ = ["StepSession"]
