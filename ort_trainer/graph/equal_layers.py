"""Differentiates one of several equal layers and copies its joint graph: AOTAutograd is an export's longest station.

Before AOTAutograd sees a captured program, each of several equal layers becomes one operator. Afterwards, this operator
and that of its gradient become copies of the joint graph of one layer::

    embedding -> [layer.0] -> [layer.1] -> ... -> loss    =>    embedding -> layer -> layer -> ... -> loss

A layer is what the modules of one entry of a list compute (``encoder.layer.0``). Layers are equal if they have the same
operators with the same arguments, on inputs of the same shapes, strides and dtypes that require grad alike. A gradient
to which several layers add is summed layer by layer, so its rounding may differ from PyTorch's.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..capture.capture import CHECKPOINT
from ..fx.values import base_of, is_tensor, tensors_of

Node = torch.fx.Node
Differentiate = Callable[[torch.nn.Module, Sequence[torch.Tensor]], torch.fx.GraphModule]

_STACK, _FORWARD_STACK = "nn_module_stack", "fwd_nn_module_stack"
_ENTRY = re.compile(r".*\.\d+")
# Parts of the names of operators that change buffers, although their signatures don't say so.
_CHANGE_BUFFERS = ("batch_norm", "instance_norm")
# Layers of fewer operators are not worth folding.
_ENOUGH = 8


@dataclass
class _Layer:
    """A layer in a captured graph.

    Attributes:
        path: The path of its module.
        nodes: Its operators, in order.
        inputs: The tensors that it takes.
        results: The operators whose values are used outside of the layer.
    """

    path: str
    nodes: list[Node]
    inputs: list[Node]
    results: list[Node]


@dataclass
class _Kind:
    """What equal layers have in common, and the joint graph of one of them.

    Attributes:
        path: The path of the first layer.
        results: Fake tensors like its results.
        trained: Positions of the inputs that require grad.
        inputs, gradients: Placeholders of the joint graph, in the order of the inputs and results.
        forward, backward: Its operators, in order.
        outputs, input_gradients: What it returns: its results, and the gradients of trained inputs, by their positions.
    """

    path: str
    results: list[torch.Tensor]
    trained: list[int]
    inputs: dict[int, Node] = field(default_factory=dict)
    gradients: dict[int, Node] = field(default_factory=dict)
    forward: list[Node] = field(default_factory=list)
    backward: list[Node] = field(default_factory=list)
    outputs: dict[int, Node] = field(default_factory=dict)
    input_gradients: dict[int, Node] = field(default_factory=dict)


# Of the export that is running. A global, as operators take only numbers and strings; BORROWED keeps exports apart.
_kinds: list[_Kind] = []


def _like(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns new tensors of the same sizes, strides and dtypes."""
    return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]


_library: Any = torch.library.Library("ort_trainer_layers", "DEF")  # type: ignore[no-untyped-call]
_library.define("forward(Tensor[] values, int kind, str path) -> Tensor[]")
_library.define("backward(Tensor[] values, Tensor[] gradients, int kind, str path) -> Tensor[]")
_forward, _backward = torch.ops.ort_trainer_layers.forward.default, torch.ops.ort_trainer_layers.backward.default


@torch.library.register_fake("ort_trainer_layers::forward", lib=_library)  # type: ignore[untyped-decorator]
def _fake_forward(values: Sequence[torch.Tensor], kind: int, path: str) -> list[torch.Tensor]:
    return _like(_kinds[kind].results)


@torch.library.register_fake("ort_trainer_layers::backward", lib=_library)  # type: ignore[untyped-decorator]
def _fake_backward(values: Sequence[torch.Tensor], gradients: Any, kind: int, path: str) -> list[torch.Tensor]:
    return _like([node.meta["val"] for _, node in sorted(_kinds[kind].input_gradients.items())])


class _AsOne(torch.autograd.Function):
    """A layer as one operator, whose gradient is one operator, too."""

    @staticmethod
    def forward(ctx: Any, kind: int, path: str, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ctx.save_for_backward(*values)
        ctx.kind, ctx.path = kind, path
        return tuple(_forward(values, kind, path))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        values, trained = ctx.saved_tensors, _kinds[ctx.kind].trained
        by_place = dict(zip(trained, _backward(values, gradients, ctx.kind, ctx.path), strict=True))
        return None, None, *map(by_place.get, range(len(values)))


class EqualLayers:
    """The equal layers of a captured program, each folded into one operator.

    Args:
        program: The program, in which they are folded.
        differentiate: Returns the joint graph of a module for inputs, as AOTAutograd makes it.
    """

    def __init__(self, program: torch.fx.GraphModule, differentiate: Differentiate) -> None:
        _kinds.clear()
        self._program, self._differentiate = program, differentiate
        self._trained = _requiring_grad(program)
        self._now: dict[Node, Node] = {}  # result of a folded layer -> the node that replaces it
        alike: dict[str, list[_Layer]] = {}
        for path, nodes in _entries_of_lists(program.graph):
            layer = self._layer(path, nodes)
            if layer is not None:
                alike.setdefault(self._signature(layer), []).append(layer)
        several = [layers for layers in alike.values() if len(layers) > 1]
        foldable = [(layers, kind) for layers in several if (kind := self._kind(layers[0])) is not None]
        for number, (layers, kind) in enumerate(foldable):
            _kinds.append(kind)
            for layer in layers:
                self._fold(layer, number)
        if _kinds:
            program.recompile()

    def _layer(self, path: str, nodes: list[Node]) -> _Layer | None:
        """Returns a layer; None if it has too few operators, or does more than compute new tensors."""
        within = set(nodes)
        inputs = dict.fromkeys(source for node in nodes for source in _sources(node) if source not in within)
        results = [node for node in nodes if not within.issuperset(_readers(node))]
        # The results of an operator must not share memory with its inputs, nor with each other.
        bases = {base_of(node) for node in results}
        fine = (
            len(nodes) >= _ENOUGH
            and all(map(_only_computes, nodes))
            and all(is_tensor(node) and node in self._trained for node in results)
            and bases <= within
            and len(bases) == len(results)
        )
        return _Layer(path, nodes, list(inputs), results) if fine else None

    def _signature(self, layer: _Layer) -> str:
        """Returns a text that is the same for equal layers."""
        names = {node: f"%{number}" for number, node in enumerate((*layer.inputs, *layer.nodes))}

        def name(node: Node) -> str:
            return names.get(node) or str(node.meta["val"])  # a symbolic size

        kinds = [(node.meta["val"], node in self._trained) for node in layer.inputs]
        lines = [f"{value.dtype} {value.shape} {value.stride()} {trained}" for value, trained in kinds]
        for node in layer.nodes:
            of_torch = isinstance(node.target, torch._ops.OpOverload)
            target = node.target if of_torch else getattr(node.target, "__name__", node.target)
            arguments = torch.fx.map_arg((node.args, tuple(node.kwargs.items())), name)
            lines.append(f"{target} {arguments} {node in self._trained}")
        return "\n".join([*lines, *(names[node] for node in layer.results)])

    def _kind(self, layer: _Layer) -> _Kind | None:
        """Differentiates a layer and returns its kind.

        None if an input has no gradient, the joint graph has constants, or a result has other strides than in the
        captured program.
        """
        values = _like([node.meta["val"] for node in layer.inputs])
        for node, value in zip(layer.inputs, values, strict=True):
            value.requires_grad_(node in self._trained)
        trained = [place for place, value in enumerate(values) if value.requires_grad]
        kind = _Kind(layer.path, [node.meta["val"] for node in layer.results], trained)
        joint = self._differentiate(_module_of(layer), values)
        for node in joint.graph.nodes:
            what = node.meta.get("desc")  # AOTAutograd's descriptor: of an input, or of the gradient of an output
            if node.op == "placeholder":
                of_result = getattr(what, "output", None)
                (kind.inputs if of_result is None else kind.gradients)[(of_result or what).idx] = node
            elif node.op == "call_function":
                backward = node.meta.get("partitioner_tag") == "is_backward"
                (kind.backward if backward else kind.forward).append(node)
            elif node.op == "get_attr":
                return None
        (end,) = joint.graph.find_nodes(op="output")
        for what, node in zip(end.meta["desc"], end.args[0], strict=True):
            of_input = getattr(what, "grad_of", None)
            if isinstance(node, Node):
                (kind.outputs if of_input is None else kind.input_gradients)[(of_input or what).idx] = node
        results = [node.meta["val"] for _, node in sorted(kind.outputs.items())]
        alike = str([each.stride() for each in results]) == str([each.stride() for each in kind.results])
        return kind if alike and len(kind.input_gradients) == len(trained) else None

    def _fold(self, layer: _Layer, number: int) -> None:
        """Replaces a layer by one operator."""
        graph, within = self._program.graph, set(layer.nodes)
        first, last = layer.nodes[0], layer.nodes[-1]
        # With the computation of sizes, which is not a part of the layer; later operators may need these sizes.
        between = list(itertools.takewhile(lambda node: node is not last.next, _from(first)))

        def apply(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return _AsOne.apply(number, layer.path, *values)  # type: ignore[no-any-return, no-untyped-call]

        apply.__name__ = apply.__qualname__ = f"layer_{number}"
        with graph.inserting_after(last):
            call = graph.call_function(apply, tuple(self._now.get(node, node) for node in layer.inputs))
        call.meta = {"val": tuple(node.meta["val"] for node in layer.results), _STACK: last.meta[_STACK]}
        for place, node in enumerate(layer.results):
            with graph.inserting_after(call):
                item = graph.call_function(operator.getitem, (call, place))
            item.meta = dict(node.meta)
            self._now[node] = item
            node.replace_all_uses_with(item, lambda user: user not in between)
        for node in reversed(between):
            if node in within or not (node.users or tensors_of(node)):
                graph.erase_node(node)

    def unfold(self, joint: torch.fx.GraphModule) -> None:
        """Replaces the operators of layers in the program's joint graph by copies of the layers' joint graphs."""
        # By layer, as the backward part reads what the forward part has computed.
        copies: dict[str, dict[Node, Node]] = {}
        sizes: dict[Any, Node] = {}  # expression -> the first node that computes it, for all copies
        for node in list(joint.graph.nodes):
            if _is_size(node):
                sizes.setdefault(node.meta["val"].node.expr, node)
            if node.target not in (_forward, _backward):
                continue
            *tensors, number, path = node.args
            kind, (*_, values) = _kinds[number], tensors
            copied = copies.setdefault(path, {})
            backward = node.target is _backward
            copied |= {place: values[at] for at, place in (kind.gradients if backward else kind.inputs).items()}
            with joint.graph.inserting_before(node):
                for part in kind.backward if backward else kind.forward:
                    if _is_size(part) and (size := sizes.get(part.meta["val"].node.expr)) is not None:
                        copied[part] = size
                        continue
                    copied[part] = joint.graph.node_copy(part, copied.__getitem__)
                    if _is_size(part):
                        sizes[part.meta["val"].node.expr] = copied[part]
                    copied[part].meta |= _moved(part.meta, kind.path, path)
            places = kind.trained if backward else range(len(kind.results))
            results = kind.input_gradients if backward else kind.outputs
            for item in list(node.users):
                item.replace_all_uses_with(copied[results[places[item.args[1]]]])
                joint.graph.erase_node(item)
            joint.graph.erase_node(node)
        _kinds.clear()


def _moved(meta: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Returns the metadata of an operator that is copied from one layer to another: its modules and sequence number.

    ``seq_nr`` connects an operator of the forward pass with its gradient's. It differs between layers, as do the keys
    of modules.
    """
    moved: dict[str, Any] = {"seq_nr": f"{new} {meta['seq_nr']}"} if "seq_nr" in meta else {}
    for stack in (_STACK, _FORWARD_STACK):
        modules: dict[str, tuple[str, Any]] = {}
        for key, (path, kind) in (meta.get(stack) or {}).items():
            if path == old or path.startswith(f"{old}."):
                modules[f"{key} in {new}"] = new + path.removeprefix(old), kind
            else:
                modules[key] = path, kind
        if modules:
            moved[stack] = modules
    return moved


def _from(node: Node) -> Iterator[Node]:
    """Yields a node and all that follow it in the graph."""
    while True:
        yield node
        node = node.next


def _entries_of_lists(graph: torch.fx.Graph) -> list[tuple[str, list[Node]]]:
    """Returns the outermost modules that are entries of lists, by path, with the operators that each runs in a row.

    Modules that run several times are left out.
    """
    operators = [node for node in graph.nodes if node.op == "call_function" and tensors_of(node)]
    runs = [(path, list(nodes)) for path, nodes in itertools.groupby(operators, entry_of_list)]
    paths = [path for path, _ in runs]
    return [(path, nodes) for path, nodes in runs if path and paths.count(path) == 1]


def entry_of_list(node: Node, otherwise: str = "") -> str:
    """Returns the path of the outermost list entry that an operator, or its gradient, belongs to; "" for none.

    Args:
        node: The operator.
        otherwise: What to return if it is not known to which modules it belongs.
    """
    stack = node.meta.get(_STACK) or node.meta.get(_FORWARD_STACK)
    if not stack:
        return otherwise
    return next(filter(_ENTRY.fullmatch, (path for path, _ in stack.values())), "")


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _beyond_sizes(node: Node, neighbours: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """Yields neighbours of an operator; for a symbolic size, the tensors it comes from, or the operators it goes to."""
    for other in neighbours(node):
        if _is_size(other):
            yield from _beyond_sizes(other, neighbours)
        else:
            yield other


_sources = functools.partial(_beyond_sizes, neighbours=operator.attrgetter("all_input_nodes"))
_readers = functools.partial(_beyond_sizes, neighbours=operator.attrgetter("users"))


def _only_computes(node: Node) -> bool:
    """Returns whether an operator changes nothing, is in no checkpoint, and has results of known sizes."""
    if node.meta.get("unbacked_bindings") or CHECKPOINT in (node.meta.get("custom") or {}):
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    if not isinstance(node.target, torch._ops.OpOverload) or node.target is torch.ops.aten.detach_.default:
        return True  # torch.export detaches constants in place
    name = node.target.overloadpacket.__name__
    return not node.target._schema.is_mutable and not any(part in name for part in _CHANGE_BUFFERS)


def _requiring_grad(program: torch.fx.GraphModule) -> set[Node]:
    """Returns the nodes whose values require grad."""
    requiring: set[Node] = set()
    for node in program.graph.nodes:
        if node.op == "get_attr":
            value = operator.attrgetter(node.target)(program)
            requires = isinstance(value, torch.Tensor) and value.requires_grad
        elif node.op == "placeholder":
            requires = is_tensor(node) and node.meta["val"].requires_grad
        else:
            floating = any(value.is_floating_point() for value in tensors_of(node))
            requires = floating and "detach" not in str(node.target) and not requiring.isdisjoint(node.all_input_nodes)
        if requires:
            requiring.add(node)
    return requiring


def _module_of(layer: _Layer) -> torch.fx.GraphModule:
    """Returns a layer as a function of its inputs."""
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for number, node in enumerate(layer.inputs):
        copies[node] = graph.placeholder(f"value_{number}")
        copies[node].meta["val"] = node.meta["val"]

    def copied(node: Node) -> Node:
        if node not in copies:  # a size
            copies[node] = graph.node_copy(node, copied)
        return copies[node]

    for node in layer.nodes:
        copies[node] = graph.node_copy(node, copied)
    graph.output(tuple(copies[node] for node in layer.results))
    return torch.fx.GraphModule(torch.nn.Module(), graph)
