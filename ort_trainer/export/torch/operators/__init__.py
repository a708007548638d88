"""PyTorch operators that need more than PyTorch's own ONNX export: one file per family, and the table of all."""

from .registry import register_operator

__all__ = ["register_operator"]
