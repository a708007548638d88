"""What runs a step: PyTorch's kernels, as programs, or the installed ONNX Runtime, in sessions."""

from typing import TYPE_CHECKING

from ..core.lazy import lazily

if TYPE_CHECKING:
    from .executor import Executor
    from .request import Request
    from .runner import Check, Plan

__all__ = ["Check", "Executor", "Plan", "Request"]

# Lazy, so that the installed engine can be identified without torch.
_HOMES = {"Check": "runner", "Plan": "runner", "Executor": "executor", "Request": "request"}
__getattr__, __dir__ = lazily(__name__, _HOMES)
