"""Plans how to run a model: which function computes each node, and which step uses a value last.

Whatever can be refused without a batch is refused here.
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

from ..core.errors import ExportError, shown
from .memory import without_data
from .node_table import Node, Operator, attributes_of, find_operator
from .values import known_array, torch_dtype


@dataclass(frozen=True)
class PlannedNode:
    """A node to run. Values have numbers, which no two values of a model share.

    Attributes:
        node: The node.
        for_tensors: The function for tensors.
        for_known: The function for known arrays, or None.
        inputs: Its inputs; None for an absent one.
        outputs: Its outputs; None for one that has no name.
        attributes: Keyword arguments of the function; a graph is a :class:`Graph`.
        last: The values that no later step needs.
    """

    node: Node
    for_tensors: Operator
    for_known: Operator | None
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    attributes: Mapping[str, Any]
    last: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """A graph: the model's, or one of an attribute, whose nodes also see the values of enclosing graphs.

    Attributes:
        inputs: Its inputs.
        outputs: Its outputs.
        names: The names of the outputs.
        steps: Its nodes in order.
        outside: The values of enclosing graphs that its nodes use.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    names: tuple[str, ...]
    steps: tuple[PlannedNode, ...]
    outside: tuple[int, ...]


@dataclass
class ImportPlan:
    """The plan of a model.

    Attributes:
        graph: The model's own graph.
        inputs: The names of its inputs with their numbers.
        constants: The constants in it and in all graphs of attributes.
        dtypes: The dtype of each value, as far as ONNX infers it.
        refused: The outputs that need an unsupported node, each with the reason. They are not in the graph.
    """

    graph: Graph
    inputs: Mapping[str, int]
    constants: Mapping[int, ir.TensorProtocol]
    dtypes: Mapping[int, torch.dtype]
    refused: Mapping[str, ExportError]


def plan_model(model: ir.Model) -> ImportPlan:
    """Plans how to run a model.

    Raises:
        ExportError: If it imports an unknown opset, or no output can be computed without unsupported nodes.
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
    return ImportPlan(graph, inputs, planner.constants, planner.dtypes, refused)


def _opsets(imports: Mapping[str, int]) -> dict[str, int]:
    """Returns the imported version of each domain, with "" as ONNX's own.

    Raises:
        ExportError: If ONNX's version is newer than the installed onnx package.
    """
    opsets = {"" if domain == "ai.onnx" else domain: version for domain, version in imports.items()}
    newest = onnx.defs.onnx_opset_version()
    if opsets.get("", 0) > newest:
        raise ExportError(
            f"the ONNX model uses opset {opsets['']}, but the installed onnx package knows opsets up to {newest}: "
            "install a newer onnx, or export the model for an older opset"
        )
    return opsets


def _infer_types(model: ir.Model) -> None:
    """Writes the types that ONNX infers into the model; a value of unknown type gets None."""
    try:
        inferred = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(without_data(model))))
        for graph, other in zip(model.graphs(), inferred.graphs(), strict=True):
            for node, same in zip(graph, other, strict=True):
                for value, typed in zip(node.outputs, same.outputs, strict=True):
                    value.type = typed.type
    except (onnx.shape_inference.InferenceError, ValueError) as error:  # a value twice has no place in the other
        raise ExportError(f"the ONNX model is damaged: ONNX can't infer its types: {error}") from None


@dataclass
class _Planner:
    """Plans graphs: numbers their values, and collects constants, dtypes and values that can't be computed."""

    functions: Mapping[Any, ir.Function]
    constants: dict[int, ir.TensorProtocol] = field(default_factory=dict)
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
            references: The attributes of the function that contains it, to which its nodes may refer.
            outermost: Whether it is the model's graph, whose outputs are left out if they can't be computed.

        Raises:
            ExportError: If an output can't be computed and the graph is not the outermost.
        """
        inputs = tuple(self.number(value) for value in graph.inputs)
        inner = set(inputs)
        for value in graph.initializers.values() if isinstance(graph, ir.Graph) else ():
            if value.const_value is not None:
                try:
                    self._constant(value, value.const_value)
                except ExportError as error:
                    self.missing[self.number(value)] = error
                inner.add(self.number(value))
        steps: list[PlannedNode] = []
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
            inner.update(self.number(value) for value in node.outputs)
        outputs = [self.number(value) for value in graph.outputs]
        refused = [self.missing[number] for number in outputs if number in self.missing]
        if refused and not outermost:
            raise refused[0]
        names = [str(v.name) for v, number in zip(graph.outputs, outputs, strict=True) if number not in self.missing]
        outputs = [number for number in outputs if number not in self.missing]
        uses = [_uses(step) for step in steps]
        inner |= {number for step in steps for number in step.outputs if number is not None}
        outside = tuple(dict.fromkeys(n for used in [*uses, outputs] for n in used if n not in inner))
        return Graph(
            inputs,
            tuple(outputs),
            tuple(names),
            tuple(_with_last_uses(steps, inner - set(outputs) - set(self.constants))),
            outside,
        )

    def _node(
        self, node: ir.Node, opsets: Mapping[str, int], references: Mapping[str, ir.Attr], steps: list[PlannedNode]
    ) -> None:
        """Appends the step of a node; none for a Constant, and several for a call of a function."""
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
        for_tensors, for_known = find_operator(described)
        inputs = [None if value is None or not value.name else self.number(value) for value in node.inputs]
        while inputs and inputs[-1] is None:
            inputs.pop()
        if for_tensors.inputs is not None and len(inputs) > len(for_tensors.inputs):
            raise described.error(f"it has {len(inputs)} inputs, but only {len(for_tensors.inputs)} are supported")
        convert = _Converter(self, opsets, references).convert
        arguments = attributes_of(described, for_tensors, attributes, convert)
        for position, name in enumerate(for_tensors.inputs or ()):
            if name in arguments:  # an attribute that is an input in newer versions of the operator
                value = ir.Value(name=f"{described.name}.{name}")
                self._constant(value, ir.tensor(known_array(arguments.pop(name))))
                inputs += [None] * (position + 1 - len(inputs))
                inputs[position] = self.number(value)
        steps.append(
            PlannedNode(
                described,
                for_tensors,
                for_known,
                tuple(inputs),
                tuple(self.number(value) if value.name else None for value in node.outputs),
                arguments,
                (),
            )
        )

    def _call(
        self, node: ir.Node, function: ir.Function, attributes: Mapping[str, ir.Attr], steps: list[PlannedNode]
    ) -> None:
        """Adds the steps of a function whose opset differs from the model's; the loader inlined all others."""
        # A copy for this call, so that its values have numbers of their own.
        copied = function.clone()
        arguments = [*node.inputs, *[None] * (len(copied.inputs) - len(node.inputs))]
        defaults = {name: attr for name, attr in copied.attributes.items() if attr.value is not None}
        for inner, outer in zip(copied.inputs, arguments, strict=True):
            if outer is not None:
                self.numbers[inner] = self.number(outer)
            else:
                inner.name = ""
        planned = self.graph(copied, _opsets(copied.opset_imports), {**defaults, **attributes})
        # The outer graph determines the last uses, because it may use the function's outputs.
        steps += [dataclasses.replace(step, last=()) for step in planned.steps]
        for outer_value, number in zip(node.outputs, planned.outputs, strict=False):
            self.numbers[outer_value] = number

    def _constant(self, value: ir.Value, tensor: ir.TensorProtocol) -> None:
        """Records the constant of a value, and its dtype."""
        if tensor.dtype == ir.DataType.STRING:
            raise ExportError(f"constant {shown(value.name)} is of strings, which PyTorch has no tensors of")
        number = self.number(value)
        self.constants[number] = tensor
        self.dtypes[number] = torch_dtype(tensor.dtype)


_WITHOUT_DTYPE = (ir.DataType.UNDEFINED, ir.DataType.STRING, ir.DataType.FLOAT6E2M3, ir.DataType.FLOAT6E3M2)


@dataclass(frozen=True)
class _Converter:
    """Converts attributes; a graph in an attribute is planned, in the scope of the node that has it."""

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
    """Returns the value of a Constant node."""
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
    """Returns the name of a node for messages; without one, that of its first named output."""
    return node.name or next((str(value.name) for value in node.outputs if value.name), "")


def _consumers(value: ir.Value) -> Iterable[str]:
    """Yields the operators that use a value, directly or after a Cast."""
    for user, _ in value.uses():
        if user.op_type == "Cast":
            yield from _consumers(user.outputs[0])
        yield user.op_type


def _uses(step: PlannedNode) -> list[int]:
    """Returns the values that a step needs, including those that graphs in its attributes use."""
    used = [number for number in step.inputs if number is not None]
    for value in step.attributes.values():
        if isinstance(value, Graph):
            used += value.outside
    return used


def _with_last_uses(steps: Sequence[PlannedNode], inner: Iterable[int]) -> Iterable[PlannedNode]:
    """Adds to each step the inner values that no later step needs, so that a run can release them."""
    remaining, done = set(inner), []
    for step in reversed(steps):
        produced = [number for number in step.outputs if number is not None]
        last = {number for number in [*_uses(step), *produced] if number in remaining} | set(step.last)
        remaining -= last
        done.append(dataclasses.replace(step, last=tuple(sorted(last))))
    return reversed(done)
