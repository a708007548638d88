"""Rewrites of reductions and global pooling."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ....step.emitter import Emitter
from ..nodes import attributes_of, constant_of, input_of, operand, rank_of

__all__ = ["RULES"]


def _reduction(node: ir.Node, e: Emitter) -> ir.Value | None:
    nothing = attributes_of(node).get("noop_with_empty_axes") and input_of(node, 1) is None
    return node.inputs[0] if nothing else None


def _extremum(node: ir.Node, e: Emitter) -> ir.Value:
    """Averages the elements equal to the extremum, which spreads the gradient over them, as in PyTorch."""
    attributes, value = attributes_of(node), operand(node)
    axes = constant_of(node, 1)
    if axes is None or not len(axes):
        if attributes.get("noop_with_empty_axes"):
            return value
        axes = range(rank_of(value))
    # This node needs no rewrite: only a comparison reads it, and no gradient flows through that.
    extremum = e(node.op_type, value, e.constant(list(axes)), keepdims=1)
    return _at_extremum(e, value, extremum, list(axes), bool(attributes.get("keepdims", 1)))


def _global_max_pool(node: ir.Node, e: Emitter) -> ir.Value:
    value = operand(node)
    axes = list(range(2, rank_of(value)))
    return _at_extremum(e, value, e("ReduceMax", value, e.constant(axes), keepdims=1), axes, True)


def _at_extremum(e: Emitter, value: ir.Value, extremum: ir.Value, axes: Sequence[int], keep: bool) -> ir.Value:
    here = e("Equal", value, extremum)
    total = e.reduce_sum(e("Where", here, value, e.scalar(0.0)), axes, keep)
    return e("Div", total, e.reduce_sum(e("Cast", here, to=e.dtype), axes, keep))


RULES = {
    "GlobalMaxPool": _global_max_pool,
    "ReduceLogSumExp": _reduction,
    "ReduceMax": _extremum,
    "ReduceMean": _reduction,
    "ReduceMin": _extremum,
    "ReduceSum": _reduction,
}
