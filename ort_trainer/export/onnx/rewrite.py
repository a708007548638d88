"""Replaces nodes of a model by rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import onnx_ir as ir

from ...core.errors import ExportError
from ...step.emitter import FINAL, Emitter, Names
from .gradient import has_user_gradient
from .nodes import dtype_of

__all__ = ["Rule", "replace", "rewrite"]

Rule = Callable[[ir.Node, Emitter], ir.Value | Sequence[ir.Value | None] | None]
"""Emits the replacement of a node and returns its results, None for an unused one; returns None to keep the node."""


def rewrite(
    model: ir.Model,
    rules: Mapping[str, Rule],
    only: Collection[ir.Node] | None = None,
    refused: dict[ir.Node, str] | None = None,
) -> bool:
    """Replaces nodes by rules, in place. Their results keep their names, types and shapes.

    Args:
        model: The model.
        rules: Operator -> rule.
        only: The nodes to consider; None for all.
        refused: Receives each node whose rule raises an error, with the message; None to raise the error.

    Returns:
        Whether any node was replaced.
    """
    chosen = [
        node
        for node in model.graph
        if not node.domain
        and node.op_type in rules
        and FINAL not in node.meta
        and (only is None or node in only)
        and not has_user_gradient(node)
    ]
    names = Names(ir.convenience.create_value_mapping(model.graph)) if chosen else Names(())
    changed = False
    for node in chosen:
        first = next((value for value in node.inputs if value is not None), None)
        dtype = ir.DataType.FLOAT if first is None else dtype_of(first)
        emitter = Emitter(model.opset_imports, names, node.name or node.op_type, dtype)
        try:
            results = rules[node.op_type](node, emitter)
        except ExportError as error:
            if refused is None:
                raise
            refused[node] = str(error)
            continue
        if results is not None:
            replace(node, emitter, [results] if isinstance(results, ir.Value) else results)
            changed = True
    return changed


def replace(node: ir.Node, e: Emitter, results: Sequence[ir.Value | None]) -> None:
    """Replaces a node and its outputs with the emitted nodes and their results."""
    graph = node.graph
    assert graph is not None
    new = {value for other in e.nodes for value in other.outputs}
    old_values, new_values = [], []
    for value, result in zip(node.outputs, results, strict=False):
        if result is not None and value.name:
            # An existing value already has a name, so it can't take the output's.
            result = result if result in new else e("Identity", result)
            new.discard(result)
            old_values.append(value)
            new_values.append(result)
    ir.convenience.replace_nodes_and_values(graph, node, [node], e.nodes, old_values, new_values)
