"""Views and casts that change nothing."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ....fx.values import call, is_view, same_sizes

aten = torch.ops.aten
Node = torch.fx.Node

RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_COPIES = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)
# Operators that change nothing if their result has the shape of their argument: it is the same, or a part of it, or has
# it as a part.
_OF_A_SHAPE = (*RESHAPES, aten.slice.Tensor, aten.slice_backward.default)


def drop_needless_views(graph: torch.fx.Graph) -> None:
    """Drops views that leave a tensor as it is or are there already; PyTorch's backward formulas are full of them::

        weight -> t -> t -> mm              =>    weight -> mm
        x -> view -> view -> mm             =>    x -> view -> mm
        x -> detach -> mm                   =>    x -> mm
        x -> slice of everything -> mm      =>    x -> mm
        x -> t -> mm, x -> t -> mm          =>    x -> t -> (mm, mm)
        x -> sum with keepdim -> view       =>    x -> sum

    Otherwise the gradient of a weight would be a view of what was computed, and a program would compute three views
    where one is enough; each costs a microsecond.
    """
    views: dict[tuple[Any, str], Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.all_input_nodes:
            continue
        source = node.args[0]
        if node.target in RESHAPES and isinstance(source, Node) and source.target in RESHAPES:
            node.update_arg(0, source.args[0])
        if node.target in RESHAPES and isinstance(source, Node) and _is_squeezed(source, node):
            node.target, node.args, node.kwargs = source.target, source.args[:2], source.kwargs
        same = _unchanged(node)
        if same is None and is_view(node):
            same = views.setdefault((node.target, f"{node.args} {node.kwargs}"), node)
        if same is not None and same is not node:
            node.replace_all_uses_with(same)


def _is_squeezed(source: Node, view: Node) -> bool:
    """Returns whether a view drops the dimensions that a sum, which nothing else reads, has kept."""
    if source.target is not aten.sum.dim_IntList or source.args[2:] != (True,) or len(source.users) > 1:
        return False
    shape, axes = source.meta["val"].shape, source.args[1]
    summed = {axis % len(shape) for axis in axes}  # type: ignore[union-attr, operator]
    return same_sizes(view.meta["val"].shape, [size for axis, size in enumerate(shape) if axis not in summed])


def _unchanged(node: Node) -> Node | None:
    """Returns the value that an operator returns as it is; None if it computes another one."""
    source = node.args[0]
    if not isinstance(source, Node):
        return None
    if node.target in _COPIES:
        return source
    if node.target in (aten.t.default, aten.transpose.int) and source.target is node.target:
        before = source.args[0]
        assert isinstance(before, Node)
        return before if node.args[1:] == source.args[1:] else None
    if node.target in _OF_A_SHAPE:
        return source if same_sizes(node.meta["val"].shape, source.meta["val"].shape) else None
    return None


def join_selects(graph: torch.fx.Graph) -> None:
    """Takes most or all parts of a tensor by one operator, as each view costs a microsecond::

        x -> select 0, x -> select 1, x -> select 2    =>    x -> unbind -> 0, 1, 2

    Before differentiation, this makes the gradient of x a stack of theirs instead of a sum of tensors of its size, each
    of which has one of them. PyTorch refuses to change such parts in place, so a graph with changes stays as it is.
    """
    if any(isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable for node in graph.nodes):
        return
    parts: dict[tuple[Node, Any], list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.select.int):
        source, axis, place = node.args
        while source.target is aten.slice.Tensor and _unchanged(source) is not None:
            source = source.args[0]
        if isinstance(source.meta["val"].shape[axis], int) and isinstance(place, int):
            parts.setdefault((source, axis), []).append(node)
    for (source, axis), nodes in parts.items():
        value = source.meta["val"]
        if len({node.args[2] for node in nodes}) < max(3, value.shape[axis] / 2):
            continue
        with graph.inserting_before(nodes[0]), value.fake_mode, torch.no_grad():
            together = call(graph, aten.unbind.int, source, axis)
        together.meta = {**nodes[0].meta, **together.meta}
        for node in nodes:
            node.target, node.args = operator.getitem, (together, node.args[2] % value.shape[axis])


def drop_needless_casts(graph: torch.fx.Graph) -> None:
    """Drops casts to the dtype that a tensor has, which would hide the formulas that other rewrites look for."""
    for node in list(graph.nodes):
        if node.target is aten.to.dtype and len(node.args) == 2 and not node.kwargs:
            value, dtype = node.args
            if isinstance(value, torch.fx.Node) and value.meta["val"].dtype == dtype:
                node.replace_all_uses_with(value)
                graph.erase_node(node)
