"""Lets graphs with bfloat16 run where there is no bfloat16 arithmetic: it is computed in fp32 and rounded."""

from __future__ import annotations

import onnx
import onnx_ir as ir

__all__ = ["widen_bfloat16"]

_NARROW, _WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT
# These move or reinterpret elements, or run other graphs; the CPU provider has them for every type.
_KEPT = frozenset(
    ("Cast", "Flatten", "Identity", "If", "Loop", "Reshape", "Scan", "Shape", "Squeeze", "Transpose", "Unsqueeze")
)


def widen_bfloat16(model: ir.Model, arithmetic: bool) -> None:
    """Takes bfloat16 out of a model's interface, and out of its arithmetic where the provider has none.

    1. Inputs and outputs of the model become fp32, with a cast behind or before them: NumPy, through which ONNX Runtime
       is told types, has no bfloat16. Every bfloat16 number is an fp32 number, so nothing is lost.
    2. With ``arithmetic``, a node that computes with bfloat16 does so between casts, and what other nodes keep and move
       stays bfloat16::

           x (bf16) -> Tanh -> y (bf16)    =>    x -> Cast -> Tanh -> Cast -> y

       The result is rounded once, which is what PyTorch's own kernels do on a CPU.
    """
    _infer_types(model)
    _widen_interface(model.graph)
    if arithmetic:
        for graph in (model.graph, *model.graph.subgraphs()):
            _widen_nodes(graph)


def _infer_types(model: ir.Model) -> None:
    """Gives types to the values that rewriting rules made without."""
    unknown = [v for node in model.graph.all_nodes() for v in node.outputs if v.dtype is None and v.name]
    if not unknown:
        return
    proto = onnx.shape_inference.infer_shapes(ir.to_proto(model))
    types = {value.name: value.type.tensor_type.elem_type for value in proto.graph.value_info}
    for value in unknown:
        if types.get(value.name):
            value.type = ir.TensorType(ir.DataType(types[value.name]))


def _cast(value: ir.Value, dtype: ir.DataType, name: str) -> ir.Node:
    node = ir.node("Cast", [value], {"to": ir.AttrInt64("to", dtype)}, num_outputs=1, name=f"{name}_node")
    result = node.outputs[0]
    result.name, result.type, result.shape = name, ir.TensorType(dtype), value.shape
    return node


def _widen_interface(graph: ir.Graph) -> None:
    for value in list(graph.inputs):
        if value.dtype == _NARROW:
            cast = _cast(value, _NARROW, f"{value.name}__bfloat16")
            ir.convenience.replace_all_uses_with(value, cast.outputs[0])
            cast.replace_input_with(0, value)
            graph.insert_before(graph[0], cast)
            value.type = ir.TensorType(_WIDE)
    for index, value in enumerate(graph.outputs):
        if value.dtype == _NARROW:
            name = value.name
            value.name = f"{name}__bfloat16"
            cast = _cast(value, _WIDE, str(name))
            graph.append(cast)
            graph.outputs[index] = cast.outputs[0]


def _widen_nodes(graph: ir.Graph | ir.Function) -> None:
    widened: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if node.op_type in _KEPT and node.domain == "":
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == _NARROW:
                if value not in widened:
                    cast = _cast(value, _WIDE, f"{value.name}__float{index}_{node.name}")
                    graph.insert_before(node, cast)
                    widened[value] = cast.outputs[0]
                node.replace_input_with(index, widened[value])
        _widen_attributes(node)
        for value in node.outputs:
            if value.dtype == _NARROW:
                cast = _cast(value, _NARROW, f"{value.name}__rounded")
                value.type = ir.TensorType(_WIDE)
                ir.convenience.replace_all_uses_with(value, cast.outputs[0], replace_graph_outputs=True)
                cast.replace_input_with(0, value)
                graph.insert_after(node, cast)


def _widen_attributes(node: ir.Node) -> None:
    """Changes the attributes that say which type a node makes."""
    kind = node.attributes.get("dtype")
    if kind is not None and kind.value == _NARROW:
        node.attributes.add(ir.AttrInt64("dtype", _WIDE))
    fill = node.attributes.get("value")
    if fill is not None and fill.type == ir.AttributeType.TENSOR and fill.value.dtype == _NARROW:
        node.attributes.add(ir.AttrTensor("value", ir.tensor(fill.value.numpy().astype("float32"))))
