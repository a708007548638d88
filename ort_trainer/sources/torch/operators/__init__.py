"""Operators of PyTorch that need more than PyTorch's own way to ONNX: a file a family, and the table of them all."""

from .registry import register_operator

__all__ = ["register_operator"]
