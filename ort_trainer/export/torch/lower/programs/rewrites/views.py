"""Views and casts that change nothing."""

from __future__ import annotations

import torch

from ....fx.values import same_sizes

__all__ = ["RESHAPES", "drop_needless_casts", "drop_needless_views"]

aten = torch.ops.aten


def drop_needless_views(graph: torch.fx.Graph) -> None:
    """Drops views that leave a tensor as it is; PyTorch's backward formulas are full of them::

        weight -> t -> t -> mm        =>    weight -> mm
        x -> view -> view -> mm       =>    x -> view -> mm
        x -> detach -> mm             =>    x -> mm

    Otherwise the gradient of a weight would be a view of what was computed, and a program would compute three views
    where one is enough; each costs a microsecond.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.all_input_nodes:
            continue
        source = node.args[0]
        if node.target in (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default):
            node.replace_all_uses_with(source)
        elif node.target is aten.t.default and source.target is aten.t.default:
            node.replace_all_uses_with(source.args[0])
        elif node.target in RESHAPES and source.target in RESHAPES:
            node.update_arg(0, source.args[0])
    for node in list(graph.nodes):
        if node.target in RESHAPES and _same_shape(node, node.args[0]):
            node.replace_all_uses_with(node.args[0])


RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def _same_shape(node: torch.fx.Node, other: torch.fx.Node) -> bool:
    return same_sizes(node.meta["val"].shape, other.meta["val"].shape)


def drop_needless_casts(graph: torch.fx.Graph) -> None:
    """Drops casts to the dtype that a tensor has, which would hide the formulas that other rewrites look for."""
    for node in list(graph.nodes):
        if node.target is aten.to.dtype and len(node.args) == 2 and not node.kwargs:
            value, dtype = node.args
            if isinstance(value, torch.fx.Node) and value.meta["val"].dtype == dtype:
                node.replace_all_uses_with(value)
                graph.erase_node(node)
