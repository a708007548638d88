"""Plans how to run a model: which function computes each node, and when a value is needed for the last time.

Everything that can be refused without a batch is refused here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from ...core.errors import ExportError, shown
from .memory import without_data
from .registry import Node, Operator, attributes_of, find_operator
from .values import torch_dtype

__all__ = ["Constant", "Graph", "Plan", "Step", "plan_model"]


@dataclass(frozen=True)
class Step:
    """A node to run. Values have numbers, which no two values of a model share.

    Attributes:
        node: The node.
        tensors: The function for tensors.
        known: The function for known arrays, or None.
        inputs: Its inputs; None for an absent one.
        outputs: Its outputs; None for one that has no name.
        attributes: Keyword arguments of the function; a graph is a :class:`Graph`.
        last: The values that nothing needs any more.
    """

    node: Node
    tensors: Operator
    known: Operator | None
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    attributes: Mapping[str, Any]
    last: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """A graph: the model's, or one of an attribute, whose nodes also see the values around it.

    Attributes:
        inputs: Its inputs.
        outputs: Its outputs.
        names: The names of the outputs.
        steps: Its nodes in order.
        outside: The values around it that its nodes use.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    names: tuple[str, ...]
    steps: tuple[Step, ...]
    outside: tuple[int, ...]


@dataclass(frozen=True)
class Constant:
    """A constant of the model.

    Attributes:
        name: Its name.
        value: Its value.
    """

    name: str
    value: ir.TensorProtocol


@dataclass
class Plan:
    """The plan of a model.

    Attributes:
        graph: The model's own graph.
        inputs: The names of its inputs with their numbers.
        constants: The constants in it and in all graphs of attributes.
        dtypes: The dtype of each value, as far as ONNX infers it.
        refused: The outputs that need a node that can't be run, each with the reason. They are not in the graph.
    """

    graph: Graph
    inputs: Mapping[str, int]
    constants: Mapping[int, Constant]
    dtypes: Mapping[int, torch.dtype]
    refused: Mapping[str, ExportError]


def plan_model(model: ir.Model) -> Plan:
    """Plans how to run a model.

    Raises:
        ExportError: If it imports an unknown opset, or no output can be computed, as nodes can't be run.
    """
    opsets = _opsets(model.opset_imports)
    for node in model.graph.all_nodes():
        if ("" if node.domain == "ai.onnx" else node.domain) not in opsets:
            raise ExportError(
                f"node {shown(_name(node))}, operator {node.op_type}: the model does not import its domain "
                f"{node.domain!r}, only {sorted(model.opset_imports)}: the model is damaged"
            )
    _infer_types(model)
    planner = _Planner(dict(model.functions.items()))
    graph = planner.graph(model.graph, opsets, {}, outermost=True)
    names = [str(value.name) for value in model.graph.outputs]
    numbers = [planner.number(value) for value in model.graph.outputs]
    refused = {name: planner.missing[n] for name, n in zip(names, numbers, strict=True) if n in planner.missing}
    if refused and not graph.outputs:
        others = len({id(error) for error in planner.missing.values()}) - 1
        more = f" ({others} other nodes can't be used either)" if others else ""
        raise ExportError(f"the ONNX model can't be used: {next(iter(planner.missing.values()))}{more}")
    inputs = {str(value.name): number for value, number in zip(model.graph.inputs, graph.inputs, strict=True)}
    return Plan(graph, inputs, planner.constants, planner.dtypes, refused)


def _opsets(imports: Mapping[str, int]) -> dict[str, int]:
    opsets = {"" if domain == "ai.onnx" else domain: version for domain, version in imports.items()}
    newest = onnx.defs.onnx_opset_version()
    if opsets.get("", 0) > newest:
        raise ExportError(
            f"the ONNX model uses opset {opsets['']}, but the installed onnx package knows opsets up to {newest}: "
            "install a newer onnx, or export the model for an older opset"
        )
    return opsets


def _infer_types(model: ir.Model) -> None:
    """Writes the types into the model that ONNX infers: a value whose type is unknown then has the type None."""
    try:
        inferred = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(without_data(model))))
    except onnx.shape_inference.InferenceError as error:
        raise ExportError(f"the ONNX model is damaged: ONNX can't infer its types: {error}") from None
    for graph, other in zip(model.graphs(), inferred.graphs(), strict=True):
        for node, same in zip(graph, other, strict=True):
            for value, known in zip(node.outputs, same.outputs, strict=True):
                value.type = known.type


@dataclass
class _Planner:
    """Numbers the values, and collects what is found on the way."""

    functions: Mapping[Any, ir.Function]
    constants: dict[int, Constant] = field(default_factory=dict)
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    missing: dict[int, ExportError] = field(default_factory=dict)  # values that can't be computed, with the reason
    numbers: dict[ir.Value, int] = field(default_factory=dict)

    def number(self, value: ir.Value) -> int:
        """Returns the number of a value."""
        if value not in self.numbers:
            number = self.numbers[value] = len(self.numbers)
            if isinstance(value.type, ir.TensorType) and value.type.dtype not in _WITHOUT_DTYPE:
                self.dtypes[number] = torch_dtype(value.type.dtype)
        return self.numbers[value]

    def graph(
        self,
        graph: ir.Graph | ir.Function,
        opsets: Mapping[str, int],
        references: Mapping[str, ir.Attr],
        outermost: bool = False,
    ) -> Graph:
        """Plans a graph.

        Args:
            graph: The graph.
            opsets: The opsets that it imports.
            references: The attributes of the function that it belongs to.
            outermost: Whether outputs that can't be computed are left out.

        Raises:
            ExportError: If an output of another graph can't be computed.
        """
        inputs = tuple(self.number(value) for value in graph.inputs)
        own = set(inputs)
        for value in graph.initializers.values() if isinstance(graph, ir.Graph) else ():
            if value.const_value is not None:
                try:
                    self._constant(value, value.const_value)
                except ExportError as error:
                    self.missing[self.number(value)] = error
                own.add(self.number(value))
        steps: list[Step] = []
        for node in graph:
            before = len(steps)
            try:
                self._node(node, opsets, references, steps)
                needed = [number for step in steps[before:] for number in _uses(step)]
                missing = [self.missing[number] for number in needed if number in self.missing]
                if missing:
                    raise missing[0]
            except ExportError as error:
                del steps[before:]
                self.missing.update((self.number(value), error) for value in node.outputs)
            own.update(self.number(value) for value in node.outputs)
        outputs = [self.number(value) for value in graph.outputs]
        refused = [self.missing[number] for number in outputs if number in self.missing]
        if refused and not outermost:
            raise refused[0]
        names = [str(v.name) for v, number in zip(graph.outputs, outputs, strict=True) if number not in self.missing]
        outputs = [number for number in outputs if number not in self.missing]
        uses = [_uses(step) for step in steps]
        own |= {number for step in steps for number in step.outputs if number is not None}
        outside = tuple(dict.fromkeys(n for used in [*uses, outputs] for n in used if n not in own))
        return Graph(
            inputs,
            tuple(outputs),
            tuple(names),
            tuple(_with_last_uses(steps, own - set(outputs) - set(self.constants))),
            outside,
        )

    def _node(
        self, node: ir.Node, opsets: Mapping[str, int], references: Mapping[str, ir.Attr], steps: list[Step]
    ) -> None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        attributes = {
            name: references[attr.ref_attr_name] if attr.is_ref() else attr  # type: ignore[index]
            for name, attr in node.attributes.items()
            if not attr.is_ref() or attr.ref_attr_name in references
        }
        function = self.functions.get(node.op_identifier())
        if function is not None:
            self._call(node, function, attributes, steps)
            return
        wanted = [bool(value.name) and (bool(value.uses()) or value.is_graph_output()) for value in node.outputs]
        described = Node(
            _name(node),
            node.op_type,
            domain,
            opsets.get(domain, 0),
            tuple(wanted),
            tuple(None if value is None else value.dtype for value in node.inputs),
            tuple(value.dtype for value in node.outputs),
            frozenset(_consumers(node.outputs[0])) if node.outputs else frozenset(),
        )
        if not domain and node.op_type == "Constant":
            self._constant(node.outputs[0], _constant_of(described, attributes))
            return
        tensors, known = find_operator(described)
        inputs = [None if value is None or not value.name else self.number(value) for value in node.inputs]
        while inputs and inputs[-1] is None:
            inputs.pop()
        if tensors.inputs is not None and len(inputs) > tensors.inputs:
            raise described.error(f"it has {len(inputs)} inputs, but only {tensors.inputs} are supported")
        convert = _Converter(self, opsets, references).convert
        steps.append(
            Step(
                described,
                tensors,
                known,
                tuple(inputs),
                tuple(self.number(value) if value.name else None for value in node.outputs),
                attributes_of(described, tensors, attributes, convert),
                (),
            )
        )

    def _call(self, node: ir.Node, function: ir.Function, attributes: Mapping[str, ir.Attr], steps: list[Step]) -> None:
        """Adds the steps of a function, whose opset differs from the model's: others were inlined before."""
        # A copy for this call, so that its values have numbers of their own.
        copied = function.clone()
        given = [*node.inputs, *[None] * (len(copied.inputs) - len(node.inputs))]
        defaults = {name: attr for name, attr in copied.attributes.items() if attr.value is not None}
        for inner, outer in zip(copied.inputs, given, strict=True):
            if outer is not None:
                self.numbers[inner] = self.number(outer)
            else:
                inner.name = ""
        planned = self.graph(copied, _opsets(copied.opset_imports), {**defaults, **attributes})
        # The outer graph knows how long its values are needed.
        steps += [dataclasses.replace(step, last=()) for step in planned.steps]
        for outer_value, number in zip(node.outputs, planned.outputs, strict=False):
            self.numbers[outer_value] = number

    def _constant(self, value: ir.Value, tensor: ir.TensorProtocol) -> None:
        if tensor.dtype == ir.DataType.STRING:
            raise ExportError(f"constant {shown(value.name)} is of strings, which PyTorch has no tensors of")
        number = self.number(value)
        self.constants[number] = Constant(str(value.name), tensor)
        self.dtypes[number] = torch_dtype(tensor.dtype)


_WITHOUT_DTYPE = (ir.DataType.UNDEFINED, ir.DataType.STRING, ir.DataType.FLOAT6E2M3, ir.DataType.FLOAT6E3M2)


@dataclass(frozen=True)
class _Converter:
    planner: _Planner
    opsets: Mapping[str, int]
    references: Mapping[str, ir.Attr]

    def convert(self, attribute: ir.Attr) -> Any:
        """Returns an attribute as a value of Python; a tensor is a NumPy array."""
        value: Any = attribute.value
        if attribute.type == ir.AttributeType.GRAPH:
            return self.planner.graph(value, self.opsets, self.references)
        if attribute.type == ir.AttributeType.TENSOR:
            return value.numpy()
        if attribute.type == ir.AttributeType.STRING:
            return value.decode() if isinstance(value, bytes) else value
        if attribute.type == ir.AttributeType.STRINGS:
            return [entry.decode() if isinstance(entry, bytes) else entry for entry in value]
        if attribute.type in (ir.AttributeType.INTS, ir.AttributeType.FLOATS):
            return list(value)
        return value


def _constant_of(node: Node, attributes: Mapping[str, ir.Attr]) -> ir.TensorProtocol:
    kinds: dict[str, Any] = {
        "value_int": np.int64,
        "value_ints": np.int64,
        "value_float": np.float32,
        "value_floats": np.float32,
    }
    for name, attribute in attributes.items():
        if name == "value":
            return attribute.as_tensor()
        if name in kinds:
            return ir.tensor(np.array(attribute.value, dtype=kinds[name]))
    raise node.error(f"a constant with {sorted(attributes)} is not supported: give it as a dense tensor of numbers")


def _name(node: ir.Node) -> str:
    return node.name or next((str(value.name) for value in node.outputs if value.name), "")


def _consumers(value: ir.Value) -> Iterable[str]:
    """Yields the operators that use a value, directly or after a Cast."""
    for user, _ in value.uses():
        if user.op_type == "Cast":
            yield from _consumers(user.outputs[0])
        yield user.op_type


def _uses(step: Step) -> list[int]:
    """Returns the values that a step needs, also in graphs of its attributes."""
    used = [number for number in step.inputs if number is not None]
    for value in step.attributes.values():
        if isinstance(value, Graph):
            used += value.outside
    return used


def _with_last_uses(steps: Sequence[Step], own: Iterable[int]) -> Iterable[Step]:
    remaining, done = set(own), []
    for step in reversed(steps):
        produced = [number for number in step.outputs if number is not None]
        last = {number for number in [*_uses(step), *produced] if number in remaining} | set(step.last)
        remaining -= last
        done.append(dataclasses.replace(step, last=tuple(sorted(last))))
    return reversed(done)
