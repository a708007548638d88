"""ONNX Runtime: the capabilities of the installed engine, and the sessions that run graphs on it."""

from typing import TYPE_CHECKING

from ..core.lazy import lazily

if TYPE_CHECKING:
    from .executor import Executor
    from .runner import Check, Plan

__all__ = ["Check", "Executor", "Plan"]

# Lazy, so that the installed engine can be identified without torch.
__getattr__, __dir__ = lazily(__name__, {"Check": "runner", "Plan": "runner", "Executor": "executor"})
