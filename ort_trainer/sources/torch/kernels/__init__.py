"""Graphs whose nodes are programs of PyTorch's operators, for an engine that can call PyTorch."""

from .build import kernel_model

__all__ = ["kernel_model"]
