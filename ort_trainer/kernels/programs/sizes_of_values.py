"""Sizes that depend on the values of a batch, such as the number of true elements of a mask.

A program reads sizes from what it is given, so the operator that creates such a size is the last of its program, and
its result is passed to all programs that need the size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...core.dims import symbols_of
from ...fx.values import Node, is_tensor, is_view
from ...graph.named_graph import NamedGraph


class SizesOfValues:
    """Names the sizes of a graph that depend on values.

    Args:
        graph: The graph.

    Attributes:
        symbols: The symbolic sizes, with these.
        places: Name of a size -> a value and an axis that have it.
        creators: The operators that create one of these sizes.
    """

    def __init__(self, graph: NamedGraph) -> None:
        self.symbols = copy.copy(graph.symbols)  # what describes the step knows no name for them
        self.places = dict(graph.sizes)
        given = {*graph.constants, *(node for node, _ in graph.inputs)}
        for node in graph.module.graph.nodes:
            if not is_tensor(node) or is_view(node) or (node.op == "placeholder" and node not in given):
                continue
            for axis, size in enumerate(node.meta["val"].shape):
                if (
                    isinstance(size, torch.SymInt)
                    and size.node.expr.is_Symbol
                    and self.symbols.expression(size) is None
                ):
                    name = f"{node.name}.{axis}"
                    self.symbols.add(name, size)
                    self.places[name] = (node, axis)
        sources = {node for node, _ in self.places.values() if node.op == "call_function"}
        self.creators = {node.all_input_nodes[0] if _is_part(node) else node for node in sources}
        self._named = {name for name, (node, _) in self.places.items() if node in sources}

    def read_by(self, node: Node) -> set[str]:
        """Returns the names of those sizes that an operator reads, or the views that it needs."""
        if not self._named:
            return set()
        found: set[str] = set()
        waiting = [node]
        while waiting:
            reader = waiting.pop()
            waiting += filter(is_view, reader.all_input_nodes)
            for argument in pytree.tree_leaves((reader.args, reader.kwargs)):
                found.update(self._names_in(argument))
        return found & self._named

    def sources(self, nodes: Iterable[Node]) -> set[Node]:
        """Returns the values from which operators read those sizes."""
        return {self.places[name][0] for node in nodes for name in self.read_by(node)}

    def _names_in(self, argument: Any) -> Iterable[str]:
        value = argument.meta.get("val") if isinstance(argument, Node) else argument
        expression: float | str | None = None
        if isinstance(value, torch.SymInt):
            expression = self.symbols.expression(value)
        elif isinstance(value, torch.SymFloat):
            expression = self.symbols.number(value)
        return symbols_of(expression) if isinstance(expression, str) else ()


def _is_part(node: Node) -> bool:
    """Returns whether a value is one of several results of an operator."""
    return not isinstance(node.target, torch._ops.OpOverload)
