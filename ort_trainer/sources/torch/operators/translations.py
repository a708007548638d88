"""ATen operators that torch.onnx does not translate, translated to ONNX."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript.onnx_types import TensorType

from ..after import AFTER, translate_after
from .order_translations import ORDER_TRANSLATIONS

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
    infinity = op.CastLike(float("inf"), larger)
    infinite = op.Or(op.Equal(first, infinity), op.Equal(second, infinity))
    first, second = op.Div(first, scale), op.Div(second, scale)
    length = op.Mul(scale, op.Sqrt(op.Add(op.Mul(first, first), op.Mul(second, second))))
    return op.Where(infinite, infinity, length)


def fmax(first: TensorType, second: TensorType) -> TensorType:
    """The maximum, where a number beats NaN."""
    return op.Where(op.IsNaN(first), second, op.Where(op.IsNaN(second), first, op.Max(first, second)))


def fmin(first: TensorType, second: TensorType) -> TensorType:
    """The minimum, where a number beats NaN."""
    return op.Where(op.IsNaN(first), second, op.Where(op.IsNaN(second), first, op.Min(first, second)))


def square_root(value: TensorType) -> TensorType:
    """The square root; ONNX Runtime has NaN for infinity, and loses the sign of a zero."""
    special = op.Or(op.Equal(value, op.CastLike(0.0, value)), op.Equal(value, op.CastLike(float("inf"), value)))
    return op.Div(value, op.Sqrt(op.Where(special, op.CastLike(1.0, value), value)))


def reciprocal_square_root(value: TensorType) -> TensorType:
    """One by the square root."""
    return op.Reciprocal(square_root(value))


def clamp_min(value: TensorType, low: Any) -> TensorType:
    """The larger one: a Clip without an upper limit makes the largest finite number of infinity."""
    return op.Max(value, _like(low, value))


def clamp_max(value: TensorType, high: Any) -> TensorType:
    """The smaller one, likewise."""
    return op.Min(value, _like(high, value))


def clamp(value: TensorType, low: Any = None, high: Any = None) -> TensorType:
    """A value within two limits; if they contradict each other, the upper one counts."""
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):
        return op.Clip(value, _like(low, value), _like(high, value))
    value = value if low is None else clamp_min(value, low)
    return value if high is None else clamp_max(value, high)


def _like(number: Any, value: TensorType) -> TensorType:
    return op.Constant(value=ir.tensor(number, dtype=value.dtype)) if isinstance(number, (int, float)) else number


def sign(value: TensorType) -> TensorType:
    """The sign; NaN has none in PyTorch."""
    if not value.dtype.is_floating_point():
        return op.Sign(value)
    return op.Where(op.IsNaN(value), op.CastLike(0.0, value), op.Sign(value))


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
    aten.sqrt.default: square_root,
    aten.rsqrt.default: reciprocal_square_root,
    aten.clamp.default: clamp,
    aten.clamp_min.default: clamp_min,
    aten.clamp_max.default: clamp_max,
    aten.sign.default: sign,
    aten.sgn.default: sign,
    **ORDER_TRANSLATIONS,
}
