"""ONNX Runtime: what the installed engine can do, and the sessions that run graphs on it."""

from .runner import Plan
from .session import StepSession

__all__ = ["Plan", "StepSession"]
