"""Rewrites of transposed convolutions, resizing and padding, for sizes that are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ...runtime.engine import InferenceSession
from .nodes import Emitter, Values, attributes_of, constant_of, refuse

__all__ = ["average_pool", "conv_transpose", "convolution", "max_pool", "pad", "resize"]


def convolution(node: onnx.NodeProto, e: Emitter, values: Values) -> bool | None:
    """Padding as numbers: the gradient builder does not know ``auto_pad``."""
    attributes = attributes_of(node)
    if attributes.get("auto_pad", "NOTSET") in ("NOTSET", "VALID"):
        return False
    rank = values.rank(node.input[0])
    attributes.setdefault("kernel_shape", [values.size(node.input[1], axis) for axis in range(2, rank)])
    e.assign(node.output[0], e("Conv", *node.input, **_padded(node, attributes, values)))
    return None


def _padded(node: onnx.NodeProto, attributes: dict[str, Any], values: Values) -> dict[str, Any]:
    """Returns the attributes of a window with ``pads`` in the place of ``auto_pad``."""
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
            size = values.size(node.input[0], axis + 2)
            total = max(0, (-(-size // stride) - 1) * stride + reach - size)
        small, large = total // 2, total - total // 2
        begins.append(small if mode == "SAME_UPPER" else large)
        ends.append(large if mode == "SAME_UPPER" else small)
    return {**attributes, "pads": [*begins, *ends]}


def conv_transpose(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
    """A convolution of the input with zeros between its elements, by the mirrored kernel."""
    attributes = attributes_of(node)
    x, w = node.input[:2]
    rank = values.rank(x)
    spatial = range(2, rank)
    count = rank - 2
    into, out = values.size(w, 0), values.size(w, 1)
    kernel = [values.size(w, axis) for axis in spatial]
    group = attributes.get("group", 1)
    strides = attributes.get("strides", [1] * count)
    dilations = attributes.get("dilations", [1] * count)
    extra = attributes.get("output_padding", [0] * count)
    sizes = [values.size(x, axis) for axis in spatial]
    begins, ends = _transposed_pads(node, attributes, sizes, kernel, strides, dilations, extra)
    for axis, size, stride in zip(spatial, sizes, strides, strict=True):
        if stride > 1:
            x = _spread(e, x, rank, axis, size, stride)
    reach = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    before = [r - p for r, p in zip(reach, begins, strict=True)]
    after = [r - p + o for r, p, o in zip(reach, ends, extra, strict=True)]
    if min(*before, *after) < 0:
        raise refuse(node, f"pads {begins}, {ends} are larger than the kernel reaches, {reach}: it has no rewrite")
    # (in, out / group, ...) -> (out, in / group, ...)
    w = e("Reshape", w, e.constant([group, into // group, out, *kernel]))
    w = e("Transpose", w, perm=[0, 2, 1, *range(3, rank + 1)])
    w = e("Reshape", w, e.constant([group * out, into // group, *kernel]))
    for axis, size in zip(spatial, kernel, strict=True):
        w = e("Gather", w, e.constant(list(reversed(range(size)))), axis=axis)
    inputs = [x, w, *node.input[2:3]]
    e.assign(node.output[0], e("Conv", *inputs, group=group, dilations=dilations, pads=[*before, *after]))


def _spread(e: Emitter, x: str, rank: int, axis: int, size: int, stride: int) -> str:
    """Puts ``stride - 1`` zeros between the elements along an axis."""
    x = e("Unsqueeze", x, e.constant([axis + 1]))
    pads = [0] * (2 * (rank + 1))
    pads[rank + 1 + axis + 1] = stride - 1
    x = e("Pad", x, e.constant(pads))
    # 0 keeps a size, -1 stands for what follows; the axis in the middle is the only one that is spelt out.
    tail = rank - axis - 1
    shape = [*[0] * axis, size * stride]
    if tail:
        x = e("Transpose", x, perm=[*range(axis), *range(axis + 2, rank + 1), axis, axis + 1])
        x = e("Reshape", x, e.constant([*[0] * (rank - 1), size * stride]))
        x = e("Transpose", x, perm=[*range(axis), rank - 1, *range(axis, rank - 1)])
    else:
        x = e("Reshape", x, e.constant(shape))
    return e.slice(x, 0, (size - 1) * stride + 1, axis)


def _transposed_pads(
    node: onnx.NodeProto,
    attributes: dict[str, Any],
    sizes: list[int],
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
    extra: list[int],
) -> tuple[list[int], list[int]]:
    count = len(kernel)
    pads = attributes.get("pads", [0] * (2 * count))
    wanted = attributes.get("output_shape")
    mode = attributes.get("auto_pad", "NOTSET")
    if wanted is None and mode in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [size * stride for size, stride in zip(sizes, strides, strict=True)]
    if wanted is None:
        return pads[:count], pads[count:]
    begins, ends = [], []
    for size, k, s, d, o, out in zip(sizes, kernel, strides, dilations, extra, wanted[-count:], strict=True):
        total = max(0, s * (size - 1) + o + (k - 1) * d + 1 - out)
        half = total // 2
        begins.append(half if mode == "SAME_UPPER" else total - half)
        ends.append(total - begins[-1])
    return begins, ends


def pad(node: onnx.NodeProto, e: Emitter, values: Values) -> bool | None:
    """Padding by elements of the tensor: a choice of indices along each axis."""
    mode = attributes_of(node).get("mode", "constant")
    x = node.input[0]
    if mode == "constant" and (len(node.input) < 4 or not node.input[3]):
        return False
    rank = values.rank(x)
    pads = constant_of(node, 1, values)
    if mode == "constant":
        every = np.zeros(2 * rank, np.int64)
        for position, axis in enumerate(constant_of(node, 3, values)):
            every[axis % rank] = pads[position]
            every[rank + axis % rank] = pads[len(pads) // 2 + position]
        e.assign(node.output[0], e("Pad", x, e.constant(every), *node.input[2:3]))
        return None
    axes = [int(axis) % rank for axis in constant_of(node, 3, values, range(rank))]
    count = len(axes)
    for axis, before, after in zip(axes, pads[:count], pads[count:], strict=True):
        if before < 0 or after < 0:
            raise refuse(node, f"pads {list(pads)} in mode {mode!r} must not be negative: slice first")
        if before or after:
            indices = np.pad(np.arange(values.size(node.input[0], axis)), (int(before), int(after)), mode=mode)
            x = e("Gather", x, e.constant(indices), axis=axis)
    e.assign(node.output[0], x)
    return None


def resize(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
    """A product with a matrix along every axis whose size changes: what ONNX Runtime makes of the unit matrix."""
    attributes = attributes_of(node)
    if attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        raise refuse(node, "coordinate_transformation_mode 'tf_crop_and_resize' has no rewrite")
    if attributes.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise refuse(node, f"keep_aspect_ratio_policy {attributes['keep_aspect_ratio_policy']!r} has no rewrite")
    x = node.input[0]
    rank = values.rank(x)
    axes = [axis % rank for axis in attributes.pop("axes", range(rank))]
    scales, sizes = constant_of(node, 2, values), constant_of(node, 3, values)
    by_size = scales is None or not len(scales)
    for position, axis in enumerate(axes):
        if not by_size and scales[position] == 1:
            continue
        size = values.size(node.input[0], axis)
        if by_size and sizes[position] == size:
            continue
        target = np.asarray([size, sizes[position]]) if by_size else np.asarray([1.0, scales[position]], np.float32)
        matrix = e.constant(_resized_unit(node.op_type, attributes, size, target, by_size), _numpy_type(e.type))
        if axis == rank - 1:
            x = e("MatMul", x, matrix)
        else:
            order = [*range(axis), *range(axis + 1, rank), axis]
            x = e("MatMul", e("Transpose", x, perm=order), matrix)
            x = e("Transpose", x, perm=[order.index(k) for k in range(rank)])
    e.assign(node.output[0], x)


def max_pool(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
    """A choice of elements: the gradient builder's own kernel knows no symbolic sizes."""
    attributes = {**attributes_of(node), "storage_order": 0}
    _, indices = e("MaxPool", node.input[0], outputs=2, **attributes)
    e.assign(node.output[0], e("Gather", e("Reshape", node.input[0], e.constant([-1])), indices, axis=0))
    if len(node.output) > 1 and node.output[1]:
        e.assign(node.output[1], indices)


def average_pool(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
    """A convolution by ones, of each channel by itself, over the number of elements that were there."""
    attributes = attributes_of(node)
    x = node.input[0]
    channels = values.size(x, 1)
    kernel = attributes["kernel_shape"]
    numbers = _numpy_type(e.type)
    ones = e.constant(np.ones([channels, 1, *kernel]), numbers)
    kept = ("kernel_shape", "strides", "pads", "auto_pad", "dilations")
    window = _padded(node, {name: attributes[name] for name in kept if name in attributes}, values)
    whole = not attributes.get("ceil_mode")
    if not whole:
        sizes = [values.size(x, axis) for axis in range(2, len(kernel) + 2)]
        window["pads"] = _ceiling_pads(window, sizes)
    padded = any(window.get("pads", [0]))
    total = e("Conv", x, ones, group=channels, **window)
    if not padded or (whole and attributes.get("count_include_pad", 0)):
        e.assign(node.output[0], e("Div", total, e.scalar(float(np.prod(kernel)))))
        return
    if attributes.get("count_include_pad", 0):
        raise refuse(node, "ceil_mode with count_include_pad has no rewrite")
    there = e("Expand", e.scalar(1.0), e("Shape", x))
    e.assign(node.output[0], e("Div", total, e("Conv", there, ones, group=channels, **window)))


def _ceiling_pads(window: dict[str, Any], sizes: list[int]) -> list[int]:
    """Returns pads with which a window that may start but not end inside the input fits."""
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


def _numpy_type(elem_type: int) -> Any:
    return helper.tensor_dtype_to_np_dtype(elem_type)


def _resized_unit(op_type: str, attributes: dict[str, Any], size: int, target: Any, by_size: bool) -> Any:
    """Returns what the operator makes of a unit matrix along its second axis: (size, new size)."""
    initializer = onnx.numpy_helper.from_array(target, "target")
    inputs = ["x", "", "", "target"] if by_size else ["x", "", "target"]
    node = helper.make_node(op_type, inputs, ["y"], **attributes)
    graph = helper.make_graph(
        [node],
        "unit",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [size, size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [initializer],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.eye(size, dtype=np.float32)})[0]
