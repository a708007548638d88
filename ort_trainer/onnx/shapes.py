"""Infers and reads the shapes and dtypes of the values of an ONNX model."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from .memory import without_data

# With data_prop, ONNX keeps the elements of every vector, known or not, and takes 76 bytes for each.
_MOST_PROPAGATED = 1 << 22


def infer_shapes(model: ir.Model) -> None:
    """Writes the types and shapes that ONNX infers into a model; onnx_ir's own pass turns sequences into tensors."""
    proto = ir.to_proto(without_data(model))
    inferred = onnx.shape_inference.infer_shapes(proto)
    if sum(map(_elements, (*inferred.graph.input, *inferred.graph.value_info))) <= _MOST_PROPAGATED:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    for info in (*inferred.graph.output, *inferred.graph.value_info):
        if info.name in values:
            ir.serde.deserialize_value_info_proto(info, values[info.name])


def _elements(info: onnx.ValueInfoProto) -> int:
    """Returns the number of elements of a vector; 0 for values of other ranks."""
    dims = info.type.tensor_type.shape.dim
    return int(dims[0].dim_value) if len(dims) == 1 else 0


def fixed_sizes(model: ir.Model) -> ir.Model:
    """Replaces named dimensions of inputs by the sizes that weights require, in place, and returns the model.

    torch.onnx names every dimension that its user declared dynamic, even the features of a linear layer.
    """
    inputs = {str(value.name) for value in model.graph.inputs}
    for node in model.graph:
        if node.domain or len(node.inputs) < 2:
            continue
        x, weight = node.inputs[:2]
        if x is None or weight is None or x.name not in inputs or not x.shape or not weight.shape:
            continue
        attributes, sizes = node.attributes, weight.shape
        if node.op_type == "Gemm":
            axis, size = 1 - attributes.get_int("transA", 0), sizes[attributes.get_int("transB", 0)]
        elif node.op_type == "MatMul" and len(sizes) == 2:
            axis, size = len(x.shape) - 1, sizes[0]
        elif node.op_type == "Conv" and isinstance(sizes[1], int):
            axis, size = 1, sizes[1] * attributes.get_int("group", 1)
        elif node.op_type == "BatchNormalization":
            axis, size = 1, sizes[0]
        else:
            continue
        if isinstance(size, int):
            x.shape = ir.Shape([size if place == axis else old for place, old in enumerate(x.shape)])
    return model


def without_negative_sizes(model: ir.Model) -> None:
    """Makes sizes of -1 unknown ones, in place: some exporters write them so."""
    for graph in model.graphs():
        for value in (*graph.inputs, *graph.outputs, *(value for node in graph for value in node.outputs)):
            if value.shape is not None and any(isinstance(size, int) and size < 0 for size in value.shape):
                sizes = [None if isinstance(size, int) and size < 0 else size for size in value.shape]
                value.shape = ir.Shape(sizes)


def known_shapes(model: ir.Model) -> dict[str, tuple[int | str | None, ...] | None]:
    """Returns the shapes of a model's inputs and outputs by name.

    A size of an output that ONNX infers from the inputs takes precedence: a file may give the same size another name.
    """
    blank = model.clone()
    for value in blank.graph.outputs:
        if value not in blank.graph.inputs:
            value.shape = None
    infer_shapes(blank)
    shapes = {str(value.name): shape_of(value) for value in blank.graph.inputs}
    for value, inferred in zip(model.graph.outputs, blank.graph.outputs, strict=True):
        declared_shape, inferred_shape = shape_of(value), shape_of(inferred)
        if declared_shape is not None and inferred_shape is not None and len(declared_shape) == len(inferred_shape):
            inferred_shape = tuple(new or old for new, old in zip(inferred_shape, declared_shape, strict=True))
        shapes[str(value.name)] = declared_shape if inferred_shape is None else inferred_shape
    return shapes


def dtype_of(value: ir.Value) -> ir.DataType:
    """Returns the element type of a value; float if unknown."""
    return ir.DataType.FLOAT if value.dtype in (None, ir.DataType.UNDEFINED) else value.dtype


def shape_of(value: ir.Value) -> tuple[int | str | None, ...] | None:
    """Returns the sizes of a value: a str for a symbol, None if unknown. Returns None if even the rank is unknown."""
    return None if value.shape is None else tuple(size if isinstance(size, int) else size.value for size in value.shape)
