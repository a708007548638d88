"""Casts that change nothing."""

from __future__ import annotations

import torch

__all__ = ["drop_needless_casts"]

aten = torch.ops.aten


def drop_needless_casts(graph: torch.fx.Graph) -> None:
    """Removes casts to the dtype that a tensor has, which would hide the patterns of other rewrites."""
    for node in list(graph.nodes):
        if node.target is aten.to.dtype and len(node.args) == 2 and not node.kwargs:
            (value, dtype) = node.args
            if isinstance(value, torch.fx.Node) and value.meta["val"].dtype == dtype:
                node.replace_all_uses_with(value)
                graph.erase_node(node)
