"""A joint graph, divided into forward and backward pass, and parts of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch

from ..capture import Capture

__all__ = ["PASSED", "JointGraph", "Node", "Region", "ancestors", "has_tensors", "is_tensor"]

aten = torch.ops.aten
Node = torch.fx.Node


# These pass elements on unchanged; they occur between a softmax, its dropout and the product with the values.
PASSED = frozenset(
    {
        aten._to_copy.default,
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.reshape.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.view.default,
    }
)


@dataclass
class Region:
    """Nodes that are recomputed together.

    Attributes:
        nodes: The nodes.
        keep_results: Whether to keep values that the rest of the forward pass reads: a layer's results are the next
            layer's input, which is kept anyway.
    """

    nodes: set[Node] = field(default_factory=set)
    keep_results: bool = False


class JointGraph:
    """A joint graph, divided into the nodes that depend on the loss scale (``backward``) and those that do not."""

    def __init__(self, found: Capture, random: Collection[Node]) -> None:
        assert found.tangent is not None
        self.graph = found.module.graph
        self.position = {node: number for number, node in enumerate(self.graph.nodes)}
        self.backward = {found.tangent}
        for node in self.graph.nodes:
            if any(source in self.backward for source in node.all_input_nodes):
                self.backward.add(node)
        (end,) = self.graph.find_nodes(op="output")
        self.backward.discard(end)
        self.forward = ancestors([*found.outputs, *found.buffer_updates.values()])
        self.results = {*found.gradients.values()}
        noises = self.graph.find_nodes(op="call_function", target=torch.ops.ort_trainer.noise.default)
        self.random = frozenset(random) | {*noises}
        # Always in memory: reading them again keeps nothing alive.
        self.free = {*found.state, *found.constants, *self.random}
        self.candidates = [
            n
            for n in self.position
            if n.op == "call_function" and n not in self.backward | self.random and has_tensors(n)
        ]

    def read_by_backward(self, nodes: Iterable[Node]) -> set[Node]:
        """Returns which of some nodes must be kept for the backward pass."""
        return {node for node in nodes if any(user in self.backward and has_tensors(user) for user in node.users)}


def is_tensor(node: Node) -> bool:
    """Returns whether a node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def has_tensors(node: Node) -> bool:
    """Returns whether a node's value is one or several tensors, not a size."""
    return isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def ancestors(nodes: Iterable[Node], within: Collection[Node] | None = None) -> set[Node]:
    """Returns some nodes and everything that they are computed from, within a set."""
    found: set[Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found and (within is None or node in within):
            found.add(node)
            todo += node.all_input_nodes
    return found
