"""Graphs whose nodes are programs of PyTorch operators, for an engine that can call PyTorch."""

from .rewrites import rewrite_forward

__all__ = ["rewrite_forward"]
