"""Rewrites of elementwise arithmetic, sums and matrix products."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....step.emitter import Emitter
from ..nodes import attributes_of, constant_of, dtype_of, operand, rank_of, shape_of

__all__ = ["RULES"]


def _expanded(node: ir.Node, e: Emitter, positions: tuple[int, ...]) -> ir.Value:
    """Expands inputs to the output's shape first, because the gradient builder fails to sum over broadcast axes."""
    shape = e("Shape", e(node.op_type, *node.inputs))  # no gradient flows through a shape
    inputs = [e("Expand", value, shape) if index in positions else value for index, value in enumerate(node.inputs)]
    return e.final(node.op_type, *inputs)


def _where(node: ir.Node, e: Emitter) -> ir.Value | None:
    shapes = [shape_of(value) for value in (operand(node, 1), operand(node, 2), node.outputs[0])]
    if shapes[0] is not None and None not in shapes[0] and shapes.count(shapes[0]) == 3:
        return None
    return _expanded(node, e, (1, 2))


def _power(node: ir.Node, e: Emitter) -> ir.Value | None:
    base, exponent = operand(node), operand(node, 1)
    if not dtype_of(exponent).is_floating_point():
        return e("Pow", base, e("Cast", exponent, to=dtype_of(base)))
    if shape_of(exponent) == () or (shape_of(exponent) == (1,) and shape_of(base)):
        return None
    return _expanded(node, e, (0,))


def _sum(node: ir.Node, e: Emitter) -> ir.Value:
    total = operand(node)
    for value in node.inputs[1:]:
        total = e("Add", total, value)
    return total


def _mean(node: ir.Node, e: Emitter) -> ir.Value:
    return e("Div", _sum(node, e), e.scalar(len(node.inputs)))


def _cumulative_sum(node: ir.Node, e: Emitter) -> ir.Value | None:
    """Removes the attributes, which the registered gradient does not support."""
    attributes = attributes_of(node)
    value, axis = operand(node), operand(node, 1)
    if not attributes.get("exclusive") and not attributes.get("reverse"):
        return None
    total = e("CumSum", value, axis)
    if attributes.get("reverse"):
        where = np.atleast_1d(constant_of(node, 1)).tolist()
        total = e("Add", e("Sub", e.reduce_sum(value, where), total), value)
    return e("Sub", total, value) if attributes.get("exclusive") else total


def _matrix_product(node: ir.Node, e: Emitter) -> ir.Value | None:
    """Turns vectors into matrices."""
    a, b = operand(node), operand(node, 1)
    flat = [value.shape is not None and rank_of(value) == 1 for value in (a, b)]
    if not any(flat):
        return None
    a = e("Unsqueeze", a, e.constant([0])) if flat[0] else a
    b = e("Unsqueeze", b, e.constant([1])) if flat[1] else b
    axes = [axis for axis, one in zip((-2, -1), flat, strict=True) if one]
    return e("Squeeze", e("MatMul", a, b), e.constant(axes))


RULES = {
    "CumSum": _cumulative_sum,
    "MatMul": _matrix_product,
    "Mean": _mean,
    "Pow": _power,
    "Sum": _sum,
    "Where": _where,
}
