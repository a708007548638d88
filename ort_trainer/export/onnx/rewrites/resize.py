"""The rewrite of Resize, for known sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ....engine.ort import InferenceSession
from ....step.emitter import Emitter
from ..nodes import attributes_of, constant_of, operand, rank_of, refuse, size_of

__all__ = ["RULES"]


def _resize(node: ir.Node, e: Emitter) -> ir.Value:
    """Multiplies by a matrix along each axis whose size changes; the matrix is ONNX Runtime's resized unit matrix."""
    attributes = attributes_of(node)
    if attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        raise refuse(node, "coordinate_transformation_mode 'tf_crop_and_resize' is not supported")
    if attributes.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise refuse(node, f"keep_aspect_ratio_policy {attributes['keep_aspect_ratio_policy']!r} is not supported")
    x = operand(node)
    rank = rank_of(x)
    axes = [axis % rank for axis in attributes.pop("axes", range(rank))]
    scales, sizes = constant_of(node, 2), constant_of(node, 3)
    by_size = scales is None or not len(scales)
    result = x
    for position, axis in enumerate(axes):
        if not by_size and scales[position] == 1:
            continue
        size = size_of(x, axis)
        if by_size and sizes[position] == size:
            continue
        target = np.asarray([size, sizes[position]]) if by_size else np.asarray([1.0, scales[position]], np.float32)
        matrix = e.constant(_resized_unit(node.op_type, attributes, size, target, by_size), e.dtype.numpy())
        if axis == rank - 1:
            result = e("MatMul", result, matrix)
        else:
            order = [*range(axis), *range(axis + 1, rank), axis]
            result = e("MatMul", e("Transpose", result, perm=order), matrix)
            result = e("Transpose", result, perm=[order.index(k) for k in range(rank)])
    return result


def _resized_unit(op_type: str, attributes: dict[str, Any], size: int, target: Any, by_size: bool) -> Any:
    """Returns a unit matrix resized by the operator along its second axis: (size, new size)."""
    x = ir.val("x", ir.DataType.FLOAT, [size, size])
    sizes = ir.val("target", const_value=ir.tensor(target))
    node = ir.node(op_type, [x, None, None, sizes] if by_size else [x, None, sizes], attributes)
    node.outputs[0].name, node.outputs[0].dtype = "y", ir.DataType.FLOAT
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[sizes], opset_imports={"": 18}, name="unit")
    model = ir.to_proto(ir.Model(graph, ir_version=8)).SerializeToString()
    session = InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.eye(size, dtype=np.float32)})[0]


RULES = {"Resize": _resize}
