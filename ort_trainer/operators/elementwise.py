"""Elementwise functions that torch.onnx lacks, or that differ at infinities, NaN and zeros."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..fx.operator_table import Value, composite, decomposition, ir, op, translation

aten = torch.ops.aten
prims = torch.ops.prims


def with_zero_gradient(value: torch.Tensor, constant_in: torch.Tensor) -> torch.Tensor:
    """Returns the value with a zero gradient for ``constant_in``: weight decay applies only where a gradient exists."""
    never = torch.zeros((), dtype=torch.bool, device=value.device)
    return torch.where(never, constant_in.sum().to(value.dtype), value)


@composite(aten.log_sigmoid.default, for_pytorch=True)
def _log_sigmoid(input: torch.Tensor) -> torch.Tensor:
    """Takes a contiguous copy: PyTorch's description of the kernel has another order in memory than its result."""
    result: torch.Tensor = aten.log_sigmoid.default(input.contiguous())
    return result


@translation(aten.sqrt.default)
def _square_root(value: Value) -> Value:
    """Returns the square root; ONNX Runtime's is NaN for infinity, and loses the sign of zero."""
    special = op.Or(op.Equal(value, op.CastLike(0.0, value)), op.Equal(value, op.CastLike(float("inf"), value)))
    return op.Div(value, op.Sqrt(op.Where(special, op.CastLike(1.0, value), value)))


@translation(aten.rsqrt.default)
def _reciprocal_square_root(value: Value) -> Value:
    """Returns one over the square root."""
    return op.Reciprocal(_square_root(value))


@translation(aten.sigmoid.default)
def _sigmoid(value: Value) -> Value:
    """Returns 1 / (1 + exp(-value)).

    ONNX Runtime's Sigmoid is exact to 1e-7 of 1, and 0 below -18, so a small one has a wrong logarithm.
    In halves, where nothing is between that and 0, exp would overflow.
    """
    if value.dtype == ir.DataType.FLOAT16:
        return op.Sigmoid(value)
    return op.Reciprocal(op.Add(op.CastLike(1.0, value), op.Exp(op.Neg(value))))


@translation(aten.log1p.default)
def _log1p(value: Value) -> Value:
    """Returns log(1 + value), also of small values: corrected by what the sum lost (Kahan; HP-15C handbook, 1982)."""
    one = op.CastLike(1.0, value)
    total = op.Add(one, value)
    is_value = op.Or(op.Equal(total, one), op.Equal(total, op.CastLike(float("inf"), value)))
    lost = op.Div(value, op.Sub(op.Where(is_value, op.CastLike(2.0, value), total), one))
    return op.Where(is_value, value, op.Mul(op.Log(total), lost))


@translation(aten.expm1.default)
def _expm1(value: Value) -> Value:
    """Returns exp(value) - 1, also of small values, as tanh(value / 2) (exp(value) + 1)."""
    half = op.Mul(value, op.CastLike(0.5, value))
    return op.Mul(op.Tanh(half), op.Add(op.Exp(value), op.CastLike(1.0, value)))


@translation(aten.softplus.default)
def _softplus(value: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    """Returns log(1 + exp(beta value)) / beta, and the value itself beyond the threshold."""
    scaled = op.Mul(value, op.CastLike(float(beta), value))
    # As for _sigmoid.
    logarithm = op.Softplus(scaled) if value.dtype == ir.DataType.FLOAT16 else _log1p(op.Exp(scaled))
    small = op.Div(logarithm, op.CastLike(float(beta), value))
    return op.Where(op.Greater(scaled, op.CastLike(float(threshold), value)), value, small)


@translation(prims.hypot.default)
def _hypot(first: Value, second: Value) -> Value:
    """Returns the hypotenuse, scaled so that squares of large numbers do not overflow."""
    first, second = op.Abs(first), op.Abs(second)
    larger = op.Max(first, second)
    scale = op.Where(op.Greater(larger, op.CastLike(0.0, larger)), larger, op.CastLike(1.0, larger))
    infinity = op.CastLike(float("inf"), larger)
    infinite = op.Or(op.Equal(first, infinity), op.Equal(second, infinity))
    first, second = op.Div(first, scale), op.Div(second, scale)
    length = op.Mul(scale, op.Sqrt(op.Add(op.Mul(first, first), op.Mul(second, second))))
    return op.Where(infinite, infinity, length)


@translation(aten.clamp.default)
def _clamp(value: Value, low: Any = None, high: Any = None) -> Value:
    """Clamps a value to two limits; if they contradict each other, the upper one wins."""
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):
        return op.Clip(value, _like(low, value), _like(high, value))
    value = value if low is None else _clamp_min(value, low)
    return value if high is None else _clamp_max(value, high)


@translation(aten.clamp_min.default)
def _clamp_min(value: Value, low: Any) -> Value:
    """Takes the maximum: a Clip without an upper limit turns infinity into the largest finite number."""
    return op.Max(value, _like(low, value))


@translation(aten.clamp_max.default)
def _clamp_max(value: Value, high: Any) -> Value:
    """Takes the minimum, for the same reason."""
    return op.Min(value, _like(high, value))


def _like(number: Any, value: Value) -> Value:
    return op.Constant(value=ir.tensor(number, dtype=value.dtype)) if isinstance(number, (int, float)) else number


@translation(aten.sign.default, aten.sgn.default)
def _sign(value: Value) -> Value:
    """Returns the sign; PyTorch's is 0 for NaN."""
    if not value.dtype.is_floating_point():
        return op.Sign(value)
    return op.Where(op.IsNaN(value), op.CastLike(0.0, value), op.Sign(value))


@decomposition(aten.signbit.default)
def _signbit(input: torch.Tensor) -> torch.Tensor:
    """Finds the sign of a zero by 1 / zero: ONNX has no other way."""
    if not input.is_floating_point():
        return input < 0
    return torch.where(input == 0, 1 / input, input) < 0


@decomposition(aten.copysign.Tensor, aten.copysign.Scalar)
def _copysign(input: torch.Tensor, other: torch.Tensor | float) -> torch.Tensor:
    if not isinstance(other, torch.Tensor):
        other = torch.full((), float(other), device=input.device)
    size = input.abs() if input.is_floating_point() else input.abs().to(torch.get_default_dtype())
    return torch.where(_signbit(other), -size, size)


@decomposition(aten.angle.default)
def _angle(input: torch.Tensor) -> torch.Tensor:
    """Returns the angle of a real number, or NaN for NaN."""
    angle = (input < 0).to(input.dtype if input.is_floating_point() else torch.get_default_dtype()) * math.pi
    return torch.where(input.isnan(), math.nan, angle) if input.is_floating_point() else angle


@decomposition(aten.atan2.default)
def _atan2(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns the angle of a point by the arc tangent of a ratio up to 1; zeros have signs, infinities are equal."""
    dtype = torch.result_type(input, other)
    y, x = (value.to(dtype if dtype.is_floating_point else torch.float32) for value in (input, other))
    height, width = y.abs(), x.abs()
    low, high = torch.minimum(height, width), torch.maximum(height, width)
    ratio = torch.where(low == high, (low > 0).to(low.dtype), low / high)
    angle = ratio.atan()
    angle = torch.where(height > width, math.pi / 2 - angle, angle)
    angle = torch.where(_signbit(x), math.pi - angle, angle)
    angle = torch.where(_signbit(y), -angle, angle)
    return torch.where(high.isnan(), high, angle)
