"""The error function, the gamma function and their relatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..fx.operator_table import composite, decomposition, keep

aten = torch.ops.aten


def _with_nan(operator: Any) -> Callable[..., torch.Tensor]:
    def function(input: torch.Tensor) -> torch.Tensor:
        """Propagates NaN: ONNX Runtime's error function returns 1 for it. (GELU also multiplies by its input.)"""
        result: torch.Tensor = operator(input)
        return result + torch.where(input.isnan(), input, 0.0).detach()

    return function


for _operator in (aten.erf.default, aten.erfc.default, aten.special_ndtr.default):
    composite(_operator)(_with_nan(_operator))


# Unsupported: ONNX has no complementary error function, and 1 - erf has no digits left where log_ndtr begins to matter.
keep(aten.special_log_ndtr.default)


@decomposition(aten.erfinv.default)
def _erfinv(input: torch.Tensor) -> torch.Tensor:
    """Computes erfinv by the polynomials of M. Giles, "Approximating the erfinv function" (2012)."""
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


# The recurrences raise an argument by this much before the asymptotic series is used.
_LIFT = 6


@decomposition(aten.lgamma.default)
def _lgamma(input: torch.Tensor) -> torch.Tensor:
    """Computes log-gamma by Stirling's series (DLMF 5.11.1), reflection (5.5.3) and recurrence (5.5.1)."""
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


@decomposition(aten.digamma.default)
def _digamma(input: torch.Tensor) -> torch.Tensor:
    """Computes the derivative of log-gamma by DLMF 5.11.2, 5.5.4 and 5.5.2."""
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


@decomposition(aten.polygamma.default)
def _polygamma(order: int, input: torch.Tensor) -> Any:
    """Computes digamma (order 0) or its derivative (order 1), by DLMF 5.15.8, 5.15.6 and 5.15.5."""
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
    """Returns sin(pi x); the sine is computed in single precision, the only one that ONNX Runtime has."""
    period = x - 2 * (x / 2).round()
    return (math.pi * period).float().sin().to(x.dtype)
