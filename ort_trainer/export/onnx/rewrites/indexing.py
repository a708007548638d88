"""Rewrites of operators that move elements: slices, splits, padding, scattering, depth to space."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from ....step.emitter import Emitter
from ..nodes import attributes_of, constant_of, input_of, operand, rank_of, refuse, size_of

__all__ = ["RULES", "split"]


def split(node: ir.Node, e: Emitter, wanted: Collection[ir.Value]) -> Sequence[ir.Value] | None:
    """Rewrites a Split without sizes, or with outputs without gradient, to slices: the gradient builder omits those.

    Args:
        node: The node.
        e: Receives the new nodes.
        wanted: Values that get a gradient.
    """
    if all(value in wanted for value in node.outputs) and input_of(node, 1) is not None:
        return None
    value, axis = operand(node), attributes_of(node).get("axis", 0)
    sizes = constant_of(node, 1)
    if sizes is None:
        total, count = size_of(value, axis), len(node.outputs)
        size = -(-total // count)
        sizes = [min(size, total - size * index) for index in range(count)]
    ends = np.cumsum(sizes)
    return [
        e.slice(value, int(start), int(end), axis) for start, end in zip(ends - np.asarray(sizes), ends, strict=True)
    ]


def _slice(node: ir.Node, e: Emitter) -> ir.Value | None:
    """Rewrites a slice with a negative step to a Gather."""
    given = input_of(node, 4)
    steps = None if given is None else ir.convenience.get_const_tensor(given)
    if steps is None or min(steps.numpy()) > 0:
        return None
    x = operand(node)
    starts, ends = (constant_of(node, index) for index in (1, 2))
    axes = constant_of(node, 3, range(len(starts)))
    result = x
    for start, end, axis, step in zip(starts, ends, axes, steps.numpy(), strict=True):
        size = size_of(x, axis)
        stop = None if step < 0 and end < -size else int(end)
        chosen = np.arange(size)[slice(int(start), stop, int(step))]
        result = e("Gather", result, e.constant(chosen), axis=int(axis))
    return result


def _pad(node: ir.Node, e: Emitter) -> ir.Value | None:
    """Rewrites padding with elements of the tensor to a Gather along each axis."""
    mode = attributes_of(node).get("mode", "constant")
    x = operand(node)
    if mode == "constant" and input_of(node, 3) is None:
        return None
    rank = rank_of(x)
    pads = constant_of(node, 1)
    if mode == "constant":
        every = np.zeros(2 * rank, np.int64)
        for position, axis in enumerate(constant_of(node, 3)):
            every[axis % rank] = pads[position]
            every[rank + axis % rank] = pads[len(pads) // 2 + position]
        return e("Pad", x, e.constant(every), *node.inputs[2:3])
    axes = [int(axis) % rank for axis in constant_of(node, 3, range(rank))]
    count = len(axes)
    result = x
    for axis, before, after in zip(axes, pads[:count], pads[count:], strict=True):
        if before < 0 or after < 0:
            raise refuse(node, f"pads {list(pads)} in mode {mode!r} must not be negative: slice first")
        if before or after:
            indices = np.pad(np.arange(size_of(x, axis)), (int(before), int(after)), mode=mode)
            result = e("Gather", result, e.constant(indices), axis=axis)
    return result


def _scatter(node: ir.Node, e: Emitter) -> ir.Value | None:
    """Adds onto zeros first, because the gradient builder assumes that scattered elements replace the others."""
    attributes = attributes_of(node)
    if attributes.get("reduction", "none") != "add":
        return None
    data, indices, updates = node.inputs
    zeros = e("Expand", e.scalar(0.0), e("Shape", data))
    return e("Add", data, e.final(node.op_type, zeros, indices, updates, **attributes))


def _depth_to_space(node: ir.Node, e: Emitter) -> ir.Value:
    attributes = attributes_of(node)
    block, x = attributes["blocksize"], operand(node)
    channels, height, width = (size_of(x, axis) for axis in (1, 2, 3))
    depth = channels // block**2
    if node.op_type == "SpaceToDepth":
        shape, order = [0, channels, height // block, block, width // block, block], [0, 3, 5, 1, 2, 4]
        final = [0, channels * block**2, height // block, width // block]
    elif attributes.get("mode", "DCR") == "DCR":
        shape, order = [0, block, block, depth, height, width], [0, 3, 4, 1, 5, 2]
        final = [0, depth, height * block, width * block]
    else:
        shape, order = [0, depth, block, block, height, width], [0, 1, 4, 2, 5, 3]
        final = [0, depth, height * block, width * block]
    apart = e("Transpose", e("Reshape", x, e.constant(shape)), perm=order)
    return e("Reshape", apart, e.constant(final))


RULES = {
    "DepthToSpace": _depth_to_space,
    "Pad": _pad,
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
    "Slice": _slice,
    "SpaceToDepth": _depth_to_space,
}
