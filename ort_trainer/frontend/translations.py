"""ATen operators that torch.onnx does not translate, translated to ONNX."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript.onnx_types import TensorType

from .after import AFTER, translate_after

__all__ = ["TRANSLATIONS"]

aten = torch.ops.aten
prims = torch.ops.prims


def sym_numel(value: TensorType) -> TensorType:
    """The number of elements of a tensor, as batch norm's gradient needs it."""
    return op.Size(value)


def floordiv(first: TensorType, second: TensorType) -> TensorType:
    """Integer division that rounds down, as Python's does; ONNX's rounds towards zero."""
    return op.Div(op.Sub(first, op.Mod(first, second)), second)


def divide(first: TensorType, second: TensorType) -> TensorType:
    """Division of floats, or of integers towards zero."""
    return op.Div(first, second)


def number(s: Any, dtype: int = -1, **placement: Any) -> TensorType:
    """A number in the precision that it is asked for: torch.onnx rounds it to fp32 on the way to double precision."""
    if isinstance(s, (bool, int, float)):
        return op.Constant(value=ir.tensor(s, dtype=ir.DataType.FLOAT if dtype == -1 else ir.DataType(dtype)))
    return s if dtype == -1 else op.Cast(s, to=dtype)


def full(size: Sequence[Any], fill_value: Any, dtype: int = -1, **placement: Any) -> TensorType:
    """The same number in every element."""
    if dtype == -1 and isinstance(fill_value, (bool, int)):
        dtype = ir.DataType.BOOL if isinstance(fill_value, bool) else ir.DataType.INT64
    value = number(fill_value, dtype)
    sizes = [op.Constant(value_ints=[n]) if isinstance(n, int) else op.Reshape(n, [-1]) for n in size]
    return op.Expand(value, op.Concat(*sizes, axis=0) if sizes else op.Constant(value_ints=[]))


def full_like(value: TensorType, fill_value: Any, dtype: int = -1, **placement: Any) -> TensorType:
    """A number in the shape and, where no other is given, the type of a tensor."""
    return op.Expand(number(fill_value, value.dtype if dtype == -1 else dtype), op.Shape(value))


def identity(value: TensorType) -> TensorType:
    """A view of a tensor as it is."""
    return op.Identity(value)


def hypot(first: TensorType, second: TensorType) -> TensorType:
    """The hypotenuse, scaled so that squares of large numbers do not overflow."""
    first, second = op.Abs(first), op.Abs(second)
    larger = op.Max(first, second)
    scale = op.Where(op.Greater(larger, op.CastLike(0.0, larger)), larger, op.CastLike(1.0, larger))
    first, second = op.Div(first, scale), op.Div(second, scale)
    return op.Mul(scale, op.Sqrt(op.Add(op.Mul(first, first), op.Mul(second, second))))


def fmax(first: TensorType, second: TensorType) -> TensorType:
    """The maximum, where a number beats NaN."""
    return op.Where(op.IsNaN(first), second, op.Where(op.IsNaN(second), first, op.Max(first, second)))


def fmin(first: TensorType, second: TensorType) -> TensorType:
    """The minimum, where a number beats NaN."""
    return op.Where(op.IsNaN(first), second, op.Where(op.IsNaN(second), first, op.Min(first, second)))


def max_pool_with_indices(
    value: TensorType,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[TensorType, TensorType]:
    """Max pooling with indices into each channel's plane, as PyTorch counts them.

    ONNX counts through the whole tensor. What torch.onnx does to find the difference, a second pooling of the whole
    input, costs as much as the pooling itself; the rest of a division by the plane's size does not.
    """
    dims = len(kernel_size)

    def each(values: Sequence[int]) -> list[int]:
        return [*values] * dims if len(values) == 1 else [*values]

    batched = value if len(value.shape) == dims + 2 else op.Unsqueeze(value, [0])
    pooled, flat = op.MaxPool(
        batched,
        kernel_shape=each(kernel_size),
        strides=each(stride) if len(stride) else each(kernel_size),
        pads=each(padding) * 2,
        dilations=each(dilation),
        ceil_mode=int(ceil_mode),
    )
    plane = op.ReduceProd(op.Shape(batched, start=2), keepdims=0)
    indices = op.Mod(flat, plane)
    if batched is not value:
        pooled, indices = op.Squeeze(pooled, [0]), op.Squeeze(indices, [0])
    return pooled, indices


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    AFTER: translate_after,
    aten.sym_numel.default: sym_numel,
    operator.floordiv: floordiv,
    prims.div.default: divide,
    aten.scalar_tensor.default: number,
    aten.full.default: full,
    aten.full_like.default: full_like,
    prims.view_of.default: identity,
    prims.hypot.default: hypot,
    prims.fmax.default: fmax,
    prims.fmin.default: fmin,
    aten.max_pool2d_with_indices.default: max_pool_with_indices,
    aten.max_pool3d_with_indices.default: max_pool_with_indices,
}
