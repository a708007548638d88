"""What runs a step: PyTorch's kernels, as programs, or the installed ONNX Runtime, in sessions."""

from typing import TYPE_CHECKING

from ..core.lazy import lazily

if TYPE_CHECKING:
    from .executor import Executor
    from .runner import Check, Plan

__all__ = ["Check", "Executor", "Plan"]

# Lazy, so that the installed engine can be identified without torch.
__getattr__, __dir__ = lazily(__name__, {"Check": "runner", "Plan": "runner", "Executor": "executor"})
