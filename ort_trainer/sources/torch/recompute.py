"""Computes forward values a second time in the backward pass instead of keeping them: memory is traded for time.

What the backward pass reads of the forward pass has to be kept between the two. A *region* is a part of the forward
pass that is recomputed: its nodes are copied to where the first gradient needs them, and the gradients read the
copies, so that of the region only its inputs are kept::

    input -> region -> ... loss            input -> region -> ... loss
               |                             |
               v                    -->    after(input, gradients so far) -> copy of the region
            gradient                                                             |-> gradient

A copy alone achieves nothing: ONNX Runtime would merge it with the original, or run it during the forward pass. So it
reads its inputs by way of the operator ``after``, which waits until the gradients above the region are done, in
whatever order a runtime executes the nodes.

Random numbers are inputs of the graph, so a copy sees the dropout masks of its original.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import networkx  # type: ignore[import-untyped]
import torch
from torch import nn

from ...errors import ExportError
from ...graph import RandomInput
from .capture import Capture
from .operators.execution_order import AFTER
from .patches import CHECKPOINT
from .step_module import RecomputeOptions
from .symbols import hint

__all__ = ["apply_recompute"]

aten = torch.ops.aten
Node = torch.fx.Node

_GELU = ("aten.gelu.default", "aten.gelu_backward.default")
_SOFTMAX = (aten._softmax.default, aten._log_softmax.default)
# These hand elements on as they are; they lie between a softmax, its dropout and the product with the values.
_PASSED = frozenset(
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
_NORMS = frozenset({aten.native_layer_norm.default, aten.rsqrt.default})


@dataclass
class _Region:
    """Nodes that are recomputed together.

    Attributes:
        nodes: The nodes.
        keep_results: Whether values that the rest of the forward pass reads are kept: those of a layer are the next
            layer's input, which is kept anyway.
    """

    nodes: set[Node] = field(default_factory=set)
    keep_results: bool = False


class _Graph:
    """A joint graph, sorted into the nodes that depend on the loss scale (``backward``) and those that do not."""

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
        self.forward = _ancestors([*found.outputs, *found.buffer_updates.values()])
        self.results = {*found.gradients.values()}
        self.random = frozenset(random)
        # Always there: reading them again keeps nothing that would go away.
        self.free = {*found.state, *found.constants, *random}
        self.candidates = [
            n for n in self.position if n.op == "call_function" and n not in self.backward and _tensors(n)
        ]

    def read_by_backward(self, nodes: Iterable[Node]) -> set[Node]:
        """Returns those of some nodes that have to be kept for the backward pass."""
        return {node for node in nodes if any(user in self.backward and _tensors(user) for user in node.users)}


def apply_recompute(
    options: RecomputeOptions, found: Capture, random: Mapping[Node, RandomInput], model: nn.Module
) -> None:
    """Changes a joint graph so that its backward pass recomputes what was asked for.

    That is what the options name, and what the model itself wraps in ``torch.utils.checkpoint``.

    Args:
        options: The options.
        found: The captured graph.
        random: Placeholders of random numbers.
        model: The user's model, which says what its layers are.

    Raises:
        ExportError: If an option asks for something that the model does not have.
    """
    graph = _Graph(found, random)
    regions: dict[Any, _Region] = {}
    taken: dict[Node, _Region] = {}

    def take(key: Any, node: Node, keep_results: bool) -> None:
        if node not in taken:
            taken[node] = regions.setdefault(key, _Region(keep_results=keep_results))
            taken[node].nodes.add(node)

    if options.layers:
        for node, layer in _layers(graph, model, options.layer_count).items():
            take(("layer", layer), node, True)
    for node in graph.candidates:
        if (number := (node.meta.get("custom") or {}).get(CHECKPOINT)) is not None:
            take(("checkpoint", number), node, True)
    if options.attention_dropout:
        for node, dropout in _attention_dropouts(graph, random).items():
            take(("attention dropout", dropout), node, False)
    if options.gelu:
        for node, activation in _gelus(graph).items():
            take(("gelu", activation), node, False)
    # What only gradients need and nobody has claimed goes with the activation that it is computed from.
    for node in graph.candidates:
        if node not in graph.forward and node not in taken:
            for source in node.all_input_nodes:
                if source in taken and not taken[source].keep_results:
                    taken[node] = taken[source]
                    taken[node].nodes.add(node)
    if regions or options.cheap:
        _read_sizes_from_batch(found)
    _recompute(graph, list(regions.values()))
    if options.cheap:
        graph = _Graph(found, random)
        _recompute(graph, _cheap_regions(graph))


def _recompute(graph: _Graph, regions: list[_Region]) -> None:
    """Copies every region to where the backward pass reads it first."""
    jobs = []
    for region in regions:
        inside = region.nodes
        if region.keep_results:
            results = {n for n in inside if any(u in graph.forward - inside and _tensors(u) for u in n.users)}
            inside = inside - results
        values = graph.read_by_backward(inside)
        readers = {user for value in values for user in value.users if user in graph.backward and _tensors(user)}
        if readers:
            jobs.append((min(graph.position[reader] for reader in readers), inside, values, readers))
    order = list(graph.position)
    waited: set[Node] = set()
    for start, inside, values, readers in sorted(jobs, key=lambda job: job[0]):
        first = order[start]
        awaited = [node for node in order[:start] if node in graph.backward and _alive(graph, node, start)]
        awaited = [node for node in awaited if node not in waited or node in first.all_input_nodes]
        waited |= {*awaited}
        if awaited:  # else the backward pass begins here, and nothing needs keeping
            copies = _copy(graph, inside, values, awaited, first)
            for reader in readers:
                for value in values & {*reader.all_input_nodes}:
                    reader.replace_input_with(value, copies[value])


def _alive(graph: _Graph, node: Node, start: int) -> bool:
    """Returns whether a gradient that is computed before a position is still needed there, or is a result."""
    if node.op == "placeholder" or not _is_tensor(node) or not node.meta["val"].is_floating_point():
        return False
    return node in graph.results or any(graph.position.get(user, -1) >= start for user in node.users)


def _copy(graph: _Graph, inside: set[Node], values: set[Node], awaited: list[Node], before: Node) -> dict[Node, Node]:
    """Inserts copies of what the values are computed from within a region; returns value -> copy."""
    needed = _ancestors(values, inside)
    copies: dict[Node, Node] = {}

    def source(node: Node) -> Node:
        if node not in copies and _is_tensor(node) and node not in graph.free:
            copies[node] = graph.graph.call_function(AFTER, (node, awaited))
            copies[node].meta["val"] = node.meta["val"]
        return copies.get(node, node)

    with graph.graph.inserting_before(before):
        for node in sorted(needed, key=graph.position.__getitem__):
            for given in node.all_input_nodes:
                source(given)
            copies[node] = graph.graph.node_copy(node, source)
    return copies


def _layers(graph: _Graph, model: nn.Module, count: int) -> dict[Node, str]:
    """Returns the nodes of the layers to recompute, each with its layer.

    Layers are the largest modules of which a ``ModuleList`` or ``Sequential`` holds several of one class, with
    modules of their own inside.
    """
    paths: set[str] = set()
    for name, container in model.named_modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)) and not any(_within(name, path) for path in paths):
            classes = Counter(type(part) for part in container.children())
            for part_name, part in container.named_children():
                if classes[type(part)] > 1 and next(part.children(), None) is not None:
                    paths.add(f"{name}.{part_name}" if name else part_name)
    layer_of: dict[Node, str] = {}
    for node in graph.candidates:
        for key, (path, _) in _module_stack(node).items():
            if path.removeprefix("model.") in paths:
                layer_of[node] = key
                break
    # A layer that is called twice counts twice; what only gradients need comes late and tells nothing of the order.
    layers = list(dict.fromkeys(key for node, key in layer_of.items() if node in graph.forward))
    if not layers:
        raise ExportError(
            "graph_transformer.transformer_layer_recompute: the graph has no layers, which are modules of one class, "
            "with modules inside, that a torch.nn.ModuleList or Sequential holds several of (and no custom "
            "autograd.Function beside them, which hides them): leave the option out, or use torch.utils.checkpoint "
            "in forward(), which is recomputed too"
        )
    if count > len(layers):
        raise ExportError(
            f"graph_transformer.number_recompute_layers is {count}, but the graph has {len(layers)} layers: give at "
            "most as many, or 0 for all but the last"
        )
    chosen = {*layers[: count or -1]}
    if not chosen:
        raise ExportError(
            "graph_transformer.transformer_layer_recompute recomputes all layers but the last, and the graph has only "
            "one: leave the option out, or set graph_transformer.number_recompute_layers to 1"
        )
    return {node: key for node, key in layer_of.items() if key in chosen}


def _attention_dropouts(graph: _Graph, random: Mapping[Node, RandomInput]) -> dict[Node, Node]:
    """Returns the dropouts of softmax results, and what only hands their results on; each node with its dropout."""
    masks = {node for node, spec in random.items() if spec.kind == "bernoulli"}
    found: dict[Node, Node] = {}
    for node in graph.candidates:
        if node.target is aten.mul.Tensor and node in graph.forward:
            given = [source for source in node.all_input_nodes if source not in masks]
            if len(given) == 1 and masks & {*node.all_input_nodes} and _is_softmax(given[0]):
                found[node] = node
        elif node.target in _PASSED and node.all_input_nodes[0] in found:
            found[node] = found[node.all_input_nodes[0]]
    if not found:
        raise ExportError(
            "graph_transformer.attn_dropout_recompute: the training graph has no dropout on the result of a softmax "
            "(a dropout with p=0 is none): leave the option out"
        )
    return found


def _is_softmax(node: Node) -> bool:
    while node.target in _PASSED or node.target is aten.where.self:
        # where() is the part of a softmax that handles rows that are masked altogether.
        node = node.args[2 if node.target is aten.where.self else 0]  # type: ignore[assignment]
    return node.target in _SOFTMAX


def _gelus(graph: _Graph) -> dict[Node, Any]:
    """Returns the nodes of GELU activations, each with its activation: PyTorch's operator, or a module of that name.

    What hands the result on to the next product belongs to it, dropout as well: it is the product's input that
    gradients need.
    """
    found: dict[Node, Any] = {}
    for node in graph.candidates:
        modules = [key for key, (_, kind) in _module_stack(node).items() if "gelu" in _class_name(kind).lower()]
        if modules:
            found[node] = modules[-1]
        elif str(node.meta.get("original_aten")) in _GELU:  # a copy of the operator, so its name tells
            found[node] = node.meta.get("seq_nr")
        elif node.target in _PASSED or (node.target is aten.mul.Tensor and graph.random & {*node.all_input_nodes}):
            source = next((source for source in node.all_input_nodes if source in found), None)
            if source is not None:
                found[node] = found[source]
    if not found:
        raise ExportError(
            "graph_transformer.gelu_recompute: the training graph has no GELU, neither torch.nn.functional.gelu nor a "
            "module with gelu in the name of its class: leave the option out"
        )
    return found


def _cheap_regions(graph: _Graph) -> list[_Region]:
    """Returns what is best recomputed by elementwise operations: a minimum cut chooses the values to keep.

    Every value is an edge as heavy as its bytes. The edges lead from the values that are no elementwise results to the
    backward pass, and what the lightest cut goes through is kept.
    """
    flow = networkx.DiGraph()
    endless = math.inf
    for node in graph.candidates:
        # Of an operator with several results, each is kept or not.
        weight = _bytes(node) if _is_tensor(node) else endless
        flow.add_edge((node, "in"), (node, "out"), capacity=weight)
        if not _is_cheap(node):
            flow.add_edge("source", (node, "in"), capacity=endless)
        for given in node.all_input_nodes:
            if _tensors(given) and given.op == "call_function":
                flow.add_edge((given, "out"), (node, "in"), capacity=endless)
    read = graph.read_by_backward(graph.candidates)
    for node in read:
        flow.add_edge((node, "out"), "sink", capacity=endless)
    if not read or "source" not in flow:
        return []
    _, (_, behind) = networkx.minimum_cut(flow, "source", "sink")
    recomputed = {node for node in graph.candidates if (node, "in") in behind}
    needed = _ancestors(read & recomputed, recomputed)
    # What is computed from the weights alone is merged again, as nothing tells the copy apart.
    return [region for region in _connected(needed, graph) if _reads_activations(region.nodes, graph)]


def _reads_activations(nodes: set[Node], graph: _Graph) -> bool:
    given = {source for node in nodes for source in node.all_input_nodes} - nodes
    return any(_is_tensor(source) and source not in graph.free for source in given)


def _connected(nodes: set[Node], graph: _Graph) -> list[_Region]:
    """Returns the connected parts of a set of nodes."""
    region_of: dict[Node, _Region] = {}
    for node in sorted(nodes, key=graph.position.__getitem__):
        region = region_of[node] = _Region({node})
        for given in node.all_input_nodes:
            other = region_of.get(given)
            if other is not None and other is not region:
                region.nodes |= other.nodes
                region_of.update(dict.fromkeys(other.nodes, region))
    return list({id(region): region for region in region_of.values()}.values())


def _is_cheap(node: Node) -> bool:
    if node.target in _PASSED or node.target in _NORMS:
        return True
    if getattr(node.target, "__name__", "") == "getitem":
        return node.all_input_nodes[0].target in _NORMS
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _read_sizes_from_batch(found: Capture) -> None:
    """Reads symbolic sizes from the inputs of the batch: read from an activation, they would keep it alive."""
    sizes: dict[Any, tuple[Node, int]] = {}
    for node in found.batch:
        for axis, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                sizes.setdefault(size.node.expr, (node, axis))
    for node in found.module.graph.find_nodes(op="call_function", target=aten.sym_size.int):
        value = node.meta["val"]
        if isinstance(value, torch.SymInt) and value.node.expr in sizes:
            node.args = sizes[value.node.expr]


def _module_stack(node: Node) -> Mapping[str, tuple[str, Any]]:
    return node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}


def _class_name(kind: Any) -> str:
    return str(kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]


def _within(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _tensors(node: Node) -> bool:
    """Returns whether a node's value is a tensor or several, and not a size."""
    return isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


def _bytes(node: Node) -> int:
    value = node.meta["val"]
    parts = [value] if isinstance(value, torch.Tensor) else [part for part in value if part is not None]
    return sum(part.element_size() * math.prod(hint(size) for size in part.shape) for part in parts)


def _ancestors(nodes: Iterable[Node], within: Collection[Node] | None = None) -> set[Node]:
    """Returns some nodes and all that they are computed from, within a set."""
    found: set[Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found and (within is None or node in within):
            found.add(node)
            todo += node.all_input_nodes
    return found
