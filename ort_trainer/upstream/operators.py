"""The training operators of onnxruntime-training, written in ONNX's own operators.

Every function here is one operator of upstream's domain: it takes the values of the operator's inputs, in order, and
its attributes by name, and returns the values of its outputs. Names and formulas are those of upstream's
``gradient_builder.cc`` and its CPU kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ..step.emitter import Emitter

Outputs = Any
OPERATORS: dict[str, Callable[..., Outputs]] = {}
"""Name of an operator -> the function that writes it: (nodes, inputs, attributes) -> outputs."""
RENAMED = {"ReduceSumTraining": "ReduceSum", "SplitTraining": "Split", "Trilu": "Trilu"}
"""Name of an operator -> the ONNX operator with the same inputs, attributes and results."""

_SQRT_HALF, _SQRT_2_PI = math.sqrt(0.5), math.sqrt(2 / math.pi)
# FastGelu is x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
_CUBIC = 0.044715


class Tensor:
    """A value of the graph. Arithmetic on it adds nodes.

    Attributes:
        value: The value.
    """

    def __init__(self, op: Nodes, value: ir.Value) -> None:
        self._op, self.value = op, value

    @property
    def rank(self) -> int:
        """Number of dimensions.

        Raises:
            ValueError: If it is unknown.
        """
        if self.value.shape is None:
            raise ValueError(f"the number of dimensions of {self.value.name!r} is unknown")
        return len(self.value.shape)

    @property
    def size(self) -> Tensor:
        """Number of elements, an int64 scalar."""
        return self._op.one("Size", self)

    @property
    def shape(self) -> Tensor:
        """Sizes, int64 [rank]."""
        return self._op.one("Shape", self)

    def __add__(self, other: Any) -> Tensor:
        return self._op.one("Add", self, other)

    def __sub__(self, other: Any) -> Tensor:
        return self._op.one("Sub", self, other)

    def __mul__(self, other: Any) -> Tensor:
        return self._op.one("Mul", self, other)

    def __truediv__(self, other: Any) -> Tensor:
        return self._op.one("Div", self, other)

    def __radd__(self, other: float) -> Tensor:
        return self + other

    def __rmul__(self, other: float) -> Tensor:
        return self * other

    def __rsub__(self, other: float) -> Tensor:
        return self._op.one("Sub", other, self)

    def __neg__(self) -> Tensor:
        return self._op.one("Neg", self)

    def __gt__(self, other: Any) -> Tensor:
        return self._op.one("Greater", self, other)

    def __matmul__(self, other: Tensor) -> Tensor:
        return self._op.one("MatMul", self, other)


class Nodes:
    """Adds nodes by the names of operators: ``op.Where(x > 0, dy, 0)``. Numbers become constants of the tensors' dtype.

    Args:
        emit: Collects the nodes.
    """

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit

    def __getattr__(self, op_type: str) -> Callable[..., Tensor]:
        return functools.partial(self.one, op_type)

    def one(self, op_type: str, *inputs: Any, **attributes: Any) -> Tensor:
        """Adds a node and returns its only output."""
        return self.several(op_type, *inputs, outputs=1, **attributes)[0]

    def several(self, op_type: str, *inputs: Any, outputs: int, **attributes: Any) -> list[Tensor]:
        """Adds a node and returns its outputs."""
        dtypes = [operand.value.dtype for operand in inputs if isinstance(operand, Tensor)]
        number_dtypes = [dtype.numpy() for dtype in dtypes if dtype is not None and dtype != ir.DataType.BOOL]
        values = [
            self._value(operand, number_dtypes[0] if number_dtypes else np.dtype(np.float32)) for operand in inputs
        ]
        return [Tensor(self, value) for value in self.emit.several(op_type, *values, outputs=outputs, **attributes)]

    def constant(self, value: Any, dtype: Any = np.float32) -> Tensor:
        """Returns a constant."""
        return Tensor(self, self.emit.constant(value, dtype))

    def ints(self, *values: int) -> Tensor:
        """Returns an int64 tensor of one dimension."""
        return self.constant([*values], np.int64)

    def sum(self, x: Tensor, axes: Sequence[int] | Tensor, keep: bool = True) -> Tensor:
        """Returns the sum over some axes."""
        axes = axes if isinstance(axes, Tensor) else self.ints(*axes)
        return self.ReduceSum(x, axes, keepdims=int(keep), noop_with_empty_axes=1)

    def slice(self, x: Tensor, start: Any, stop: Any, axis: int = 0) -> Tensor:
        """Returns ``x[start:stop]`` along an axis; the bounds are ints or int64 [1]."""
        bounds = (bound if isinstance(bound, Tensor) else self.ints(bound) for bound in (start, stop))
        return self.Slice(x, *bounds, self.ints(axis))

    def zeros(self, shape: Tensor, like: Tensor) -> Tensor:
        """Returns zeros of a shape and another tensor's type."""
        dtype = np.float32 if like.value.dtype is None else like.value.dtype.numpy()
        return self.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, dtype)))

    def _value(self, operand: Any, dtype: np.dtype[Any]) -> ir.Value | None:
        if operand is None or isinstance(operand, ir.Value):
            return operand
        return operand.value if isinstance(operand, Tensor) else self.emit.constant(operand, dtype)


def operator(*names: str) -> Callable[[Callable[..., Outputs]], Callable[..., Outputs]]:
    """Adds a function to the table, under its operator's names."""

    def add(function: Callable[..., Outputs]) -> Callable[..., Outputs]:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return add


# Activations


@operator("ReluGrad")
def _relu_grad(op: Nodes, dy: Tensor, y: Tensor) -> Outputs:
    return op.Where(y > 0, dy, 0)


@operator("LeakyReluGrad")
def _leaky_relu_grad(op: Nodes, dy: Tensor, y: Tensor, alpha: float = 0.01) -> Outputs:
    return op.Where(y > 0, dy, dy * alpha)


@operator("SigmoidGrad")
def _sigmoid_grad(op: Nodes, dy: Tensor, y: Tensor) -> Outputs:
    return dy * y * (1 - y)


@operator("TanhGrad")
def _tanh_grad(op: Nodes, dy: Tensor, y: Tensor) -> Outputs:
    return dy * (1 - y * y)


@operator("Gelu")
def _gelu(op: Nodes, x: Tensor) -> Outputs:
    return x * 0.5 * (op.Erf(x * _SQRT_HALF) + 1)


@operator("BiasGelu")
def _bias_gelu(op: Nodes, x: Tensor, bias: Tensor) -> Outputs:
    return _gelu(op, x + bias)


@operator("GeluGrad")
def _gelu_grad(op: Nodes, dy: Tensor, x: Tensor) -> Outputs:
    density = op.Exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return dy * ((op.Erf(x * _SQRT_HALF) + 1) * 0.5 + x * density)


@operator("BiasGeluGrad_dX")
def _bias_gelu_grad(op: Nodes, dy: Tensor, x: Tensor, bias: Tensor) -> Outputs:
    return _gelu_grad(op, dy, x + bias)


@operator("FastGelu")
def _fast_gelu(op: Nodes, x: Tensor, bias: Tensor | None = None) -> Outputs:
    x = x if bias is None else x + bias
    return x * 0.5 * (op.Tanh((x + x * x * x * _CUBIC) * _SQRT_2_PI) + 1)


@operator("FastGeluGrad")
def _fast_gelu_grad(op: Nodes, dy: Tensor, x: Tensor) -> Outputs:
    squared = x * x
    tanh = op.Tanh((x + x * squared * _CUBIC) * _SQRT_2_PI)
    slope = (squared * (3 * _CUBIC) + 1) * _SQRT_2_PI
    return dy * ((tanh + 1) * 0.5 + x * 0.5 * (1 - tanh * tanh) * slope)


@operator("BiasFastGeluGrad_dX")
def _bias_fast_gelu_grad(op: Nodes, dy: Tensor, x: Tensor, bias: Tensor) -> Outputs:
    return _fast_gelu_grad(op, dy, x + bias)


@operator("QuickGelu")
def _quick_gelu(op: Nodes, x: Tensor, alpha: float = 1.702) -> Outputs:
    return x * op.Sigmoid(x * alpha)


@operator("QuickGeluGrad")
def _quick_gelu_grad(op: Nodes, dy: Tensor, x: Tensor, alpha: float = 1.702) -> Outputs:
    gate = op.Sigmoid(x * alpha)
    return dy * gate * (x * alpha * (1 - gate) + 1)


@operator("SoftmaxGrad_13")
def _softmax_grad(op: Nodes, dy: Tensor, y: Tensor, axis: int = -1) -> Outputs:
    return y * (dy - op.sum(dy * y, [axis]))


@operator("LogSoftmaxGrad_13")
def _log_softmax_grad(op: Nodes, dy: Tensor, y: Tensor, axis: int = -1) -> Outputs:
    return dy - op.Exp(y) * op.sum(dy, [axis])


@operator("SoftmaxGrad")
def _flat_softmax_grad(op: Nodes, dy: Tensor, y: Tensor, axis: int = 1) -> Outputs:
    """Writes the gradient of softmax before opset 13, which normalizes over the axis and all after it together."""
    return op.Reshape(_softmax_grad(op, *(op.Flatten(value, axis=axis) for value in (dy, y))), y.shape)


@operator("LogSoftmaxGrad")
def _flat_log_softmax_grad(op: Nodes, dy: Tensor, y: Tensor, axis: int = 1) -> Outputs:
    return op.Reshape(_log_softmax_grad(op, *(op.Flatten(value, axis=axis) for value in (dy, y))), y.shape)


@operator("DropoutGrad")
def _dropout_grad(
    op: Nodes, dy: Tensor, mask: Tensor, ratio: Tensor | None = None, training: Tensor | None = None
) -> Outputs:
    keep_probability = 0.5 if ratio is None else 1 - op.CastLike(ratio, dy)
    dx = op.Where(mask, dy / keep_probability, 0)
    return dx if training is None else op.Where(training, dx, dy)


# Arithmetic


@operator("Scale")
def _scale(op: Nodes, x: Tensor, scale: Tensor, scale_down: int = 0) -> Outputs:
    scale = op.CastLike(scale, x)
    return x / scale if scale_down else x * scale


@operator("ScaledSum")
def _scaled_sum(
    op: Nodes, x: Tensor, y: Tensor, z: Tensor | None = None, *, scale_0: float, scale_1: float, scale_2: float = 0.0
) -> Outputs:
    total = x * scale_0 + y * scale_1
    return total if z is None else total + z * scale_2


@operator("BatchScale")
def _batch_scale(op: Nodes, x: Tensor, *, scale_0: float, scale_1: float, scale_2: float | None = None) -> Outputs:
    return [x * scale for scale in (scale_0, scale_1, scale_2) if scale is not None]


@operator("DivGrad")
def _div_grad(op: Nodes, dy: Tensor, a: Tensor, b: Tensor) -> Outputs:
    return _sum_to(op, dy / b, a), _sum_to(op, -(dy * a) / (b * b), b)


def _sum_to(op: Nodes, x: Tensor, like: Tensor) -> Tensor:
    """Sums the gradient x over the axes along which ``like`` was broadcast."""
    axes, _ = _broadcast_gradient_args(op, like.shape, x.shape)
    return op.Reshape(op.sum(x, axes), like.shape)


@operator("BroadcastGradientArgs")
def _broadcast_gradient_args(op: Nodes, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Writes the axes over which the gradient of each of two broadcast operands is summed, from their shapes.

    Shapes are padded in front with -1 to the same rank: an axis is summed if it is missing, or has size 1 there and
    another size in the other operand.
    """
    rank = op.Max(op.Shape(a), op.Shape(b))

    def padded(shape: Tensor) -> Tensor:
        missing = op.ConstantOfShape(rank - op.Shape(shape), value=ir.tensor([-1]))
        return op.Concat(missing, shape, axis=0)

    def axes(sizes: Tensor, other_sizes: Tensor) -> Tensor:
        is_stretched = op.And(op.Equal(sizes, 1), op.And(op.Not(op.Equal(other_sizes, 1)), other_sizes > -1))
        return op.Reshape(op.NonZero(op.Or(op.Equal(sizes, -1), is_stretched)), op.ints(-1))

    first, second = padded(a), padded(b)
    return axes(first, second), axes(second, first)


@operator("FusedMatMul")
def _fused_matmul(
    op: Nodes, a: Tensor, b: Tensor, alpha: float = 1.0, transA: int = 0, transB: int = 0, transBatchA: int = 0,
    transBatchB: int = 0,
) -> Outputs:  # fmt: skip
    product = _transposed(op, a, transA, transBatchA) @ _transposed(op, b, transB, transBatchB)
    return product if alpha == 1.0 else product * alpha


def _transposed(op: Nodes, x: Tensor, last: int, batch: int) -> Tensor:
    """Returns an operand of FusedMatMul: ``batch`` moves its first dimension to the last but one, ``last`` swaps the
    last two.
    """
    if (not last and not batch) or x.rank < 2:
        return x
    order = [*range(x.rank)]
    if batch:
        order.insert(-1, order.pop(0))
    if last:
        order[-2:] = order[:-3:-1]
    return op.Transpose(x, perm=order)


@operator("FakeQuant")
def _fake_quant(op: Nodes, x: Tensor, scale: Tensor, zero: Tensor, quant_min: int = 0, quant_max: int = 255) -> Outputs:
    levels = op.Round(x / scale) + zero
    inside = op.And(op.GreaterOrEqual(levels, quant_min), op.LessOrEqual(levels, quant_max))
    return (op.Clip(levels, float(quant_min), float(quant_max)) - zero) * scale, inside


@operator("FakeQuantGrad")
def _fake_quant_grad(op: Nodes, dy: Tensor, mask: Tensor) -> Outputs:
    return op.Where(mask, dy, 0)


# Losses


@operator("SoftmaxCrossEntropyLossInternal")
def _cross_entropy(
    op: Nodes, scores: Tensor, labels: Tensor, weights: Tensor | None = None, ignored: Tensor | None = None,
    reduction: str = "mean", output_type: int | None = None,
) -> Outputs:  # fmt: skip
    number = _ignored(ignored)
    more = {} if number is None else {"ignore_index": number}
    inputs = [value for value in (scores, labels, weights) if value is not None]
    return op.several("SoftmaxCrossEntropyLoss", *inputs, outputs=2, reduction=reduction, **more)


@operator("SoftmaxCrossEntropyLossGrad")
def _cross_entropy_grad(
    op: Nodes, dy: Tensor, log_prob: Tensor, labels: Tensor, weights: Tensor | None = None, reduction: str = "mean",
    ignore_index: int | None = None,
) -> Outputs:  # fmt: skip
    """Writes (softmax - one hot) times the weight of each label; for a mean, divided by the sum of these weights.

    Scores are (batch, classes, ...), labels (batch, ...). Ignored labels have weight 0.
    """
    labels = op.Cast(labels, to=ir.DataType.INT64)
    valid = None if ignore_index is None else op.Not(op.Equal(labels, ignore_index))
    safe = labels if valid is None else op.Where(valid, labels, 0)
    ends = op.CastLike(np.array([0.0, 1.0], np.float32), log_prob)
    hit = op.OneHot(safe, op.slice(log_prob.shape, 1, 2), ends, axis=1)
    row_weights = None if valid is None else op.CastLike(valid, log_prob)
    if weights is not None:
        label_weights = op.Gather(weights, safe)
        row_weights = label_weights if row_weights is None else row_weights * label_weights
    factor = op.Unsqueeze(dy, op.ints(1)) if reduction == "none" else dy
    if reduction == "mean":
        total = op.CastLike(labels.size, dy) if row_weights is None else op.ReduceSum(row_weights, keepdims=0)
        factor = factor / op.Where(op.Equal(total, 0), 1, total)  # the total is 0 if all labels are ignored
    gradient = (op.Exp(log_prob) - hit) * factor
    return gradient if row_weights is None else gradient * op.Unsqueeze(row_weights, op.ints(1))


@operator("SoftmaxCrossEntropyLossInternalGrad")
def _cross_entropy_internal_grad(
    op: Nodes, dy: Tensor, log_prob: Tensor, labels: Tensor, weights: Tensor | None = None,
    ignored: Tensor | None = None, bias: Tensor | None = None, reduction: str = "mean", output_type: int | None = None,
) -> Outputs:  # fmt: skip
    gradient = _cross_entropy_grad(op, dy, log_prob, labels, weights, reduction, _ignored(ignored))
    return gradient if bias is None else op.Reshape(gradient, bias.shape) + bias


def _ignored(label: Tensor | None) -> int | None:
    """Returns the ignored label, which is an input of upstream's operator but an attribute of ONNX's."""
    tensor = None if label is None else ir.convenience.get_const_tensor(label.value)
    if label is not None and tensor is None:
        raise ValueError("its ignored label is not a constant")
    return None if tensor is None else int(tensor.numpy().item())


# Norms


@operator("SimplifiedLayerNormalization")
def _rms_norm(
    op: Nodes, x: Tensor, scale: Tensor, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Outputs:
    axes = op.ints(*range(-scale.rank, 0))
    inverse = op.Reciprocal(op.Sqrt(op.ReduceMean(x * x, axes) + epsilon))
    return x * inverse * scale, inverse


@operator("LayerNormalizationGrad")
def _layer_norm_grad(
    op: Nodes, dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, inverse: Tensor, **settings: Any
) -> Outputs:
    return _norm_grad(op, dy, (x - mean) * inverse, scale, inverse, centred=True)


@operator("SimplifiedLayerNormalizationGrad")
def _rms_norm_grad(op: Nodes, dy: Tensor, x: Tensor, scale: Tensor, inverse: Tensor, **settings: Any) -> Outputs:
    return _norm_grad(op, dy, x * inverse, scale, inverse, centred=False)[:2]


@operator("InvertibleLayerNormalizationGrad")
def _invertible_norm_grad(
    op: Nodes, dy: Tensor, y: Tensor, scale: Tensor, bias: Tensor, inverse: Tensor, **settings: Any
) -> Outputs:
    return _norm_grad(op, dy, (y - bias) / scale, scale, inverse, centred=True)


def _norm_grad(
    op: Nodes, dy: Tensor, normed: Tensor, scale: Tensor, inverse: Tensor, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of input, scale and bias of a norm over the last dimensions, which are those of the scale.

    With n = normed and g = dy * scale: dx = inverse * (g - n mean(g n) - mean(g)); a norm that does not subtract the
    mean lacks the last term.
    """
    axes = [*range(-scale.rank, 0)]
    scaled = dy * scale
    inner = scaled - normed * op.ReduceMean(scaled * normed, op.ints(*axes))
    if centred:
        inner = inner - op.ReduceMean(scaled, op.ints(*axes))
    rows = op.Concat(op.ints(-1), scale.shape, axis=0)
    sums = [op.sum(op.Reshape(value, rows), [0], keep=False) for value in (dy * normed, dy)]
    return inner * inverse, sums[0], sums[1]


@operator("BatchNormInternal")
def _batch_norm(
    op: Nodes, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, epsilon: float = 1e-5,
    momentum: float = 0.9, training_mode: int = 1,
) -> Outputs:  # fmt: skip
    """Writes a batch norm in training mode, which the stock engine lacks.

    The outputs are y, the new running mean and variance, and the batch's mean and inverse standard deviation.
    """
    if not training_mode:
        raise ValueError("its training_mode is 0")
    flat = op.Reshape(x, op.ints(0, 0, -1))
    batch_mean = op.ReduceMean(flat, op.ints(0, 2))
    centred = flat - batch_mean
    batch_variance = op.ReduceMean(centred * centred, op.ints(0, 2))
    inverse = op.Reciprocal(op.Sqrt(batch_variance + epsilon))
    column = op.ints(-1, 1)
    y = centred * inverse * op.Reshape(scale, column) + op.Reshape(bias, column)
    batch_mean, batch_variance, inverse = (
        op.Reshape(value, op.ints(-1)) for value in (batch_mean, batch_variance, inverse)
    )
    means = mean * momentum + batch_mean * (1 - momentum)
    return op.Reshape(y, x.shape), means, variance * momentum + batch_variance * (1 - momentum), batch_mean, inverse


@operator("BatchNormalizationGrad")
def _batch_norm_grad(
    op: Nodes, dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, inverse: Tensor, epsilon: float = 1e-5
) -> Outputs:
    column = op.ints(-1, 1)
    flat, flat_dy = op.Reshape(x, op.ints(0, 0, -1)), op.Reshape(dy, op.ints(0, 0, -1))
    normed = (flat - op.Reshape(mean, column)) * op.Reshape(inverse, column)
    means = [op.ReduceMean(value, op.ints(0, 2)) for value in (flat_dy, flat_dy * normed)]
    dx = (flat_dy - means[0] - normed * means[1]) * op.Reshape(scale * inverse, column)
    sums = [op.sum(value, [0, 2], keep=False) for value in (flat_dy * normed, flat_dy)]
    return op.Reshape(dx, x.shape), *sums


# Convolution and pooling


@operator("ConvGrad")
def _conv_grad(op: Nodes, dy: Tensor, x: Tensor, w: Tensor, **attributes: Any) -> Outputs:
    stride, pads, dilation, group = _window(w.rank - 2, **attributes)
    return (
        _image(op, dy, w, x, stride, pads, dilation, group),
        _kernel(op, x, dy, w, stride, pads, dilation, group),
        op.sum(op.Reshape(dy, op.ints(0, 0, -1)), [0, 2], keep=False),
    )


@operator("ConvTransposeGrad")
def _conv_transpose_grad(
    op: Nodes, dy: Tensor, x: Tensor, w: Tensor, output_padding: Any = None, **attributes: Any
) -> Outputs:
    stride, pads, dilation, group = _window(w.rank - 2, **attributes)
    dx = op.Conv(dy, w, strides=stride, pads=pads, dilations=dilation, group=group)
    for axis in range(w.rank - 2):  # an output padding of a stride or more makes room for another window
        dx = op.slice(dx, 0, op.slice(x.shape, 2 + axis, 3 + axis), 2 + axis)
    return (
        dx,
        _kernel(op, dy, x, w, stride, pads, dilation, group),
        op.sum(op.Reshape(dy, op.ints(0, 0, -1)), [0, 2], keep=False),
    )


def _window(
    dims: int, strides: Any = None, pads: Any = None, dilations: Any = None, group: int = 1, kernel_shape: Any = None,
    auto_pad: str = "NOTSET",
) -> tuple[list[int], list[int], list[int], int]:  # fmt: skip
    """Returns the strides, padding (all begins, then all ends), dilations and number of groups of a convolution."""
    if auto_pad not in ("NOTSET", "VALID"):
        raise ValueError(f"its auto_pad is {auto_pad!r}: export the model again with explicit pads")
    ones = [1] * dims
    return list(strides or ones), list(pads or [0] * 2 * dims), list(dilations or ones), group


def _image(
    op: Nodes, dy: Tensor, w: Tensor, x: Tensor, stride: Sequence[int], pads: Sequence[int], dilation: Sequence[int],
    group: int,
) -> Tensor:  # fmt: skip
    """Returns the gradient of a convolution's input: the transposed convolution, cut to the input's size.

    A strided kernel may not reach the last rows of its input, at most stride - 1. Their gradient is zero, so that many
    zeros are added before the cut.
    """
    full = op.ConvTranspose(dy, w, strides=stride, dilations=dilation, group=group)
    dims = len(stride)
    if any(step > 1 for step in stride):
        full = op.Pad(full, op.ints(*[0] * (dims + 4), *(step - 1 for step in stride)))
    for axis in range(dims):
        begin = op.ints(pads[axis])
        full = op.slice(full, begin, begin + op.slice(x.shape, 2 + axis, 3 + axis), 2 + axis)
    return full


def _kernel(
    op: Nodes, image: Tensor, response: Tensor, w: Tensor, stride: Sequence[int], pads: Sequence[int],
    dilation: Sequence[int], group: int,
) -> Tensor:  # fmt: skip
    """Returns the gradient of a convolution's kernel: a convolution with batch and channels swapped.

    Stride and dilation swap roles too. The groups move into the batch dimension.
    """
    places = [*range(3, w.rank + 1)]
    # (batch, channels, ...) -> (channels of a group, groups x batch, ...)
    sizes = image.shape
    apart = op.Concat(op.ints(0, group, -1), op.slice(sizes, 2, w.rank), axis=0)
    swapped = op.Transpose(op.Reshape(image, apart), perm=[2, 1, 0, *places])
    inner = op.Concat(op.ints(0, -1), op.slice(sizes, 2, w.rank), axis=0)
    swapped = op.Reshape(swapped, inner)
    kernel = op.Transpose(response, perm=[1, 0, *range(2, w.rank)])
    full = op.Conv(swapped, kernel, strides=dilation, pads=pads, dilations=stride, group=group)
    for axis in range(w.rank - 2):  # a stride may leave rows at the far edge that no window covers
        full = op.slice(full, 0, op.slice(w.shape, 2 + axis, 3 + axis), 2 + axis)
    return op.Reshape(op.Transpose(full, perm=[1, 0, *range(2, w.rank)]), w.shape)


@operator("MaxPoolGrad")
def _max_pool_grad(op: Nodes, dy: Tensor, indices: Tensor, **window: Any) -> Outputs:
    pool = indices.value.producer()
    if pool is None or pool.inputs[0] is None:
        raise ValueError("its indices do not come from a MaxPool")
    x = Tensor(op, pool.inputs[0])
    flat, places = (op.Reshape(value, op.ints(-1)) for value in (dy, indices))
    zeros = op.zeros(op.Reshape(x.size, op.ints(1)), dy)
    return op.Reshape(op.ScatterElements(zeros, places, flat, reduction="add"), x.shape)


@operator("AveragePoolGrad")
def _average_pool_grad(
    op: Nodes, dy: Tensor, x: Tensor, *, kernel_shape: Sequence[int], strides: Any = None, pads: Any = None,
    auto_pad: str = "NOTSET", count_include_pad: int = 0, ceil_mode: int = 0,
) -> Outputs:  # fmt: skip
    """Writes the transposed convolution of the gradient with a kernel of ones, for each channel separately."""
    if ceil_mode:
        raise ValueError("its ceil_mode is 1: export the model again with windows inside the image")
    dims = len(kernel_shape)
    stride, pads, dilation, _ = _window(dims, strides, pads, auto_pad=auto_pad)
    ones = op.zeros(op.ints(1, 1, *kernel_shape), dy) + 1
    # (batch, channels, ...) -> (batch * channels, 1, ...)
    apart = [op.Concat(op.ints(-1, 1), op.slice(v.shape, 2, dims + 2), axis=0) for v in (dy, x)]
    flat_dy, like = op.Reshape(dy, apart[0]), op.Reshape(x, apart[1])
    number: Any = float(math.prod(kernel_shape))
    if any(pads) and not count_include_pad:
        number = op.Conv(op.zeros(like.shape, dy) + 1, ones, strides=stride, pads=pads)
    return op.Reshape(_image(op, flat_dy / number, ones, like, stride, pads, dilation, 1), x.shape)


# Indexing


@operator("GatherGrad")
def _gather_grad(op: Nodes, shape: Tensor, indices: Tensor, dy: Tensor, axis: int = 0) -> Outputs:
    if axis:  # moves the axis to the front, with the dimensions before and after it flattened
        before = op.ReduceProd(op.slice(shape, 0, axis), keepdims=1)
        after = op.ints(1) if axis == -1 else op.ReduceProd(op.slice(shape, axis + 1, 1 << 30), keepdims=1)
        count = op.Reshape(indices.size, op.ints(1))
        dy = op.Transpose(op.Reshape(dy, op.Concat(before, count, after, axis=0)), perm=[1, 0, 2])
        length = op.Gather(shape, op.ints(axis))
        moved = op.Concat(length, before, after, axis=0)
        return op.Reshape(op.Transpose(_scattered(op, moved, indices, dy), perm=[1, 0, 2]), shape)
    return _scattered(op, shape, indices, dy)


def _scattered(op: Nodes, shape: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Returns zeros to which updates are added at indices of the first axis."""
    rows = op.Reshape(updates, op.Concat(op.ints(-1), op.slice(shape, 1, 1 << 30), axis=0))
    places = op.Cast(op.Reshape(indices, op.ints(-1, 1)), to=ir.DataType.INT64)
    return op.ScatterND(op.zeros(shape, updates), places, rows, reduction="add")


@operator("GatherElementsGrad")
def _gather_elements_grad(op: Nodes, dy: Tensor, shape: Tensor, indices: Tensor, axis: int = 0) -> Outputs:
    return op.ScatterElements(op.zeros(shape, dy), indices, dy, axis=axis, reduction="add")


@operator("GatherNDGrad")
def _gather_nd_grad(op: Nodes, shape: Tensor, indices: Tensor, dy: Tensor, batch_dims: int = 0) -> Outputs:
    for axis in reversed(range(batch_dims)):  # puts the position in each batch dimension before the indices
        length = op.Reshape(op.Gather(shape, op.ints(axis)), op.ints())
        column = op.Reshape(op.Range(0, length, 1), op.ints(*[1] * axis, -1, *[1] * (indices.rank - axis - 1)))
        sizes = op.Concat(op.slice(indices.shape, 0, indices.rank - 1), op.ints(1), axis=0)
        indices = op.Concat(op.Expand(column, sizes), indices, axis=-1)
    return op.ScatterND(op.zeros(shape, dy), indices, dy, reduction="add")


@operator("SliceGrad")
def _slice_grad(
    op: Nodes, dy: Tensor, shape: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Outputs:  # fmt: skip
    """Scatters the gradient to the elements that were sliced; slicing the flat positions gives their places."""
    size = op.ReduceProd(shape, keepdims=1)
    places = op.Reshape(op.Range(0, op.Reshape(size, op.ints()), 1), shape)
    sliced_places = op.Slice(places, starts, ends, axes, steps)
    flat, where = (op.Reshape(value, op.ints(-1)) for value in (dy, sliced_places))
    return op.Reshape(op.ScatterElements(op.zeros(size, dy), where, flat), shape)


@operator("ConcatTraining")
def _concat(op: Nodes, *values: Tensor, axis: int) -> Outputs:
    lengths = [op.Gather(value.shape, op.ints(axis)) for value in values]
    return op.Concat(*values, axis=axis), op.Concat(*lengths, axis=0)
