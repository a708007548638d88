"""Rewrites of a captured graph whose operators PyTorch runs, one per file."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from ....engine.programs.collectives import WAIT
from ....fx.values import runs_on_cpu
from ..masks import open_masks
from .attention import drop_plain_masks
from .convolutions import order_images, sum_bias_gradients
from .cross_entropy import fuse_cross_entropy
from .gelu import fuse_gelu
from .halves import widen_products
from .linear import open_products, use_onednn
from .linear_cross_entropy import fuse_linear_cross_entropy
from .rows import add_rows, select_rows
from .views import drop_needless_casts, drop_needless_views, join_selects

__all__ = ["rewrite", "rewrite_forward"]

# In this order: widened products are fp32, which oneDNN needs.
_REWRITES: tuple[Callable[..., None], ...] = (
    drop_needless_views,
    join_selects,
    fuse_linear_cross_entropy,
    widen_products,
    use_onednn,
    fuse_cross_entropy,
    order_images,
    sum_bias_gradients,
    add_rows,
)
# Inductor can't look into the operator that the first inserts, so it would fuse less, and views cost it nothing.
_NOT_FOR_LOOPS = (fuse_cross_entropy, join_selects)
# The others are made for the CPU, or read values, for which other devices would have to wait.
_ON_EVERY_DEVICE = (drop_needless_views, join_selects)


def rewrite_forward(graph: torch.fx.Graph, compiled: bool = False) -> None:
    """Speeds up a graph before it is differentiated, in place.

    Args:
        graph: The graph.
        compiled: Whether the graph will be compiled to loops.
    """
    drop_needless_casts(graph)
    drop_plain_masks(graph)
    fuse_gelu(graph)
    join_selects(graph)
    if not compiled and runs_on_cpu(graph):
        select_rows(graph)


def rewrite(
    graph: torch.fx.Graph, compiled: bool = False, divided: bool = False, unfetched: Collection[int] = ()
) -> None:
    """Speeds up a differentiated graph, in place; its results change only by rounding.

    Args:
        graph: The graph.
        compiled: Whether the graph will be compiled to loops.
        divided: Whether the graph will be divided into forward and backward pass.
        unfetched: Places of results that are probably not fetched.
    """
    _forget_waiting(graph)
    on_cpu = runs_on_cpu(graph)
    for function in _REWRITES:
        if (compiled and function in _NOT_FOR_LOOPS) or not (on_cpu or function in _ON_EVERY_DEVICE):
            continue
        if function is not fuse_linear_cross_entropy:
            function(graph)
        elif not divided:  # it computes the loss in the backward pass, too
            fuse_linear_cross_entropy(graph, unfetched)
    if compiled:
        open_masks(graph)
        open_products(graph)
    graph.eliminate_dead_code()


def _forget_waiting(graph: torch.fx.Graph) -> None:
    """Lets the readers of a collective operation's result read it at once: a program's steps wait by themselves."""
    for node in list(graph.nodes):
        if str(node.target) == WAIT:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
