"""Copies the regions to recompute into the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ....step import RandomInput
from ..capture import Capture
from ..checkpoint_marks import CHECKPOINT
from ..input_sizes import read_sizes_from_batch
from ..operators.execution_order import AFTER
from ..step_module import RecomputeOptions
from .joint_graph import JointGraph, Node, Region, ancestors, has_tensors, is_tensor
from .minimum_cut import cheap_regions
from .model_parts import attention_dropouts, gelus, layers

__all__ = ["apply_recompute", "asks_for_recomputation"]


def asks_for_recomputation(options: RecomputeOptions, found: Capture) -> bool:
    """Returns whether :func:`apply_recompute` has anything to do."""
    marked = any(CHECKPOINT in (node.meta.get("custom") or {}) for node in found.module.graph.nodes)
    return marked or options != RecomputeOptions()


def apply_recompute(
    options: RecomputeOptions, found: Capture, random: Mapping[Node, RandomInput], model: nn.Module
) -> None:
    """Makes the backward pass of a joint graph recompute what the options name and what the model checkpoints.

    The model does so with ``torch.utils.checkpoint``.

    Args:
        options: The options.
        found: The captured graph, which is modified.
        random: Placeholders of random numbers.
        model: The user's model, from which layers are found.

    Raises:
        ExportError: If an option names something that the model does not have.
    """
    graph = JointGraph(found, random)
    regions: dict[Any, Region] = {}
    taken: dict[Node, Region] = {}

    def take(key: Any, node: Node, keep_results: bool) -> None:
        if node not in taken:
            taken[node] = regions.setdefault(key, Region(keep_results=keep_results))
            taken[node].nodes.add(node)

    if options.layers:
        for node, layer in layers(graph, model, options.layer_count).items():
            take(("layer", layer), node, True)
    for node in graph.candidates:
        if (number := (node.meta.get("custom") or {}).get(CHECKPOINT)) is not None:
            take(("checkpoint", number), node, True)
    if options.attention_dropout:
        for node, dropout in attention_dropouts(graph, random).items():
            take(("attention dropout", dropout), node, False)
    if options.gelu:
        for node, activation in gelus(graph).items():
            take(("gelu", activation), node, False)
    # Unclaimed nodes that only gradients need join the region of the activation that they are computed from.
    for node in graph.candidates:
        if node not in graph.forward and node not in taken:
            for source in node.all_input_nodes:
                if source in taken and not taken[source].keep_results:
                    taken[node] = taken[source]
                    taken[node].nodes.add(node)
    if regions or options.cheap:
        read_sizes_from_batch(found)
    recompute_regions(graph, list(regions.values()))
    if options.cheap:
        graph = JointGraph(found, random)
        recompute_regions(graph, cheap_regions(graph))


def recompute_regions(graph: JointGraph, regions: list[Region]) -> None:
    """Copies every region to where the backward pass reads it first."""
    jobs = []
    for region in regions:
        inside = region.nodes
        if region.keep_results:
            results = {n for n in inside if any(u in graph.forward - inside and has_tensors(u) for u in n.users)}
            inside = inside - results
        values = graph.read_by_backward(inside)
        readers = {user for value in values for user in value.users if user in graph.backward and has_tensors(user)}
        if readers:
            jobs.append((min(graph.position[reader] for reader in readers), inside, values, readers))
    order = list(graph.position)
    waited: set[Node] = set()
    for start, inside, values, readers in sorted(jobs, key=lambda job: job[0]):
        first = order[start]
        awaited = [node for node in order[:start] if node in graph.backward and _alive(graph, node, start)]
        awaited = [node for node in awaited if node not in waited or node in first.all_input_nodes]
        waited |= {*awaited}
        if awaited:  # otherwise the backward pass begins here, and nothing is kept for long
            copies = _copy(graph, inside, values, awaited, first)
            for reader in readers:
                for value in values & {*reader.all_input_nodes}:
                    reader.replace_input_with(value, copies[value])


def _alive(graph: JointGraph, node: Node, start: int) -> bool:
    """Returns whether a gradient that is computed before a position is still needed there, or is an output."""
    if node.op == "placeholder" or not is_tensor(node) or not node.meta["val"].is_floating_point():
        return False
    return node in graph.results or any(graph.position.get(user, -1) >= start for user in node.users)


def _copy(
    graph: JointGraph, inside: set[Node], values: set[Node], awaited: list[Node], before: Node
) -> dict[Node, Node]:
    """Inserts copies of the values, and of what they are computed from within a region; returns value -> copy."""
    needed = ancestors(values, inside)
    copies: dict[Node, Node] = {}

    def source(node: Node) -> Node:
        if node not in copies and is_tensor(node) and node not in graph.free:
            copies[node] = graph.graph.call_function(AFTER, (node, awaited))
            copies[node].meta["val"] = node.meta["val"]
        return copies.get(node, node)

    with graph.graph.inserting_before(before):
        for node in sorted(needed, key=graph.position.__getitem__):
            for given in node.all_input_nodes:
                source(given)
            copies[node] = graph.graph.node_copy(node, source)
    return copies
