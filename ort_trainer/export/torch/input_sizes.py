"""Chooses the batch inputs from which a captured step reads its symbolic sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import sympy
import torch
from torch.fx import Node

from .capture import Capture

__all__ = ["read_sizes_from_batch", "read_sizes_from_needed_inputs"]

aten = torch.ops.aten


def read_sizes_from_batch(found: Capture) -> None:
    """Makes the graph read symbolic sizes from batch inputs: reading from an activation would keep it alive."""
    places: dict[sympy.Expr, tuple[Node, int]] = {}
    for size, node, axis in _sizes_of(found.batch):
        places.setdefault(size, (node, axis))
    for size, node in _reads(found):
        node.args = places.get(size, node.args)


def read_sizes_from_needed_inputs(found: Capture, outputs: Iterable[Node]) -> None:
    """Makes the graph read a size that several inputs have from one whose values are needed wherever the size is.

    PyTorch may read it from any of them, such as the label, which inference would then have to feed only for its size.

    Args:
        found: The captured step.
        outputs: The outputs that may be fetched without the others.
    """
    needed = [_with_values_in(output) for output in outputs]
    places: dict[sympy.Expr, list[tuple[Node, int]]] = {}
    for size, node, axis in _sizes_of(found.batch):
        places.setdefault(size, []).append((node, axis))
    for size, node in _reads(found):
        readers = [nodes for nodes in needed if node in nodes]
        if node.args[0] not in found.batch or all(node.args[0] in nodes for nodes in readers):
            continue
        better = [place for place in places.get(size, ()) if all(place[0] in nodes for nodes in readers)]
        if better:
            node.args = better[0]


def _with_values_in(output: Node) -> set[Node]:
    """Returns all nodes whose values an output needs, including reads of sizes, but not the tensors read for size."""
    seen: set[Node] = set()
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(() if node.target == aten.sym_size.int else node.all_input_nodes)
    return seen


def _sizes_of(nodes: Iterable[Node]) -> Iterator[tuple[sympy.Expr, Node, int]]:
    for node in nodes:
        for axis, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                yield size.node.expr, node, axis


def _reads(found: Capture) -> Iterator[tuple[sympy.Expr, Node]]:
    for node in found.module.graph.find_nodes(op="call_function", target=aten.sym_size.int):
        size = node.meta["val"]
        if isinstance(size, torch.SymInt):
            yield size.node.expr, node
