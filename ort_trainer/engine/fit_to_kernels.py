"""Fits a model to the kernels of the installed engine: nodes without a kernel for their type use a wider type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from ..step.emitter import infer_missing
from ..step.names import Names
from .ort import kernel_outputs

_BFLOAT16, _BOOL, _DOUBLE, _FLOAT = ir.DataType.BFLOAT16, ir.DataType.BOOL, ir.DataType.DOUBLE, ir.DataType.FLOAT
_INT32, _INT64 = ir.DataType.INT32, ir.DataType.INT64
# Types that can represent every number of a type. Casts back reduce integers modulo the size of their type, as PyTorch
# does, and round 16-bit floats, as PyTorch's own kernels do on a CPU.
_WIDER: Mapping[ir.DataType, tuple[ir.DataType, ...]] = {
    _BOOL: (_INT32, _INT64),
    ir.DataType.UINT8: (_INT32, _INT64),
    ir.DataType.INT8: (_INT32, _INT64),
    ir.DataType.UINT16: (_INT32, _INT64),
    ir.DataType.INT16: (_INT32, _INT64),
    ir.DataType.UINT32: (_INT64,),
    _INT32: (_INT64,),
    ir.DataType.FLOAT16: (_FLOAT,),
    _BFLOAT16: (_FLOAT,),
}
# Every engine has all kernels that exported graphs need for these types, if fp32 is among them.
_EVERYDAY = {_FLOAT, _INT64, _BOOL}


@dataclass
class FitResult(ir.passes.PassResult):
    """The changed model, and its unsupported nodes.

    Attributes:
        missing: The missing kernel and the source of every node that no cast helps. No type is wider than double and
            int64, and nodes are never computed in a narrower type than PyTorch's.
    """

    missing: list[str]


class FitToKernelsPass(ir.passes.InPlacePass):
    """Puts casts around nodes if the installed engine has no kernel for their types::

        x (uint8) -> Add -> y (uint8)    =>    x -> Cast -> Add (int32) -> Cast -> y

    Args:
        device: ``cpu`` or ``cuda``.
        source: Returns a node's place in the user's code.
    """

    def __init__(self, device: str, source: Callable[[ir.Node], str]) -> None:
        self._device, self._source = device, source

    def call(self, model: ir.Model) -> FitResult:
        """Runs the pass."""
        infer_missing(model)
        opset = model.opset_imports.get("", 0)
        names = Names(_names(model))
        missing: dict[str, str] = {}
        modified = False
        for graph in (model.graph, *model.graph.subgraphs()):
            widened: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
            for node in list(graph):
                types = _types(node)
                if types is None or (_FLOAT in types and types <= _EVERYDAY):
                    continue
                wrong = self._device == "cpu" and (_scatters_halves(node) or _overruns(node))
                if not wrong and _outputs(node, _inputs(node, {}, opset), {}, opset, self._device) is not None:
                    continue
                for mapping in _mappings(types):
                    inputs = _inputs(node, mapping, opset)
                    outputs = _outputs(node, inputs, mapping, opset, self._device)
                    if outputs:
                        _widen(node, inputs, outputs, mapping, widened, names)
                        modified = True
                        break
                else:
                    dtypes = [value.dtype for value in node.inputs if value is not None and value.dtype is not None]
                    operands = ", ".join(dtype.name.lower() for dtype in dtypes)
                    missing.setdefault(f"{node.op_type} of {operands}", self._source(node))
        return FitResult(model, modified, [f"{what}: {where}" for what, where in missing.items()])


def _names(model: ir.Model) -> Iterator[str]:
    """Yields the names of all values of a model, in all its graphs."""
    for graph in (model.graph, *model.graph.subgraphs()):
        yield from (value.name or "" for value in graph.inputs)
        yield from (value.name or "" for node in graph for value in node.outputs)
        yield from graph.initializers  # type: ignore[misc]


def _types(node: ir.Node) -> set[ir.DataType] | None:
    """Returns the element types of a node; None if they are unknown, or if it contains graphs."""
    if any(
        attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attribute in node.attributes.values()
    ):
        return None
    values = [value for value in node.inputs if value is not None]
    if any(not isinstance(value.type, ir.TensorType) for value in values):
        return None
    return {value.dtype for value in (*values, *node.outputs) if value.dtype is not None}


def _scatters_halves(node: ir.Node) -> bool:
    """Returns whether a node scatters 16-bit floats with a reduction.

    The CPU provider has kernels for this, which fail when they run.
    """
    reduction = node.attributes.get("reduction")
    data = node.inputs[0] if node.op_type.startswith("Scatter") else None
    halves = data is not None and data.dtype in (ir.DataType.FLOAT16, _BFLOAT16)
    return halves and reduction is not None and reduction.as_string() != "none"


def _overruns(node: ir.Node) -> bool:
    """Returns whether a node computes a maximum or minimum of fp16 numbers, or is a function that does.

    Where it broadcasts, the CPU provider of ONNX Runtime 1.19 writes beyond the end of the result.
    """
    halves = any(value is not None and value.dtype == ir.DataType.FLOAT16 for value in node.inputs)
    return halves and node.op_type in ("Max", "Min", "Relu", "HardSigmoid", "HardSwish")


def _inputs(node: ir.Node, mapping: Mapping[ir.DataType, ir.DataType], opset: int) -> list[ir.DataType | None]:
    """Returns the types of a node's inputs, widened if ONNX allows it: a condition stays bool."""
    try:
        formal = onnx.defs.get_schema(node.op_type, node.version or opset, node.domain).inputs
    except onnx.defs.SchemaError:  # not an ONNX operator
        formal = []
    types: list[ir.DataType | None] = []
    for index, value in enumerate(node.inputs):
        dtype = None if value is None else value.dtype
        wide = None if dtype is None else mapping.get(dtype)
        allowed = formal[min(index, len(formal) - 1)].types if formal else None
        takes = wide is not None and (allowed is None or f"tensor({wide.name.lower()})" in allowed)
        types.append(wide if takes else dtype)
    return types


def _outputs(
    node: ir.Node,
    types: Sequence[ir.DataType | None],
    mapping: Mapping[ir.DataType, ir.DataType],
    opset: int,
    device: str,
) -> tuple[ir.DataType, ...] | None:
    """Returns the types of a node's outputs for the given input types; None if the engine has no kernel for them.

    The tuple is empty if the engine refuses the node for another reason; see :func:`~.ort.kernel_outputs`.
    """
    inputs = [
        None if dtype is None else ir.Value(name=f"i{index}", type=ir.TensorType(dtype))
        for index, dtype in enumerate(types)
    ]
    outputs = [ir.Value(name=f"o{index}" if value.name else "") for index, value in enumerate(node.outputs)]
    attributes = [_widened_attribute(attribute, mapping) for attribute in node.attributes.values()]
    alone = ir.Node(node.domain, node.op_type, inputs, attributes, outputs=outputs, version=node.version)
    imports = {"": opset, **({node.domain: 1} if node.domain else {})}
    graph = ir.Graph(
        [value for value in inputs if value is not None],
        [value for value in outputs if value.name],
        nodes=[alone],
        name="node",
        opset_imports=imports,
    )
    model = ir.to_proto(ir.Model(graph, ir_version=9)).SerializeToString(deterministic=True)
    element_types = kernel_outputs(model, device)
    if element_types is None:
        return None
    if not element_types:
        return ()
    remaining = iter(element_types)
    return tuple(ir.DataType(next(remaining)) if value.name else ir.DataType.UNDEFINED for value in outputs)


def _mappings(types: set[ir.DataType]) -> Iterator[dict[ir.DataType, ir.DataType]]:
    """Yields mappings type -> wider type to try; those that keep bool come first."""
    numbers = {dtype for dtype in types if dtype in _WIDER} - {_BOOL}
    for chosen in (numbers, numbers | (types & {_BOOL})):
        for position in (0, -1):
            mapping = {dtype: _WIDER[dtype][position] for dtype in chosen}
            if position or _INT64 not in mapping.values():
                yield mapping


def _widen(
    node: ir.Node,
    inputs: Sequence[ir.DataType | None],
    outputs: Sequence[ir.DataType],
    mapping: Mapping[ir.DataType, ir.DataType],
    widened: dict[tuple[ir.Value, ir.DataType], ir.Value],
    names: Names,
) -> None:
    """Puts casts around a node, and widens the types in its attributes.

    Args:
        node: The node.
        inputs, outputs: The types in which it computes.
        mapping: Type -> wider type, for the attributes.
        widened: Inputs that were cast already, by value and type: nodes share a cast. It is extended.
        names: Makes names unique.
    """
    graph = node.graph
    assert graph is not None
    for index, (value, wide) in enumerate(zip(node.inputs, inputs, strict=True)):
        if value is None or wide is None or wide == value.dtype:
            continue
        if (value, wide) not in widened:
            before = cast(value, wide, names.unique(f"{value.name}__{wide.name.lower()}"))
            graph.insert_before(node, before)
            widened[value, wide] = before.outputs[0]
        node.replace_input_with(index, widened[value, wide])
    for attribute in list(node.attributes.values()):
        node.attributes.add(_widened_attribute(attribute, mapping))
    for value, wide in zip(node.outputs, outputs, strict=True):
        narrow = value.dtype
        if narrow is None or not value.name or narrow == wide:
            continue
        name = value.name
        after = cast(value, narrow, names.unique(f"{name}__narrow"))
        result = after.outputs[0]
        is_output = value.is_graph_output()
        ir.convenience.replace_all_uses_with(value, result, replace_graph_outputs=True)
        after.replace_input_with(0, value)
        graph.insert_after(node, after)
        value.type = ir.TensorType(wide)
        if is_output:  # the model's output must keep its name
            value.name, result.name = result.name, name


def cast(value: ir.Value, dtype: ir.DataType, name: str) -> ir.Node:
    """Returns a node that casts a value into a result with the given name."""
    node = ir.node("Cast", [value], {"to": ir.AttrInt64("to", dtype)}, num_outputs=1, name=f"{name}_node")
    result = node.outputs[0]
    result.name, result.type, result.shape = name, ir.TensorType(dtype), value.shape
    return node


def _widened_attribute(attribute: ir.Attr, mapping: Mapping[ir.DataType, ir.DataType]) -> ir.Attr:
    """Returns an attribute with the node's result type widened; any other attribute unchanged."""
    if attribute.name == "dtype" and attribute.type == ir.AttributeType.INT:
        dtype = ir.DataType(attribute.as_int())
        return ir.AttrInt64("dtype", mapping.get(dtype, dtype))
    if attribute.name == "value" and attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        if tensor.dtype in mapping:
            return ir.AttrTensor("value", ir.tensor(tensor.numpy().astype(mapping[tensor.dtype].numpy())))
    return attribute


class WidenInterfacePass(ir.passes.InPlacePass):
    """Makes bfloat16 inputs and outputs of a model fp32, with casts inside the model.

    Bindings name types by NumPy dtypes, and NumPy has no bfloat16. Every bfloat16 number is an fp32 number, so this is
    exact.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Runs the pass."""
        graph = model.graph
        before = len(graph)
        infer_missing(model)
        names = Names(_names(model))
        for value in list(graph.inputs):
            if value.dtype == _BFLOAT16:
                node = cast(value, _BFLOAT16, names.unique(f"{value.name}__bfloat16"))
                ir.convenience.replace_all_uses_with(value, node.outputs[0])
                node.replace_input_with(0, value)
                graph.insert_before(graph[0], node)
                value.type = ir.TensorType(_FLOAT)
        for index, value in enumerate(graph.outputs):
            if value.dtype == _BFLOAT16:
                name = value.name
                value.name = names.unique(f"{name}__bfloat16")
                node = cast(value, _FLOAT, str(name))
                graph.append(node)
                graph.outputs[index] = node.outputs[0]
        return ir.passes.PassResult(model, len(graph) > before)


class CastBeforeTransposePass(ir.passes.InPlacePass):
    """Casts before it transposes, where an output of a model is the cast of a transposed value.

    If a product takes the same cast, ONNX Runtime's ``MatmulTransposeFusion`` drops the output: its memory is never
    written.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Runs the pass."""
        graph, names, modified = model.graph, Names(_names(model)), False
        for index, output in enumerate(graph.outputs):
            casts: list[ir.Node] = []
            maker = output.producer()
            while maker is not None and maker.op_type == "Cast":
                casts.append(maker)
                maker = _given(maker).producer()
            if not casts or maker is None or maker.op_type != "Transpose":
                continue
            name, value = output.name, _given(maker)
            output.name = names.unique(f"{name}__cast")
            for node in reversed(casts):
                dtype = ir.DataType(node.attributes["to"].as_int())
                graph.append(cast(value, dtype, names.unique(f"{name}__{dtype.name.lower()}")))
                value = graph[-1].outputs[0]
            transposed = ir.node(
                "Transpose", [value], dict(maker.attributes), num_outputs=1, name=f"{name}__transposed"
            )
            result = transposed.outputs[0]
            result.name, result.type, result.shape = name, output.type, output.shape
            graph.append(transposed)
            graph.outputs[index] = result
            modified = True
        return ir.passes.PassResult(model, modified)


def _given(node: ir.Node) -> ir.Value:
    """Returns the one input of an operator."""
    (value,) = node.inputs
    assert value is not None
    return value
