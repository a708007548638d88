"""Rewrites ONNX Runtime's own operators, including its gradient builder's, to standard ones, for other runtimes.

Names follow the gradient builder: dy is the gradient of an operator's result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ....core.errors import ExportError
from ....step.emitter import Emitter
from ..nodes import attributes_of, operand
from ..rewrite import Rule

__all__ = ["NOT_ONNX", "RULES"]

_ONE_OVER_ROOT_2 = 1 / math.sqrt(2)
_ONE_OVER_ROOT_2_PI = 1 / math.sqrt(2 * math.pi)
_ROOT_2_OVER_PI = math.sqrt(2 / math.pi)


def _has(node: ir.Node, position: int) -> bool:
    return len(node.inputs) > position and node.inputs[position] is not None


def _zeros(e: Emitter, shape: ir.Value) -> ir.Value:
    return e("ConstantOfShape", shape, value=ir.tensor(np.zeros(1, e.dtype.numpy())))


def _axes_to_sum(e: Emitter, shape: ir.Value, other: ir.Value) -> ir.Value:
    """Returns the axes of a broadcast result along which an operand of the first shape was repeated."""
    ranks = [e("Shape", value) for value in (shape, other)]
    rank = e("Max", *ranks)
    one = ir.tensor(np.ones(1, np.int64))
    padded = [
        e("Concat", e("ConstantOfShape", e("Sub", rank, own), value=one), value, axis=0)
        for own, value in zip(ranks, (shape, other), strict=True)
    ]
    ones = [e("Equal", value, e.constant(1)) for value in padded]
    repeated = e("And", ones[0], e("Not", ones[1]))
    return e("Squeeze", e("NonZero", repeated), e.constant([0]))


def _sum_to(e: Emitter, value: ir.Value, like: ir.Value) -> ir.Value:
    """Returns the gradient of an operand from the gradient of its broadcast."""
    wanted = e("Shape", like)
    axes = _axes_to_sum(e, wanted, e("Shape", value))
    return e("Reshape", e("ReduceSum", value, axes, keepdims=1, noop_with_empty_axes=1), wanted)


def _broadcast_gradient_args(node: ir.Node, e: Emitter) -> Sequence[ir.Value]:
    first, second = operand(node), operand(node, 1)
    return [_axes_to_sum(e, first, second), _axes_to_sum(e, second, first)]


def _exact_gelu(e: Emitter, x: ir.Value) -> ir.Value:
    return e("Mul", x, _normal(e, x))


def _normal(e: Emitter, x: ir.Value) -> ir.Value:
    """The cumulative normal distribution."""
    error = e("Erf", e("Mul", x, e.scalar(_ONE_OVER_ROOT_2)))
    return e("Mul", e("Add", error, e.scalar(1.0)), e.scalar(0.5))


def _gelu_gradient(e: Emitter, dy: ir.Value, x: ir.Value) -> ir.Value:
    density = e("Mul", e("Exp", e("Mul", e("Mul", x, x), e.scalar(-0.5))), e.scalar(_ONE_OVER_ROOT_2_PI))
    return e("Mul", dy, e("Add", _normal(e, x), e("Mul", x, density)))


def _gelu(node: ir.Node, e: Emitter) -> ir.Value:
    x = operand(node)
    return _exact_gelu(e, e("Add", x, operand(node, 1)) if _has(node, 1) else x)


def _gelu_grad(node: ir.Node, e: Emitter) -> ir.Value:
    x = operand(node, 1)
    return _gelu_gradient(e, operand(node), e("Add", x, operand(node, 2)) if _has(node, 2) else x)


def _tanh_of_gelu(e: Emitter, x: ir.Value) -> ir.Value:
    cubed = e("Mul", e("Mul", e("Mul", x, x), x), e.scalar(0.044715))
    return e("Tanh", e("Mul", e("Add", x, cubed), e.scalar(_ROOT_2_OVER_PI)))


def _fast_gelu(node: ir.Node, e: Emitter) -> ir.Value:
    x = e("Add", operand(node), operand(node, 1)) if _has(node, 1) else operand(node)
    return e("Mul", e("Mul", x, e.scalar(0.5)), e("Add", _tanh_of_gelu(e, x), e.scalar(1.0)))


def _fast_gelu_grad(node: ir.Node, e: Emitter) -> ir.Value:
    dy, x = operand(node), operand(node, 1)
    x = e("Add", x, operand(node, 2)) if _has(node, 2) else x
    tanh = _tanh_of_gelu(e, x)
    slope = e("Mul", e("Mul", x, x), e.scalar(3 * 0.044715 * _ROOT_2_OVER_PI))
    slope = e("Mul", e("Add", slope, e.scalar(_ROOT_2_OVER_PI)), e("Sub", e.scalar(1.0), e("Mul", tanh, tanh)))
    inner = e("Add", e("Add", tanh, e.scalar(1.0)), e("Mul", x, slope))
    return e("Mul", dy, e("Mul", inner, e.scalar(0.5)))


def _quick_gelu(node: ir.Node, e: Emitter) -> ir.Value:
    x = operand(node)
    return e("Mul", x, e("Sigmoid", e("Mul", x, e.scalar(attributes_of(node).get("alpha", 1.702)))))


def _quick_gelu_grad(node: ir.Node, e: Emitter) -> ir.Value:
    dy, x = operand(node), operand(node, 1)
    scaled = e("Mul", x, e.scalar(attributes_of(node).get("alpha", 1.702)))
    gate = e("Sigmoid", scaled)
    slope = e("Add", e("Mul", scaled, e("Sub", e.scalar(1.0), gate)), e.scalar(1.0))
    return e("Mul", dy, e("Mul", gate, slope))


def _relu_grad(node: ir.Node, e: Emitter) -> ir.Value:
    return e("Where", e("Greater", operand(node, 1), e.scalar(0.0)), operand(node), e.scalar(0.0))


def _leaky_relu_grad(node: ir.Node, e: Emitter) -> ir.Value:
    dy = operand(node)
    small = e("Mul", dy, e.scalar(attributes_of(node).get("alpha", 0.01)))
    return e("Where", e("Greater", operand(node, 1), e.scalar(0.0)), dy, small)


def _sigmoid_grad(node: ir.Node, e: Emitter) -> ir.Value:
    y = operand(node, 1)
    return e("Mul", operand(node), e("Mul", y, e("Sub", e.scalar(1.0), y)))


def _tanh_grad(node: ir.Node, e: Emitter) -> ir.Value:
    y = operand(node, 1)
    return e("Mul", operand(node), e("Sub", e.scalar(1.0), e("Mul", y, y)))


def _softmax_grad(node: ir.Node, e: Emitter) -> ir.Value:
    dy, y = operand(node), operand(node, 1)
    total = e.reduce_sum(e("Mul", dy, y), [attributes_of(node).get("axis", -1)])
    return e("Mul", e("Sub", dy, total), y)


def _log_softmax_grad(node: ir.Node, e: Emitter) -> ir.Value:
    dy, y = operand(node), operand(node, 1)
    return e("Sub", dy, e("Mul", e("Exp", y), e.reduce_sum(dy, [attributes_of(node).get("axis", -1)])))


def _scale(node: ir.Node, e: Emitter) -> ir.Value:
    scale = e("CastLike", operand(node, 1), operand(node))
    return e("Div" if attributes_of(node).get("scale_down", 0) else "Mul", operand(node), scale)


def _div_grad(node: ir.Node, e: Emitter) -> Sequence[ir.Value]:
    dy, a, b = operand(node), operand(node, 1), operand(node, 2)
    share = e("Div", dy, b)
    return [_sum_to(e, share, a), _sum_to(e, e("Neg", e("Div", e("Mul", share, a), b)), b)]


def _fused_matmul(node: ir.Node, e: Emitter) -> ir.Value:
    for name in ("transBatchA", "transBatchB"):
        if attributes_of(node).get(name, 0):
            raise ExportError(f"FusedMatMul with {name} can't be written with standard ONNX operators")
    operands = [
        _transposed(e, operand(node, position)) if attributes_of(node).get(name, 0) else operand(node, position)
        for position, name in enumerate(("transA", "transB"))
    ]
    product = e("MatMul", *operands)
    alpha = attributes_of(node).get("alpha", 1.0)
    return product if alpha == 1.0 else e("Mul", product, e.scalar(alpha))


def _transposed(e: Emitter, value: ir.Value) -> ir.Value:
    if value.shape is None:
        return e("Einsum", value, equation="...ij->...ji")
    axes = list(range(len(value.shape)))
    if len(axes) > 1:
        axes[-2:] = axes[-1], axes[-2]
    return e("Transpose", value, perm=axes)


def _gather_grad(node: ir.Node, e: Emitter) -> ir.Value:
    shape, indices, dy = operand(node), operand(node, 1), operand(node, 2)
    axis = attributes_of(node).get("axis", 0)
    zeros = _zeros(e, shape)
    if axis == 0:
        column = e("Reshape", indices, e("Concat", e("Shape", indices), e.constant([1]), axis=0))
        return e("ScatterND", zeros, column, dy, reduction="add")
    # Flatten the dimensions of the indices into one, and repeat the indices along all others.
    limit = np.iinfo(np.int64).max
    behind = e("Slice", shape, e.constant([axis + 1]), e.constant([limit])) if axis != -1 else None
    before = e("Slice", shape, e.constant([0]), e.constant([axis]))
    parts = [before, e.constant([-1]), *([] if behind is None else [behind])]
    flat = e("Reshape", dy, e("Concat", *parts, axis=0))
    layout = e.constant([-1])
    if behind is not None:
        ones = e("ConstantOfShape", e("Shape", behind), value=ir.tensor(np.ones(1, np.int64)))
        layout = e("Concat", layout, ones, axis=0)
    spread = e("Expand", e("Reshape", indices, layout), e("Shape", flat))
    return e("ScatterElements", zeros, spread, flat, axis=axis, reduction="add")


def _gather_elements_grad(node: ir.Node, e: Emitter) -> ir.Value:
    dy, shape, indices = operand(node), operand(node, 1), operand(node, 2)
    axis = attributes_of(node).get("axis", 0)
    return e("ScatterElements", _zeros(e, shape), indices, dy, axis=axis, reduction="add")


def _gather_nd_grad(node: ir.Node, e: Emitter) -> ir.Value:
    if attributes_of(node).get("batch_dims", 0):
        raise ExportError("the gradient of GatherND with batch_dims can't be written with standard ONNX operators")
    return e("ScatterND", _zeros(e, operand(node)), operand(node, 1), operand(node, 2), reduction="add")


def _slice_grad(node: ir.Node, e: Emitter) -> ir.Value:
    dy, shape = operand(node), operand(node, 1)
    size = e("ReduceProd", shape, keepdims=0)
    places = e("Reshape", e("Range", e.constant(0), size, e.constant(1)), shape)
    places = e("Reshape", e("Slice", places, *node.inputs[2:]), e.constant([-1]))
    flat = _zeros(e, e("Reshape", size, e.constant([1])))
    return e("Reshape", e("ScatterElements", flat, places, e("Reshape", dy, e.constant([-1])), axis=0), shape)


def _layer_normalization_grad(node: ir.Node, e: Emitter) -> Sequence[ir.Value]:
    dy, x, scale = operand(node), operand(node, 1), operand(node, 2)
    simplified = node.op_type == "SimplifiedLayerNormalizationGrad"
    inverse = operand(node, 3 if simplified else 4)
    normalized = e("Mul", x if simplified else e("Sub", x, operand(node, 3)), inverse)
    axes = _normalized_axes(node, x)
    scaled = e("Mul", dy, scale)
    shift = e("Mul", normalized, e.reduce_mean(e("Mul", scaled, normalized), axes))
    shift = shift if simplified else e("Add", shift, e.reduce_mean(scaled, axes))
    results = [e("Mul", e("Sub", scaled, shift), inverse), _sum_to(e, e("Mul", dy, normalized), scale)]
    return results if simplified else [*results, _sum_to(e, dy, scale)]


def _simplified_layer_normalization(node: ir.Node, e: Emitter) -> Sequence[ir.Value]:
    x, scale = operand(node), operand(node, 1)
    mean = e.reduce_mean(e("Mul", x, x), _normalized_axes(node, x))
    root = e("Sqrt", e("Add", mean, e.scalar(attributes_of(node).get("epsilon", 1e-5))))
    inverse = e("Reciprocal", root)
    return [e("Mul", e("Mul", x, inverse), scale), inverse]


def _normalized_axes(node: ir.Node, x: ir.Value) -> list[int]:
    axis = attributes_of(node).get("axis", -1)
    if axis >= 0:
        if x.shape is None:
            raise ExportError(f"the rank of the input of {node.op_type} {node.name!r} is unknown")
        axis -= len(x.shape)
    return list(range(axis, 0))


def _cross_entropy_grad(node: ir.Node, e: Emitter) -> ir.Value:
    dy, log_prob, label = operand(node), operand(node, 1), operand(node, 2)
    counted = e.scalar(1.0)
    if _has(node, 3):
        classes = e("Shape", operand(node, 3))
        kept = e("And", e("Less", label, classes), e("GreaterOrEqual", label, _whole(e, 0, label)))
        counted = e("Gather", operand(node, 3), e("Where", kept, label, _whole(e, 0, label)))
    else:
        counted = e("CastLike", e("Equal", label, label), log_prob)
    if "ignore_index" in node.attributes:
        ignored = e("Equal", label, _whole(e, attributes_of(node).get("ignore_index", 0), label))
        counted = e("Where", ignored, e.scalar(0.0), counted)
    depth = e("Slice", e("Shape", log_prob), e.constant([1]), e.constant([2]))
    hot = e("OneHot", label, depth, e.constant([0.0, 1.0], e.dtype.numpy()), axis=1)
    reduction = attributes_of(node).get("reduction", "mean")
    if reduction == "mean":
        counted = e("Div", counted, e("ReduceSum", counted, keepdims=0))
    share = e("Unsqueeze", e("Mul", counted, dy), e.constant([1]))
    return e("Mul", e("Sub", e("Exp", log_prob), hot), share)


def _whole(e: Emitter, value: int, like: ir.Value) -> ir.Value:
    return e.constant(value, (like.dtype or ir.DataType.INT64).numpy())


def _conv_grad(node: ir.Node, e: Emitter) -> Sequence[ir.Value | None]:
    dy, x, weight = operand(node), operand(node, 1), operand(node, 2)
    sizes = [size for size in weight.shape or () if isinstance(size, int)]
    if weight.shape is None or len(sizes) < len(weight.shape):
        raise ExportError(f"the size of the weight of the convolution {node.name!r} is unknown")
    if attributes_of(node).get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise ExportError(f"auto_pad of the convolution {node.name!r} is not supported: export it with pads")
    kernel = sizes[2:]
    rank, group = len(kernel), attributes_of(node).get("group", 1)
    settings = {
        "strides": attributes_of(node).get("strides", [1] * rank),
        "dilations": attributes_of(node).get("dilations", [1] * rank),
        "pads": attributes_of(node).get("pads", [0] * 2 * rank),
    }
    wanted = [bool(value.name) for value in node.outputs] + [False, False]
    return [
        _input_gradient(e, dy, x, weight, settings, group) if wanted[0] else None,
        _kernel_gradient(e, dy, x, kernel, settings, group) if wanted[1] else None,
        e.reduce_sum(dy, [0, *range(2, 2 + rank)], keepdims=False) if wanted[2] else None,
    ]


def _input_gradient(
    e: Emitter, dy: ir.Value, x: ir.Value, weight: ir.Value, settings: Mapping[str, Sequence[int]], group: int
) -> ir.Value:
    """Returns a transposed convolution; elements at the end that the strides skip have no gradient."""
    strides, dilations, pads = settings["strides"], settings["dilations"], settings["pads"]
    if all(stride == 1 for stride in strides):
        return e("ConvTranspose", dy, weight, strides=strides, dilations=dilations, pads=pads, group=group)
    rank = len(strides)
    full = e("ConvTranspose", dy, weight, strides=strides, dilations=dilations, group=group)
    sizes = e.slice(e("Shape", x), 2, 2 + rank, 0)
    begins, ends = e.constant(pads[:rank]), e.constant(pads[rank:])
    missing = e("Sub", e("Add", e("Add", sizes, begins), ends), e.slice(e("Shape", full), 2, 2 + rank, 0))
    axes = e.constant(list(range(2, 2 + rank)))
    padded = e("Pad", full, e("Concat", e.constant([0] * rank), missing, axis=0), None, axes)
    return e("Slice", padded, begins, e("Add", begins, sizes), axes)


def _kernel_gradient(
    e: Emitter,
    dy: ir.Value,
    x: ir.Value,
    kernel: Sequence[int],
    settings: Mapping[str, Sequence[int]],
    group: int,
) -> ir.Value:
    """Returns a convolution of input and gradient, with batch and channels, strides and dilations swapped."""
    rank = len(kernel)
    spatial = list(range(3, 3 + rank))

    def apart(value: ir.Value, order: Sequence[int], first: Sequence[int]) -> ir.Value:
        """Splits the channels into groups, and permutes the dimensions."""
        shape = e("Shape", value)
        batch, sizes = e.slice(shape, 0, 1, 0), e.slice(shape, 2, 2 + rank, 0)
        value = e("Reshape", value, e("Concat", batch, e.constant([group, -1]), sizes, axis=0))
        value = e("Transpose", value, perm=[*order, *spatial])
        shape = e("Shape", value)
        sizes, kept = e.slice(shape, 3, 3 + rank, 0), e.slice(shape, first[0], first[0] + 1, 0)
        parts = [kept, e.constant([-1]), sizes] if first[0] == 0 else [e.constant([-1]), kept, sizes]
        return e("Reshape", value, e("Concat", *parts, axis=0))

    # [batch, group, channel] -> [channel, group * batch] for images, and -> [group * channel, batch] for kernels.
    images = apart(x, [2, 1, 0], [0])
    kernels = apart(dy, [1, 2, 0], [2])
    found = e(
        "Conv",
        images,
        kernels,
        strides=settings["dilations"],
        dilations=settings["strides"],
        pads=settings["pads"],
        group=group,
    )
    limits = [e.constant([0] * rank), e.constant(list(kernel)), e.constant(list(range(2, 2 + rank)))]
    return e("Transpose", e("Slice", found, *limits), perm=[1, 0, *range(2, 2 + rank)])


def _trilu(node: ir.Node, e: Emitter) -> ir.Value:
    return e("Trilu", *node.inputs, upper=attributes_of(node).get("upper", 1))


RULES: Mapping[str, Rule] = {
    "BiasGelu": _gelu,
    "BiasGeluGrad_dX": _gelu_grad,
    "BiasFastGeluGrad_dX": _fast_gelu_grad,
    "BroadcastGradientArgs": _broadcast_gradient_args,
    "ConvGrad": _conv_grad,
    "DivGrad": _div_grad,
    "FastGelu": _fast_gelu,
    "FastGeluGrad": _fast_gelu_grad,
    "FusedMatMul": _fused_matmul,
    "GatherElementsGrad": _gather_elements_grad,
    "GatherGrad": _gather_grad,
    "GatherNDGrad": _gather_nd_grad,
    "Gelu": _gelu,
    "GeluGrad": _gelu_grad,
    "LayerNormalizationGrad": _layer_normalization_grad,
    "LeakyReluGrad": _leaky_relu_grad,
    "LogSoftmaxGrad_13": _log_softmax_grad,
    "QuickGelu": _quick_gelu,
    "QuickGeluGrad": _quick_gelu_grad,
    "ReluGrad": _relu_grad,
    "Scale": _scale,
    "SigmoidGrad": _sigmoid_grad,
    "SimplifiedLayerNormalization": _simplified_layer_normalization,
    "SimplifiedLayerNormalizationGrad": _layer_normalization_grad,
    "SliceGrad": _slice_grad,
    "SoftmaxCrossEntropyLossGrad": _cross_entropy_grad,
    "SoftmaxGrad_13": _softmax_grad,
    "TanhGrad": _tanh_grad,
    "Trilu": _trilu,
}
"""Non-standard operator -> its rewrite."""
NOT_ONNX = ("SimplifiedLayerNormalization",)
"""Operators that ONNX Runtime adds to ONNX's own domain."""
