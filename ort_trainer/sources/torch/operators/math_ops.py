"""Reductions, scans and special functions, where torch.onnx lacks them or differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["MATH_DECOMPOSITIONS"]

aten = torch.ops.aten
prims = torch.ops.prims


def _cumprod(input: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Running products as products over the lower triangle of a square: ONNX has no scan by multiplication."""
    input = input if dtype is None else input.to(dtype)
    if input.dim() == 0:
        return input.clone()
    place = torch.arange(input.shape[dim], device=input.device)
    upto = torch.where(place <= place[:, None], input.movedim(dim, -1).unsqueeze(-2), 1)
    return upto.prod(-1).movedim(-1, dim)


def _logcumsumexp(input: torch.Tensor, dim: int) -> torch.Tensor:
    """Likewise, each sum less its own maximum, if that is finite."""
    if input.dim() == 0:
        return input.clone()
    place = torch.arange(input.shape[dim], device=input.device)
    upto = torch.where(place <= place[:, None], input.movedim(dim, -1).unsqueeze(-2), -math.inf)
    highest = upto.amax(-1, keepdim=True)
    highest = torch.where(highest.isinf(), 0.0, highest)
    total = (upto - highest).exp().sum(-1).log() + highest.squeeze(-1)
    return total.movedim(-1, dim)


def _extremum(operator: Any) -> Callable[..., Any]:
    def extremum(input: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        """No dimensions mean all; and ONNX Runtime leaves NaN out."""
        if input.dim() == 0:
            return input.clone()
        dims = sorted({axis % input.dim() for axis in dim}) or list(range(input.dim()))
        result = operator(input, dims)
        if input.is_floating_point():
            result = torch.where(input.isnan().any(dims), math.nan, result)
        for axis in dims if keepdim else []:
            result = result.unsqueeze(axis)
        return result

    return extremum


def _vector_norm(
    input: torch.Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Norms by their formulas: ONNX Runtime's are wrong at infinities and NaN. 16-bit floats are summed in fp32."""
    dims = list(range(input.dim())) if dim is None else list(dim)
    dtype = dtype or input.dtype
    size = input.to(torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype).abs()
    if ord == math.inf:
        result = size.amax(dims, keepdim=keepdim)
    elif ord == -math.inf:
        result = size.amin(dims, keepdim=keepdim)
    elif ord == 0:
        result = (size != 0).to(size.dtype).sum(dims, keepdim=keepdim)
    elif ord == 1:
        result = size.sum(dims, keepdim=keepdim)
    elif ord == 2:
        result = (size * size).sum(dims, keepdim=keepdim).sqrt()
    else:
        result = size.pow(ord).sum(dims, keepdim=keepdim).pow(1 / ord)
    return result.to(dtype)


def _angle(input: torch.Tensor) -> torch.Tensor:
    """Of a real number; NaN has none."""
    angle = torch.where(input < 0, math.pi, 0.0)
    return torch.where(input.isnan(), math.nan, angle) if input.is_floating_point() else angle


def _soft_margin_loss_backward(
    grad_output: torch.Tensor, input: torch.Tensor, target: torch.Tensor, reduction: int
) -> torch.Tensor:
    """PyTorch's formula: NaN where the exponential overflows to infinity."""
    growth = (-target * input).exp()
    share = grad_output / input.numel() if reduction == 1 else grad_output
    return share * (-target * growth / (growth + 1))


def _smooth_l1_loss_backward(
    grad_output: torch.Tensor, input: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> torch.Tensor:
    """What is neither beyond beta nor beyond its negative is divided by it, NaN included."""
    share = grad_output / input.numel() if reduction == 1 else grad_output
    x = input - target
    inner = x / beta if beta else x
    slope = torch.where(x <= -beta, -1.0, torch.where(x >= beta, 1.0, inner))
    return share * (slope if beta else torch.where(x == 0, 0.0, slope))


def _log_softmax(input: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    """ONNX Runtime's is wrong for NaN and infinities in double precision."""
    if input.dtype != torch.float64:
        return NotImplemented
    less = input - input.amax(dim, keepdim=True)
    return less - less.exp().sum(dim, keepdim=True).log()


def _softmax(input: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    """Likewise."""
    if input.dtype != torch.float64:
        return NotImplemented
    growth = (input - input.amax(dim, keepdim=True)).exp()
    return growth / growth.sum(dim, keepdim=True)


def _pairwise(operator: Any) -> Callable[..., Any]:
    def extremum(input: torch.Tensor, other: torch.Tensor) -> Any:
        """In 16 bits ONNX Runtime may lose a NaN."""
        if input.dtype not in (torch.float16, torch.bfloat16) or other.dtype != input.dtype:
            return NotImplemented
        return operator(input.float(), other.float()).to(input.dtype)

    return extremum


def _whole_extremum(operator: Any) -> Callable[..., torch.Tensor]:
    def extremum(input: torch.Tensor) -> torch.Tensor:
        if input.dtype == torch.bool:
            return operator(input.int(), []).bool()  # type: ignore[no-any-return]
        return operator(input, [])  # type: ignore[no-any-return]

    return extremum


def _signbit(input: torch.Tensor) -> torch.Tensor:
    """One by a negative zero is negative: ONNX has no other way to tell."""
    if not input.is_floating_point():
        return input < 0
    return torch.where(input == 0, 1 / input, input) < 0


def _copysign(input: torch.Tensor, other: torch.Tensor | float) -> torch.Tensor:
    if not isinstance(other, torch.Tensor):
        other = torch.full((), float(other), device=input.device)
    size = input.abs() if input.is_floating_point() else input.abs().to(torch.get_default_dtype())
    return torch.where(_signbit(other), -size, size)


def _atan2(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The angle of a point, by the arc tangent of a number up to 1; zeros have signs, and infinities are equal."""
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


# The recurrences lift an argument by so much before the asymptotic series begins.
_LIFT = 6


def _lgamma(input: torch.Tensor) -> torch.Tensor:
    """Logarithm of the gamma function by Stirling's series (DLMF 5.11.1), reflection (5.5.3) and recurrence (5.5.1)."""
    x = input.double()
    reflected = x < 0.5
    y = torch.where(reflected, 1 - x, x)
    product = torch.ones_like(y)
    for step in range(_LIFT):
        product = product * (y + step)
    z = y + _LIFT
    series = 1 / (12 * z) - 1 / (360 * z.pow(3)) + 1 / (1260 * z.pow(5)) - 1 / (1680 * z.pow(7))
    result = (z - 0.5) * z.log() - z + 0.5 * math.log(2 * math.pi) + series - product.log()
    mirrored = math.log(math.pi) - _sin_pi(x).abs().log() - result
    result = torch.where(reflected, mirrored, result)
    pole = (x <= 0) & (x == x.floor()) | x.isinf()
    return torch.where(pole, math.inf, result).to(input.dtype)


def _digamma(input: torch.Tensor) -> torch.Tensor:
    """Derivative of the former: DLMF 5.11.2, 5.5.4 and 5.5.2."""
    x = input.double()
    reflected = x < 0.5
    y = torch.where(reflected, 1 - x, x)
    z = y + _LIFT
    series = 1 / (12 * z.pow(2)) - 1 / (120 * z.pow(4)) + 1 / (252 * z.pow(6)) - 1 / (240 * z.pow(8))
    result = z.log() - 0.5 / z - series
    for step in range(_LIFT):
        result = result - 1 / (y + step)
    cotangent = _sin_pi(x + 0.5) / torch.where(reflected, _sin_pi(x), 1.0)
    result = torch.where(reflected, result - math.pi * cotangent, result)
    result = torch.where((x < 0) & (x == x.floor()), math.nan, result)
    result = torch.where(x == 0, -1 / x, result)
    return torch.where(x == math.inf, x, result).to(input.dtype)


def _polygamma(order: int, input: torch.Tensor) -> Any:
    """The derivative of digamma, which itself is of order 0: DLMF 5.15.8, 5.15.6 and 5.15.5."""
    if order == 0:
        return _digamma(input)
    if order > 1:
        return NotImplemented
    x = input.double()
    reflected = x < 0.5
    y = torch.where(reflected, 1 - x, x)
    z = y + _LIFT
    series = 1 / (6 * z.pow(3)) - 1 / (30 * z.pow(5)) + 1 / (42 * z.pow(7)) - 1 / (30 * z.pow(9))
    result = 1 / z + 0.5 / z.pow(2) + series
    for step in range(_LIFT):
        result = result + (y + step).pow(-2)
    mirrored = (math.pi / torch.where(reflected, _sin_pi(x), 1.0)).square() - result
    return torch.where(reflected, mirrored, result).to(input.dtype)


def _sin_pi(x: torch.Tensor) -> torch.Tensor:
    """Returns sin(pi x); the sine is computed in single precision, as ONNX Runtime has no other."""
    period = x - 2 * (x / 2).round()
    return (math.pi * period).float().sin().to(x.dtype)


def _erfinv(input: torch.Tensor) -> torch.Tensor:
    """Inverse of the error function by the polynomials of M. Giles, "Approximating the erfinv function" (2012)."""
    central = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503,
               -0.00417768164, 0.246640727, 1.50140941)  # fmt: skip
    tail = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613,
            0.00943887047, 1.00167406, 2.83297682)  # fmt: skip
    w = -((1 - input) * (1 + input)).log()
    near, far = w - 2.5, torch.where(w < 5, torch.ones_like(w), w).sqrt() - 3
    inner, outer = torch.zeros_like(w), torch.zeros_like(w)
    for a, b in zip(central, tail, strict=True):
        inner, outer = inner * near + a, outer * far + b
    result = torch.where(w < 5, inner, outer) * input
    return torch.where(input.abs() == 1, input * math.inf, result)


MATH_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.cumprod.default: _cumprod,
    aten.logcumsumexp.default: _logcumsumexp,
    aten.amax.default: _extremum(prims.amax.default),
    aten.amin.default: _extremum(prims.amin.default),
    aten.max.default: _whole_extremum(aten.amax.default),
    aten.min.default: _whole_extremum(aten.amin.default),
    aten.maximum.default: _pairwise(aten.maximum.default),
    aten.minimum.default: _pairwise(aten.minimum.default),
    aten.atan2.default: _atan2,
    aten.angle.default: _angle,
    aten.smooth_l1_loss_backward.default: _smooth_l1_loss_backward,
    aten._log_softmax.default: _log_softmax,
    aten._softmax.default: _softmax,
    aten.soft_margin_loss_backward.default: _soft_margin_loss_backward,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.signbit.default: _signbit,
    aten.copysign.Tensor: _copysign,
    aten.copysign.Scalar: _copysign,
    aten.lgamma.default: _lgamma,
    aten.digamma.default: _digamma,
    aten.polygamma.default: _polygamma,
    aten.erfinv.default: _erfinv,
}
