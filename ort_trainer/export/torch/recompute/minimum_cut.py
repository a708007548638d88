"""Chooses elementwise operations to recompute where that saves the most memory."""

from __future__ import annotations

import math

import networkx  # type: ignore[import-untyped]
import torch

from ..symbols import size_in_bytes
from .joint_graph import PASSED, JointGraph, Node, Region, ancestors, has_tensors, is_tensor

__all__ = ["cheap_regions"]

aten = torch.ops.aten


_NORMS = frozenset({aten.native_layer_norm.default, aten.rsqrt.default})


def cheap_regions(graph: JointGraph) -> list[Region]:
    """Returns the regions of elementwise operations to recompute; a minimum cut chooses the values to keep.

    Every value is an edge whose capacity is its size in bytes. The flow runs from values that are not elementwise
    results to the backward pass. The values that the minimum cut passes through are kept.
    """
    flow = networkx.DiGraph()
    endless = math.inf
    for node in graph.candidates:
        # An operator with several results can't be cut: each result is kept or not.
        weight = _bytes(node) if is_tensor(node) else endless
        flow.add_edge((node, "in"), (node, "out"), capacity=weight)
        if not _is_cheap(node):
            flow.add_edge("source", (node, "in"), capacity=endless)
        for given in node.all_input_nodes:
            if has_tensors(given) and given.op == "call_function":
                flow.add_edge((given, "out"), (node, "in"), capacity=endless)
    read = graph.read_by_backward(graph.candidates)
    for node in read:
        flow.add_edge((node, "out"), "sink", capacity=endless)
    if not read or "source" not in flow:
        return []
    _, (_, behind) = networkx.minimum_cut(flow, "source", "sink")
    recomputed = {node for node in graph.candidates if (node, "in") in behind}
    needed = ancestors(read & recomputed, recomputed)
    # A copy that is computed from weights alone reads no ``after``, so it would be merged with its original.
    return [region for region in _connected(needed, graph) if _reads_activations(region.nodes, graph)]


def _is_cheap(node: Node) -> bool:
    if node.target in PASSED or node.target in _NORMS:
        return True
    if getattr(node.target, "__name__", "") == "getitem":
        return node.all_input_nodes[0].target in _NORMS
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _bytes(node: Node) -> int:
    value = node.meta["val"]
    parts = [value] if isinstance(value, torch.Tensor) else [part for part in value if part is not None]
    return sum(map(size_in_bytes, parts))


def _reads_activations(nodes: set[Node], graph: JointGraph) -> bool:
    given = {source for node in nodes for source in node.all_input_nodes} - nodes
    return any(is_tensor(source) and source not in graph.free for source in given)


def _connected(nodes: set[Node], graph: JointGraph) -> list[Region]:
    """Returns the connected parts of a set of nodes."""
    region_of: dict[Node, Region] = {}
    for node in sorted(nodes, key=graph.position.__getitem__):
        region = region_of[node] = Region({node})
        for given in node.all_input_nodes:
            other = region_of.get(given)
            if other is not None and other is not region:
                region.nodes |= other.nodes
                region_of.update(dict.fromkeys(other.nodes, region))
    return list({id(region): region for region in region_of.values()}.values())
