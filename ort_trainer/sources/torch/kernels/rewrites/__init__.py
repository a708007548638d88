"""What is rewritten in a captured graph whose operators PyTorch runs: one file a rewrite."""

from __future__ import annotations

import torch

from .cross_entropy import fuse_cross_entropy
from .gelu import fuse_gelu
from .halves import widen_products
from .linear import use_onednn
from .views import drop_needless_views

__all__ = ["rewrite", "rewrite_forward"]

# oneDNN's products are of fp32, and so of what is widened.
_REWRITES = (drop_needless_views, widen_products, use_onednn, fuse_cross_entropy)


def rewrite_forward(graph: torch.fx.Graph) -> None:
    """Makes a graph faster that is not differentiated yet, in place."""
    fuse_gelu(graph)


def rewrite(graph: torch.fx.Graph) -> None:
    """Makes a differentiated graph faster, in place; what it computes stays the same but for rounding."""
    for function in _REWRITES:
        function(graph)
    graph.eliminate_dead_code()
