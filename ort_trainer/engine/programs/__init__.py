"""Graphs of PyTorch's kernels, as data, and what runs them."""

from .program import Program

__all__ = ["Program"]
