"""Which inputs of a batch a captured step reads its symbolic sizes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import sympy
import torch
from torch.fx import Node

from .capture import Capture

__all__ = ["read_sizes_from_batch", "read_sizes_from_needed_inputs"]

aten = torch.ops.aten


def read_sizes_from_batch(found: Capture) -> None:
    """Reads symbolic sizes from the inputs of the batch: read from an activation, they would keep it alive."""
    places: dict[sympy.Expr, tuple[Node, int]] = {}
    for size, node, axis in _sizes_of(found.batch):
        places.setdefault(size, (node, axis))
    for size, node in _reads(found):
        node.args = places.get(size, node.args)


def read_sizes_from_needed_inputs(found: Capture, outputs: Iterable[Node]) -> None:
    """Reads a size that several inputs have from the one whose values most of some outputs need.

    PyTorch reads it from any of them, such as from the label, which inference would then have to feed for its size.

    Args:
        found: The captured step.
        outputs: The outputs that may be asked for without the others.
    """
    needed: Counter[Node] = Counter()
    for output in outputs:
        needed.update(_with_values_in(output) & found.batch.keys())
    best: dict[sympy.Expr, tuple[Node, int]] = {}
    for size, node, axis in _sizes_of(found.batch):
        if size not in best or needed[node] > needed[best[size][0]]:
            best[size] = (node, axis)
    for size, node in _reads(found):
        own = node.args[0]
        if isinstance(own, Node) and own in found.batch and size in best and needed[best[size][0]] > needed[own]:
            node.args = best[size]


def _with_values_in(output: Node) -> set[Node]:
    """Returns all nodes whose values an output needs; not those of which it needs a size alone."""
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
