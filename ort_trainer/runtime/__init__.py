"""ONNX Runtime: what the installed engine can do, and the sessions that run graphs on it."""

from typing import TYPE_CHECKING

from ..lazy import lazily

if TYPE_CHECKING:
    from .runner import Check, Plan
    from .session import StepSession

__all__ = ["Check", "Plan", "StepSession"]

# Which engine is installed can be asked without torch.
__getattr__ = lazily(__name__, {"Check": "runner", "Plan": "runner", "StepSession": "session"})
