"""``NamedGraph``: a graph with the names that a step gives its inputs and results; and where its sizes can be read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..engine.torch_memory import shaped
from ..fx.symbols import SymbolNames
from ..fx.values import tensors_of
from ..step import SIZES

Node = torch.fx.Node
Sizes = Mapping[str, tuple[Node, int]]
"""Symbolic size -> an input and an axis that have it."""


@dataclass
class NamedGraph:
    """A graph, in its final form, whose inputs and results have the names that a step gives them.

    Attributes:
        module: The graph.
        inputs: Placeholders with the names of the graph's inputs, in order.
        results: Nodes with the names of the graph's outputs, in order.
        constants: Placeholder -> value.
        symbols: The symbolic sizes.
        sizes: Where symbolic sizes can be read.
        shapes: Name of an input or output -> its described shape.
        ordered: The inputs and results that keep their order in memory; others are contiguous.
        unfetched: Places of results that are probably not fetched.
        checked: The inputs that are checked before a run, where they are indices.
        separable: Whether runs may leave out results with all that only they need, such as a loss with its label.
    """

    module: torch.fx.GraphModule
    inputs: Sequence[tuple[Node, str]]
    results: Sequence[tuple[Node, str]]
    constants: Mapping[Node, torch.Tensor]
    symbols: SymbolNames
    sizes: Sizes = field(default_factory=dict)
    shapes: Mapping[str, Sequence[int | str]] = field(default_factory=dict)
    ordered: Collection[Node] = ()
    unfetched: Collection[int] = ()
    checked: Collection[Node] = ()
    separable: bool = False


def sizes_of(batch: Iterable[tuple[Node, Sequence[int | str]]]) -> Sizes:
    """Returns where the symbolic sizes of inputs can be read: size -> an input and an axis that have it.

    Args:
        batch: Inputs with their described shapes.
    """
    places: dict[str, tuple[Node, int]] = {}
    for node, shape in batch:
        for axis, size in enumerate(shape):
            if isinstance(size, str):
                places.setdefault(size, (node, axis))
    return places


def add_sizes(graph: torch.fx.Graph, sizes: Mapping[str, int | torch.SymInt]) -> tuple[Node, Sizes]:
    """Adds the input :data:`~ort_trainer.step.SIZES`; returns it, and the axis that has each of the sizes."""
    with graph.inserting_before(next(iter(graph.nodes))):
        node = graph.placeholder(SIZES)
    with next(value for other in graph.nodes for value in tensors_of(other)).fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = shaped(sizes.values())
    return node, {name: (node, axis) for axis, name in enumerate(sizes, 1)}
