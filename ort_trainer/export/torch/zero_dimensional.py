"""Operators with a dim on zero-dimensional tensors: PyTorch treats these as one-element vectors, ONNX rejects them."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.node import map_arg

__all__ = ["lift_zero_dimensional"]

aten = torch.ops.aten
# In these, dim has another meaning.
_VIEWS = {aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default}


def lift_zero_dimensional(graph: torch.fx.Graph) -> None:
    """Passes one-element vectors to such operators, and removes the dimension from their results."""
    for node in list(graph.nodes):
        if _has_dimension(node) and _is_number(node.args[0]):
            _lift(graph, node)


def _has_dimension(node: torch.fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args or node.target in _VIEWS:
        return False
    # No dims mean all dimensions: no need to lift.
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name in ("dim", "dims"):
            given = (
                node.args[place] if place < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
            )
            return given is not None and given != []
    return False


def _is_number(value: object) -> bool:
    return (
        isinstance(value, torch.fx.Node)
        and isinstance(value.meta.get("val"), torch.Tensor)
        and value.meta["val"].dim() == 0
    )


def _lift(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    with graph.inserting_before(node):
        for place, argument in enumerate(node.args):
            if _is_number(argument):
                assert isinstance(argument, torch.fx.Node)
                lifted = graph.call_function(aten.unsqueeze.default, (argument, 0))
                lifted.meta["val"] = argument.meta["val"].unsqueeze(0)
                node.update_arg(place, lifted)
    shown = node.target(*map_arg(node.args, _value), **map_arg(node.kwargs, _value))  # type: ignore[operator]
    if isinstance(shown, torch.Tensor):
        _drop(graph, node, shown)
        return
    node.meta["val"] = type(node.meta["val"])(shown)
    for user in list(node.users):
        _drop(graph, user, shown[user.args[1]])


def _value(node: torch.fx.Node) -> Any:
    return node.meta["val"]


def _drop(graph: torch.fx.Graph, result: torch.fx.Node, shown: torch.Tensor) -> None:
    """Removes the dimension from a result, unless the operator has removed it."""
    if result.meta["val"].dim() == shown.dim():
        return
    users = list(result.users)
    with graph.inserting_after(result):
        dropped = graph.call_function(aten.squeeze.dim, (result, 0))
    dropped.meta.update(result.meta)
    result.meta["val"] = shown
    for user in users:
        user.replace_input_with(result, dropped)
