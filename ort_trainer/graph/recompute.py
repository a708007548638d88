"""Recomputes forward values in the backward pass instead of keeping them: trades time for memory.

Forward values that the backward pass reads must be kept between the two. A *region* is a part of the forward pass that
is recomputed: its nodes are copied to where the first gradient needs them, and the gradients read the copies. Only the
inputs of the region are kept::

    input -> region -> ... loss            input -> region -> ... loss
               |                             |
               v                    -->    after(input, gradients so far) -> copy of the region
            gradient                                                             |-> gradient

Programs of PyTorch's operators run in the order of the graph, so a copy stays where it is. ONNX Runtime would merge it
with the original, or run it during the forward pass. There it reads its inputs through the operator ``after``, which
waits for the gradients above the region, whatever order a runtime executes the nodes in.

Random numbers are inputs of the graph, so a copy has the same dropout masks as its original.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import networkx  # type: ignore[import-untyped]
import torch
from torch import nn

from ..capture.capture import CHECKPOINT
from ..capture.step_module import RecomputeOptions
from ..core.errors import ExportError, IdleOptionError
from ..fx.symbols import size_in_bytes
from ..fx.values import draws_numbers, is_tensor, needed_for, reached, tensors_of
from ..step import RandomInput
from .flat_graph import FlatGraph

_library: Any = torch.library.Library("ort_trainer", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("after(Tensor value, Tensor[] others) -> Tensor")
_library.impl("after", lambda value, others: value.clone(), "CompositeExplicitAutograd")

AFTER: Any = torch.ops.ort_trainer.after.default
"""Returns a tensor unchanged, but only after others have been computed."""

aten, ort_ops = torch.ops.aten, torch.ops.ort_trainer
Node = torch.fx.Node

# These pass elements on unchanged; they occur between a softmax, its dropout and the product with the values.
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
_GELU = ("aten.gelu.default", "aten.gelu_backward.default")
_SOFTMAX = (aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default)
# Masks of dropout, packed or of 1 byte, and noises: they are kept, as drawing them again takes long.
_DRAWN = (ort_ops.noise.default, ort_ops.noise.rate, ort_ops.draw_mask.default, ort_ops.draw_mask.rate)
_DROPOUTS = (aten.mul.Tensor, ort_ops.apply_mask.default, ort_ops.apply_mask.rate)
# The layer and the rest of the name of a weight in a submodule of a layer; the first number in it is the layer's.
_WEIGHT_OF_LAYER = re.compile(r"((?:[^.\d][^.]*\.)*\d+)\.([^.]+\..+)")
_PACKED = frozenset({torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2})
_NORMS = frozenset({aten.native_layer_norm.default, aten.rsqrt.default})


def asks_for_recomputation(options: RecomputeOptions, flat: FlatGraph) -> bool:
    """Returns whether the options or the model ask for values to be computed again."""
    marked = any(CHECKPOINT in (node.meta.get("custom") or {}) for node in flat.module.graph.nodes)
    return marked or options != RecomputeOptions()


def apply_recompute(
    options: RecomputeOptions,
    flat: FlatGraph,
    random: Mapping[Node, RandomInput],
    model: nn.Module,
    keeps_order: bool,
) -> None:
    """Makes the backward pass recompute what the options name, and what the model runs in ``torch.utils.checkpoint``.

    It also computes the floats of quantized weights again, if operators run in the order of the graph.

    Args:
        options: The options.
        flat: The captured graph, which is modified.
        random: Placeholders of random numbers.
        model: The user's model, from which layers are found.
        keeps_order: Whether operators will run in the order of the graph.

    Raises:
        ExportError: If an option names something that the model does not have.
    """
    packed = keeps_order and any(map(_is_packed, (*flat.state, *flat.constants)))
    if not packed and not asks_for_recomputation(options, flat):
        return
    graph = _JointGraph(flat, random)
    regions = _regions(options, graph, random, model) + (_unpacked(graph) if packed else [])
    if regions or options.cheap:
        flat.read_sizes_from_batch()
    copies = _recompute_regions(graph, regions, keeps_order)
    if options.cheap:
        graph = _JointGraph(flat, random, copies)
        _recompute_regions(graph, _cheap_regions(graph), keeps_order)


def values_to_recompute(
    options: RecomputeOptions, flat: FlatGraph, random: Mapping[Node, RandomInput], model: nn.Module
) -> set[Node]:
    """Returns the forward values that a separate backward pass computes again; see :func:`apply_recompute`."""
    graph = _JointGraph(flat, random)
    regions = _regions(options, graph, random, model) + (_cheap_regions(graph) if options.cheap else [])
    regions += _unpacked(graph)
    return set().union(*(_inside(graph, region) for region in regions))


def _regions(
    options: RecomputeOptions, graph: _JointGraph, random: Mapping[Node, RandomInput], model: nn.Module
) -> list[_Region]:
    """Returns the regions that the options name and the model checkpoints."""
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
    # Unclaimed nodes that only gradients need join the region of the activation that they are computed from.
    for node in graph.candidates:
        if node not in graph.forward and node not in taken:
            for source in node.all_input_nodes:
                if source in taken and not taken[source].keep_results:
                    taken[node] = taken[source]
                    taken[node].nodes.add(node)
    return list(regions.values())


@dataclass
class _Region:
    """Nodes that are recomputed together.

    Attributes:
        nodes: The nodes.
        keep_results: Whether to keep values that the rest of the forward pass reads: a layer's results are the next
            layer's input, which is kept anyway.
    """

    nodes: set[Node] = field(default_factory=set)
    keep_results: bool = False


class _JointGraph:
    """A joint graph, divided into the nodes that run in the backward pass (``backward``) and the others.

    Args:
        flat: The graph.
        random: Placeholders of random numbers.
        copies: What the backward pass computes again; all else in it depends on tangents.
    """

    def __init__(self, flat: FlatGraph, random: Collection[Node], copies: Iterable[Node] = ()) -> None:
        self.graph = flat.module.graph
        self.position = {node: number for number, node in enumerate(self.graph.nodes)}
        self.backward = {*flat.tangents, *copies}
        for node in self.graph.nodes:
            if any(source in self.backward for source in node.all_input_nodes):
                self.backward.add(node)
        (end,) = self.graph.find_nodes(op="output")
        self.backward.discard(end)
        updates = (*flat.buffer_updates.values(), *flat.input_updates.values())
        self.forward = needed_for([*flat.outputs, *flat.conditions, *updates], sizes=True)
        self.results = {*flat.gradients.values()}
        drawn = (self.graph.find_nodes(op="call_function", target=operator) for operator in _DRAWN)
        drawn_by_device = (node for node in self.graph.nodes if draws_numbers(node))
        self.random = frozenset(random).union(drawn_by_device, *drawn)
        self.state, self.constants = flat.state, flat.constants
        # Always in memory: reading them again keeps nothing alive.
        self.free = {*flat.state, *flat.constants, *self.random}
        self.candidates = [
            n
            for n in self.position
            if n.op == "call_function" and n not in self.backward | self.random and tensors_of(n)
        ]

    def read_by_backward(self, nodes: Iterable[Node]) -> set[Node]:
        """Returns which of some nodes must be kept for the backward pass."""
        return {node for node in nodes if any(user in self.backward and tensors_of(user) for user in node.users)}


def _inside(graph: _JointGraph, region: _Region) -> set[Node]:
    """Returns the nodes of a region that are recomputed."""
    if not region.keep_results:
        return region.nodes
    # What the forward pass reads outside of the region is kept: it is the next layer's input.
    outside = graph.forward - region.nodes
    return {n for n in region.nodes if not any(user in outside and tensors_of(user) for user in n.users)}


def _recompute_regions(graph: _JointGraph, regions: list[_Region], keeps_order: bool) -> list[Node]:
    """Copies every region to where the backward pass reads it first; returns the copies."""
    jobs = []
    all_copies: list[Node] = []
    for region in regions:
        inside = _inside(graph, region)
        values = graph.read_by_backward(inside)
        readers = {user for value in values for user in value.users if user in graph.backward and tensors_of(user)}
        if readers:
            jobs.append((min(graph.position[reader] for reader in readers), inside, values, readers))
    order = list(graph.position)
    waited: set[Node] = set()
    for start, inside, values, readers in sorted(jobs, key=lambda job: job[0]):
        first = order[start]
        awaited = [node for node in order[:start] if node in graph.backward and _alive(graph, node, start)]
        # Each gradient is waited for by the first region behind it; later regions wait for newer gradients.
        awaited = [node for node in awaited if node not in waited or node in first.all_input_nodes]
        waited |= {*awaited}
        if awaited:  # otherwise the backward pass begins here, and nothing is kept for long
            copies = _copy(graph, inside, values, [] if keeps_order else awaited, first)
            all_copies += copies.values()
            for reader in readers:
                for value in values & {*reader.all_input_nodes}:
                    reader.replace_input_with(value, copies[value])
    return all_copies


def _alive(graph: _JointGraph, node: Node, start: int) -> bool:
    """Returns whether a gradient that is computed before a position is still needed there, or is an output."""
    if node.op == "placeholder" or not is_tensor(node) or not node.meta["val"].is_floating_point():
        return False
    return node in graph.results or any(graph.position.get(user, -1) >= start for user in node.users)


def _copy(
    graph: _JointGraph, inside: set[Node], values: set[Node], awaited: list[Node], before: Node
) -> dict[Node, Node]:
    """Inserts copies of the values, and of what they are computed from within a region.

    Args:
        graph: The graph.
        inside: The region.
        values: The values.
        awaited: What the copies wait for; nothing if it is empty.
        before: Where they are inserted.

    Returns:
        Value -> copy.
    """
    # Also what only gradients need, such as the mean in the gradient of a standard deviation, may come later.
    later = {node for node in graph.candidates if graph.position[node] > graph.position[before]}
    needed = reached(values, lambda node: (inside | later).intersection(node.all_input_nodes))
    copies: dict[Node, Node] = {}

    def source(node: Node) -> Node:
        if awaited and node not in copies and is_tensor(node) and node not in graph.free:
            copies[node] = graph.graph.call_function(AFTER, (node, awaited))
            copies[node].meta["val"] = node.meta["val"]
        return copies.get(node, node)

    with graph.graph.inserting_before(before):
        for node in sorted(needed, key=graph.position.__getitem__):
            for operand in node.all_input_nodes:
                source(operand)
            copies[node] = graph.graph.node_copy(node, source)
    return copies


def _layers(graph: _JointGraph, model: nn.Module, count: int) -> dict[Node, str]:
    """Returns the nodes of the layers to recompute, each with its layer.

    Layers are several modules of one class, each with submodules, in a ``ModuleList`` or ``Sequential``. If they are
    nested, the outermost ones count. In an ONNX model, or beside a custom ``autograd.Function``, nodes are in no
    modules, but weights have their names.
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
    layer_of = layer_of or _layers_by_weights(graph)
    # A layer that is called twice counts twice; nodes that only gradients need come late, so their order means nothing.
    layers = list(dict.fromkeys(key for node, key in layer_of.items() if node in graph.forward))
    if not layers:
        raise IdleOptionError(
            "graph_transformer.transformer_layer_recompute",
            "the graph has no layers. Layers are several modules of one "
            "class, each with submodules, in a torch.nn.ModuleList or Sequential; of an ONNX model, what weights with "
            "such names compute. Leave the option out, or use torch.utils.checkpoint in forward(), which is recomputed "
            "too",
        )
    if count > len(layers):
        raise ExportError(
            f"graph_transformer.number_recompute_layers is {count}, but the graph has {len(layers)} layers: give at "
            f"most {len(layers)}, or 0 for all but the last"
        )
    chosen = {*layers[: count or -1]}
    if not chosen:
        raise IdleOptionError(
            "graph_transformer.transformer_layer_recompute",
            "by default all layers but the last are recomputed, and "
            "the graph has only one: leave the option out, or set graph_transformer.number_recompute_layers to 1",
        )
    return {node: key for node, key in layer_of.items() if key in chosen}


def _layers_by_weights(graph: _JointGraph) -> dict[Node, str]:
    """Returns the nodes of the layers whose weights have names like ``layers.0.norm.bias``, each with its layer.

    A layer begins with the first node that uses one of its weights, and ends where the next one begins::

        embedding -> norm (layers.0.norm) -> product -> add -> norm (layers.1.norm) -> product -> add -> head
                     `------------ layers.0 ------------'      `------------ layers.1 -------------- ...
    """
    weights_of: dict[str, set[str]] = {}
    for name in graph.state.values():
        if match := _WEIGHT_OF_LAYER.fullmatch(name):
            weights_of.setdefault(match[1], set()).add(match[2])
    alike = Counter((layer.rpartition(".")[0], frozenset(weights)) for layer, weights in weights_of.items())
    layers = {name for name, weights in weights_of.items() if alike[name.rpartition(".")[0], frozenset(weights)] > 1}
    layer_of: dict[Node, str] = {}
    current = ""
    begun: set[str] = set()
    for node in graph.candidates:
        sources = node.all_input_nodes
        if node not in graph.forward:  # only gradients need it: it belongs where its source does
            if sources and sources[0] in layer_of:
                layer_of[node] = layer_of[sources[0]]
            continue
        for source in sources:
            match = _WEIGHT_OF_LAYER.fullmatch(graph.state.get(source, ""))
            if match and match[1] in layers - begun:
                current = match[1]
                begun.add(current)
        if current:
            layer_of[node] = current
    return layer_of


def _attention_dropouts(graph: _JointGraph, random: Mapping[Node, RandomInput]) -> dict[Node, Node]:
    """Returns the dropouts of softmax results and the nodes that pass them on, each with its dropout."""
    masks = {node for node in graph.random if node not in random or random[node].kind in ("bernoulli", "mask")}
    dropouts: dict[Node, Node] = {}
    for node in graph.candidates:
        if node.target in _DROPOUTS and node in graph.forward:
            operands = [source for source in node.all_input_nodes if source not in graph.free]
            if len(operands) == 1 and masks & {*node.all_input_nodes} and _is_softmax(operands[0]):
                dropouts[node] = node
        elif node.target in _PASSED and node.all_input_nodes[0] in dropouts:
            dropouts[node] = dropouts[node.all_input_nodes[0]]
    if not dropouts:
        raise IdleOptionError(
            "graph_transformer.attn_dropout_recompute",
            "the training graph has no dropout on the result of a softmax "
            "(dropout with p=0 does not count): leave the option out",
        )
    return dropouts


def _is_softmax(node: Node) -> bool:
    """Returns whether a value is the result of a softmax, through operators that pass elements on."""
    while node.target in _PASSED or node.target is aten.where.self:
        # where() is the part of a softmax that handles fully masked rows.
        node = node.args[2 if node.target is aten.where.self else 0]  # type: ignore[assignment]
    return node.target in _SOFTMAX


def _gelus(graph: _JointGraph) -> dict[Node, Any]:
    """Returns the nodes of GELU activations, each with its activation: PyTorch's operator, or a module of that name.

    Nodes that pass the result on to the next product belong to it, including dropout: gradients need the product's
    input.
    """
    activations: dict[Node, Any] = {}
    for node in graph.candidates:
        modules = [key for key, (_, kind) in _module_stack(node).items() if "gelu" in _class_name(kind).lower()]
        if modules:
            activations[node] = modules[-1]
        elif str(node.meta.get("original_aten")) in _GELU:  # a copy of the operator, so compare names
            activations[node] = node.meta.get("seq_nr")
        elif node.target in _PASSED or (node.target in _DROPOUTS and graph.random & {*node.all_input_nodes}):
            source = next((source for source in node.all_input_nodes if source in activations), None)
            if source is not None:
                activations[node] = activations[source]
    if not activations:
        raise IdleOptionError(
            "graph_transformer.gelu_recompute",
            "the training graph has no GELU, neither torch.nn.functional.gelu nor a "
            "module with gelu in the name of its class: leave the option out",
        )
    return activations


def _module_stack(node: Node) -> Mapping[str, tuple[str, Any]]:
    return node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}


def _class_name(kind: Any) -> str:
    return str(kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]


def _within(name: str, path: str) -> bool:
    """Returns whether a module is another one or a part of it, judging by their paths."""
    return name == path or name.startswith(f"{path}.")


def _cheap_regions(graph: _JointGraph) -> list[_Region]:
    """Returns the regions of elementwise operations to recompute; a minimum cut chooses the values to keep.

    Every value is an edge whose capacity is its size in bytes; the edges of the minimum cut are the values to keep::

        source --(endless)--> [x in --(bytes of x)--> x out] --(endless)--> [y in --(bytes of y)--> y out] --> sink
        if x is not elementwise                                                   if the backward pass reads y

    ``torch._functorch.partitioners`` chooses in the same way, for graphs that ``torch.compile`` divides.
    """
    flow = networkx.DiGraph()
    endless = math.inf
    for node in graph.candidates:
        # An operator with several results can't be cut: each result is kept or not.
        weight = _bytes(node) if is_tensor(node) else endless
        flow.add_edge((node, "in"), (node, "out"), capacity=weight)
        if not _is_cheap(node):
            flow.add_edge("source", (node, "in"), capacity=endless)
        for operand in node.all_input_nodes:
            if tensors_of(operand) and operand.op == "call_function":
                flow.add_edge((operand, "out"), (node, "in"), capacity=endless)
    read = graph.read_by_backward(graph.candidates)
    for node in read:
        flow.add_edge((node, "out"), "sink", capacity=endless)
    if not read or "source" not in flow:
        return []
    _, (_, behind) = networkx.minimum_cut(flow, "source", "sink")
    recomputed = {node for node in graph.candidates if (node, "in") in behind}
    needed = reached(read & recomputed, lambda node: recomputed.intersection(node.all_input_nodes))
    # A copy that is computed from weights alone reads no ``after``, so it would be merged with its original.
    return [region for region in _connected(needed, graph) if _reads_activations(region.nodes, graph)]


def _unpacked(graph: _JointGraph) -> list[_Region]:
    """Returns the regions that turn quantized weights into floats, which take several times their memory::

    integers, scales -> floats -> product          the floats are alive during each product alone,
                `----> floats -> gradient          and the graph keeps only the integers
    """
    always = {*graph.state, *graph.constants}
    packed, of_weights = {node for node in always if _is_packed(node)}, set(always)
    unpacked: set[Node] = set()
    for node in graph.candidates:
        sources = {source for source in node.all_input_nodes if tensors_of(source)}
        if sources and sources <= of_weights:
            of_weights.add(node)
            if sources & (packed | unpacked):
                unpacked.add(node)
    return _connected(unpacked, graph)


def _is_packed(node: Node) -> bool:
    """Returns whether a tensor has a type in which weights are quantized; masks and indices have others."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in _PACKED and value.dim() > 1


def _is_cheap(node: Node) -> bool:
    """Returns whether an operator only passes over the memory once, so that repeating it costs little."""
    if node.target in (*_PASSED, *_NORMS, *_DROPOUTS):
        return True
    if getattr(node.target, "__name__", "") == "getitem":
        return node.all_input_nodes[0].target in _NORMS
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _bytes(node: Node) -> int:
    value = node.meta["val"]
    parts = [value] if isinstance(value, torch.Tensor) else [part for part in value if part is not None]
    return sum(map(size_in_bytes, parts))


def _reads_activations(nodes: set[Node], graph: _JointGraph) -> bool:
    """Returns whether a region takes anything besides weights, constants and random numbers."""
    sources = {source for node in nodes for source in node.all_input_nodes} - nodes
    return any(is_tensor(source) and source not in graph.free for source in sources)


def _connected(nodes: set[Node], graph: _JointGraph) -> list[_Region]:
    """Returns the connected parts of a set of nodes."""
    region_of: dict[Node, _Region] = {}
    for node in sorted(nodes, key=graph.position.__getitem__):
        region = region_of[node] = _Region({node})
        for source in node.all_input_nodes:
            other = region_of.get(source)
            if other is not None and other is not region:
                region.nodes |= other.nodes
                region_of.update(dict.fromkeys(other.nodes, region))
    return list({id(region): region for region in region_of.values()}.values())
