"""Rewrites of a captured graph whose operators PyTorch runs, one per file."""

from __future__ import annotations

import torch

from .cross_entropy import fuse_cross_entropy
from .gelu import fuse_gelu
from .halves import widen_products
from .linear import use_onednn
from .views import drop_needless_casts, drop_needless_views

__all__ = ["rewrite", "rewrite_forward"]

# In this order: widened products are fp32, which oneDNN needs.
_REWRITES = (drop_needless_views, widen_products, use_onednn, fuse_cross_entropy)
# Inductor can't look into the operators that these insert, so it would fuse less.
_NOT_FOR_LOOPS = (use_onednn, fuse_cross_entropy)


def rewrite_forward(graph: torch.fx.Graph) -> None:
    """Speeds up a graph before it is differentiated, in place."""
    drop_needless_casts(graph)
    fuse_gelu(graph)


def rewrite(graph: torch.fx.Graph, compiled: bool = False) -> None:
    """Speeds up a differentiated graph, in place; its results change only by rounding.

    Args:
        graph: The graph.
        compiled: Whether the graph will be compiled to loops.
    """
    for function in _REWRITES:
        if not compiled or function not in _NOT_FOR_LOOPS:
            function(graph)
    graph.eliminate_dead_code()
