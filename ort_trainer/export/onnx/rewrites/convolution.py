"""Rewrites of convolutions and windowed pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ....step.emitter import Emitter
from ..nodes import attributes_of, operand, rank_of, refuse, size_of

__all__ = ["RULES"]


def _convolution(node: ir.Node, e: Emitter) -> ir.Value | None:
    """Computes the padding, because the gradient builder does not support ``auto_pad``."""
    attributes = attributes_of(node)
    if attributes.get("auto_pad", "NOTSET") in ("NOTSET", "VALID"):
        return None
    spatial = range(2, rank_of(operand(node)))
    attributes.setdefault("kernel_shape", [size_of(operand(node, 1), axis) for axis in spatial])
    return e("Conv", *node.inputs, **_padded(node, attributes))


def _padded(node: ir.Node, attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a window with ``pads`` instead of ``auto_pad``."""
    mode = attributes.pop("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID"):
        return attributes
    kernel = attributes["kernel_shape"]
    count = len(kernel)
    begins, ends = [], []
    for axis in range(count):
        stride = attributes.get("strides", [1] * count)[axis]
        reach = attributes.get("dilations", [1] * count)[axis] * (kernel[axis] - 1) + 1
        if stride == 1:
            total = reach - 1
        else:
            size = size_of(operand(node), axis + 2)
            total = max(0, (-(-size // stride) - 1) * stride + reach - size)
        small, large = total // 2, total - total // 2
        begins.append(small if mode == "SAME_UPPER" else large)
        ends.append(large if mode == "SAME_UPPER" else small)
    return {**attributes, "pads": [*begins, *ends]}


def _conv_transpose(node: ir.Node, e: Emitter) -> ir.Value:
    """Convolves the input, with zeros between its elements, with the mirrored kernel."""
    attributes = attributes_of(node)
    x, w = operand(node), operand(node, 1)
    rank = rank_of(x)
    spatial = range(2, rank)
    count = rank - 2
    into, out = size_of(w, 0), size_of(w, 1)
    kernel = [size_of(w, axis) for axis in spatial]
    group = attributes.get("group", 1)
    strides = attributes.get("strides", [1] * count)
    dilations = attributes.get("dilations", [1] * count)
    extra = attributes.get("output_padding", [0] * count)
    sizes = [size_of(x, axis) for axis in spatial]
    axes = list(zip(sizes, kernel, strides, dilations, extra, strict=True))
    begins, ends = _transposed_pads(attributes, axes)
    if max(strides) > 1:
        x = _spread(e, x, sizes, strides)
    reach = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    before = [r - p for r, p in zip(reach, begins, strict=True)]
    after = [r - p + o for r, p, o in zip(reach, ends, extra, strict=True)]
    if min(*before, *after) < 0:
        raise refuse(node, f"pads {begins}, {ends} must not exceed the reach of the kernel, {reach}")
    # (in, out / group, ...) -> (out, in / group, ...)
    w = e("Reshape", w, e.constant([group, into // group, out, *kernel]))
    w = e("Transpose", w, perm=[0, 2, 1, *range(3, rank + 1)])
    w = e("Reshape", w, e.constant([group * out, into // group, *kernel]))
    for axis, size in zip(spatial, kernel, strict=True):
        w = e("Gather", w, e.constant(list(reversed(range(size)))), axis=axis)
    return e("Conv", x, w, *node.inputs[2:3], group=group, dilations=dilations, pads=[*before, *after])


def _spread(e: Emitter, x: ir.Value, sizes: list[int], strides: list[int]) -> ir.Value:
    """Inserts ``stride - 1`` zeros between the elements along each spatial axis."""
    count = len(sizes)
    apart = e("Unsqueeze", x, e.constant([2 * axis + 3 for axis in range(count)]))
    after = [number for stride in strides for number in (0, stride - 1)]
    apart = e("Pad", apart, e.constant([0] * (4 + 2 * count) + after))
    spread = [size * stride for size, stride in zip(sizes, strides, strict=True)]
    x = e("Reshape", apart, e.constant([0, 0, *spread]))
    ends = [(size - 1) * stride + 1 for size, stride in zip(sizes, strides, strict=True)]
    return e("Slice", x, e.constant([0] * count), e.constant(ends), e.constant(range(2, count + 2)))


def _transposed_pads(
    attributes: dict[str, Any], axes: Sequence[tuple[int, int, int, int, int]]
) -> tuple[list[int], list[int]]:
    """Returns the padding of a transposed convolution; axes have size, kernel, stride, dilation and extra padding."""
    count = len(axes)
    pads = attributes.get("pads", [0] * (2 * count))
    wanted = attributes.get("output_shape")
    mode = attributes.get("auto_pad", "NOTSET")
    if wanted is None and mode in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [size * stride for size, _, stride, _, _ in axes]
    if wanted is None:
        return pads[:count], pads[count:]
    begins, ends = [], []
    for (size, k, stride, dilation, extra), out in zip(axes, wanted[-count:], strict=True):
        total = max(0, stride * (size - 1) + extra + (k - 1) * dilation + 1 - out)
        half = total // 2
        begins.append(half if mode == "SAME_UPPER" else total - half)
        ends.append(total - begins[-1])
    return begins, ends


def _max_pool(node: ir.Node, e: Emitter) -> Sequence[ir.Value]:
    """Gathers the maxima by index, because the gradient builder's own kernel does not support symbolic sizes."""
    attributes = {**attributes_of(node), "storage_order": 0}
    _, indices = e.several("MaxPool", node.inputs[0], outputs=2, **attributes)
    return [e("Gather", e("Reshape", node.inputs[0], e.constant([-1])), indices, axis=0), indices]


def _average_pool(node: ir.Node, e: Emitter) -> ir.Value:
    """Convolves each channel with ones, and divides by the number of elements in the window."""
    attributes = attributes_of(node)
    x = operand(node)
    channels = size_of(x, 1)
    kernel = attributes["kernel_shape"]
    ones = e.constant(np.ones([channels, 1, *kernel]), e.dtype.numpy())
    kept = ("kernel_shape", "strides", "pads", "auto_pad", "dilations")
    window = _padded(node, {name: attributes[name] for name in kept if name in attributes})
    whole = not attributes.get("ceil_mode")
    if not whole:
        sizes = [size_of(x, axis) for axis in range(2, len(kernel) + 2)]
        window["pads"] = _ceiling_pads(window, sizes)
    padded = any(window.get("pads", [0]))
    total = e("Conv", x, ones, group=channels, **window)
    if not padded or (whole and attributes.get("count_include_pad", 0)):
        return e("Div", total, e.scalar(float(np.prod(kernel))))
    if attributes.get("count_include_pad", 0):
        raise refuse(node, "ceil_mode with count_include_pad is not supported")
    there = e("Expand", e.scalar(1.0), e("Shape", x))
    return e("Div", total, e("Conv", there, ones, group=channels, **window))


def _ceiling_pads(window: dict[str, Any], sizes: list[int]) -> list[int]:
    """Returns pads for ceil_mode, where a window must start but need not end inside the input."""
    kernel = window["kernel_shape"]
    count = len(kernel)
    pads = list(window.get("pads", [0] * (2 * count)))
    for axis, (size, k) in enumerate(zip(sizes, kernel, strict=True)):
        stride = window.get("strides", [1] * count)[axis]
        reach = window.get("dilations", [1] * count)[axis] * (k - 1) + 1
        begin, end = pads[axis], pads[count + axis]
        windows = -(-(size + begin + end - reach) // stride) + 1
        if (windows - 1) * stride >= size + begin:
            windows -= 1
        pads[count + axis] = max(end, (windows - 1) * stride + reach - size - begin)
    return pads


RULES = {
    "AveragePool": _average_pool,
    "Conv": _convolution,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _max_pool,
}
