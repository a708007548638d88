"""Rewrites of normalizations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ....step.emitter import Emitter
from ..nodes import attributes_of, input_of, operand, rank_of, size_of

__all__ = ["RULES"]


def _along_channels(e: Emitter, vector: ir.Value | None, rank: int) -> ir.Value | None:
    """Shapes a vector over channels so that it broadcasts over (batch, channels, ...)."""
    return e("Unsqueeze", vector, e.constant(range(1, rank - 1))) if rank > 2 else vector


def _scaled(
    node: ir.Node, e: Emitter, rank: int, centred: ir.Value, variance: ir.Value | None, epsilon: float
) -> ir.Value:
    deviation = e("Sqrt", e("Add", variance, e.scalar(epsilon)))
    scale, bias = (_along_channels(e, node.inputs[index], rank) for index in (1, 2))
    return e("Add", e("Mul", e("Div", centred, deviation), scale), bias)


def _batch_normalization(node: ir.Node, e: Emitter) -> Sequence[ir.Value]:
    """Uses the batch's statistics (``training_mode``) or the running ones."""
    attributes = attributes_of(node)
    x = operand(node)
    rank = rank_of(x)
    axes = [0, *range(2, rank)]
    epsilon = attributes.get("epsilon", 1e-5)
    if not attributes.get("training_mode", 0):
        mean, variance = (_along_channels(e, node.inputs[index], rank) for index in (3, 4))
        return [_scaled(node, e, rank, e("Sub", x, mean), variance, epsilon)]
    mean = e.reduce_mean(x, axes)
    centred = e("Sub", x, mean)
    variance = e.reduce_mean(e("Mul", centred, centred), axes)
    momentum = attributes.get("momentum", 0.9)
    updated = []
    for running, current in zip(node.inputs[3:5], (mean, variance), strict=True):
        kept = e("Mul", running, e.scalar(momentum))
        flat = e("Squeeze", current, e.constant(axes))
        updated.append(e("Add", kept, e("Mul", flat, e.scalar(1.0 - momentum))))
    return [_scaled(node, e, rank, centred, variance, epsilon), *updated]


def _instance_normalization(node: ir.Node, e: Emitter) -> ir.Value:
    x = operand(node)
    rank = rank_of(x)
    axes = range(2, rank)
    centred = e("Sub", x, e.reduce_mean(x, axes))
    variance = e.reduce_mean(e("Mul", centred, centred), axes)
    return _scaled(node, e, rank, centred, variance, attributes_of(node).get("epsilon", 1e-5))


def _layer_normalization(node: ir.Node, e: Emitter) -> Sequence[ir.Value] | None:
    """Adds a bias, separate from the scale, because the gradient builder requires one."""
    value, scale, given = operand(node), operand(node, 1), input_of(node, 2)
    if given is not None and given is not scale:
        return None
    if given is not None:
        bias = e("Identity", scale)
    else:
        bias = e.constant(np.zeros([size_of(scale, axis) for axis in range(rank_of(scale))]), e.dtype.numpy())
    return e.several(node.op_type, value, scale, bias, outputs=3, **attributes_of(node))


def _local_response(node: ir.Node, e: Emitter) -> ir.Value:
    attributes = attributes_of(node)
    value, size = operand(node), attributes["size"]
    rank, channels = rank_of(value), size_of(value, 1)
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    pads = [0, before, *[0] * (rank - 2), 0, after, *[0] * (rank - 2)]
    squares = e("Pad", e("Mul", value, value), e.constant(pads))
    total = e.slice(squares, 0, channels, 1)
    for start in range(1, size):
        total = e("Add", total, e.slice(squares, start, start + channels, 1))
    scaled = e("Mul", total, e.scalar(attributes.get("alpha", 1e-4) / size))
    power = e("Pow", e("Add", scaled, e.scalar(attributes.get("bias", 1.0))), e.scalar(attributes.get("beta", 0.75)))
    return e("Div", value, power)


def _lp_normalization(node: ir.Node, e: Emitter) -> ir.Value:
    attributes = attributes_of(node)
    axis, p = attributes.get("axis", -1), attributes.get("p", 2)
    value = operand(node)
    norm = e.reduce_sum(e("Abs", value), [axis]) if p == 1 else e("Sqrt", e.reduce_sum(e("Mul", value, value), [axis]))
    return e("Div", value, norm)


RULES = {
    "BatchNormalization": _batch_normalization,
    "InstanceNormalization": _instance_normalization,
    "LRN": _local_response,
    "LayerNormalization": _layer_normalization,
    "LpNormalization": _lp_normalization,
}
