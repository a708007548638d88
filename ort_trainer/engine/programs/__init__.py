"""Graphs of PyTorch's kernels, as data, and the code that runs them."""

from .program import Program

__all__ = ["Program"]
