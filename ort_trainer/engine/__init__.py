"""ONNX Runtime: the capabilities of the installed engine, and the sessions that run graphs on it."""

from typing import TYPE_CHECKING

from ..core.lazy import lazily

if TYPE_CHECKING:
    from .runner import Check, Plan
    from .session import StepSession

__all__ = ["Check", "Plan", "StepSession"]

# Lazy, so that the installed engine can be identified without torch.
__getattr__ = lazily(__name__, {"Check": "runner", "Plan": "runner", "StepSession": "session"})
