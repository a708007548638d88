"""Replaces nodes of a model by what rules make of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import onnx_ir as ir

from ...errors import ExportError
from ...graph.emitter import FINAL, Emitter
from ...graph.names import Names
from .gradient import has_user_gradient
from .nodes import dtype_of

__all__ = ["Rule", "replace", "rewrite"]

Rule = Callable[[ir.Node, Emitter], ir.Value | Sequence[ir.Value | None] | None]
"""Emits what replaces a node and returns its results, of which None is one that nobody uses; None leaves the node."""


def rewrite(
    model: ir.Model,
    rules: Mapping[str, Rule],
    only: Collection[ir.Node] | None = None,
    refused: dict[ir.Node, str] | None = None,
) -> bool:
    """Replaces nodes by what rules make of them, in place. Names, types and shapes of their results stay.

    Args:
        model: The model.
        rules: Operator -> rule.
        only: The nodes to look at; None for all.
        refused: Gets the nodes for which a rule has an error instead, with its message; None to raise it.

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
    """Puts what was emitted, and its results, into the place of a node and its outputs."""
    graph = node.graph
    assert graph is not None
    new = {value for other in e.nodes for value in other.outputs}
    old_values, new_values = [], []
    for value, result in zip(node.outputs, results, strict=False):
        if result is not None and value.name:
            # What was there before has a name already, and can't take another one.
            result = result if result in new else e("Identity", result)
            new.discard(result)
            old_values.append(value)
            new_values.append(result)
    ir.convenience.replace_nodes_and_values(graph, node, [node], e.nodes, old_values, new_values)
