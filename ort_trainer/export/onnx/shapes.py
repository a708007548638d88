"""Infers and reads the shapes and dtypes of the values of an ONNX model."""

from __future__ import annotations

import onnx
import onnx_ir as ir

__all__ = ["dtype_of", "infer_shapes", "shape_of"]


def infer_shapes(model: ir.Model) -> None:
    """Writes the types and shapes that ONNX infers into a model; onnx_ir's own pass turns sequences into tensors."""
    inferred = onnx.shape_inference.infer_shapes(ir.to_proto(model), data_prop=True)
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    for info in (*inferred.graph.output, *inferred.graph.value_info):
        if info.name in values:
            ir.serde.deserialize_value_info_proto(info, values[info.name])


def dtype_of(value: ir.Value) -> ir.DataType:
    """Returns the element type of a value; float if unknown."""
    return ir.DataType.FLOAT if value.dtype in (None, ir.DataType.UNDEFINED) else value.dtype


def shape_of(value: ir.Value) -> tuple[int | str | None, ...] | None:
    """Returns the sizes of a value: a str for a symbol, None if unknown. Returns None if even the rank is unknown."""
    return None if value.shape is None else tuple(size if isinstance(size, int) else size.value for size in value.shape)
