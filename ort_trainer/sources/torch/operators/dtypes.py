"""Operators that torch.onnx translates wrongly for some element types, or that ONNX does not have for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table

from .registry import decomposition, untranslated

__all__ = ["is_whole"]

aten = torch.ops.aten


# A result that is real of a complex input: torch.onnx translates it into what no ONNX Runtime loads.
untranslated(aten._fft_c2r.default)


def is_whole(value: torch.Tensor) -> bool:
    """Returns whether a tensor has whole numbers or truth values."""
    return not value.is_floating_point() and not value.is_complex()


@decomposition(aten.ceil.default, aten.floor.default, aten.round.default, aten.trunc.default)
def _rounding(input: torch.Tensor) -> Any:
    """Whole numbers are round already."""
    return input.clone() if is_whole(input) else NotImplemented


@decomposition(aten.isinf.default, aten.isnan.default)
def _is_not_finite(input: torch.Tensor) -> Any:
    return torch.zeros_like(input, dtype=torch.bool) if is_whole(input) else NotImplemented


def _shift(operator: Any, alias: bool = False) -> Callable[..., Any]:
    def shift(input: torch.Tensor, other: torch.Tensor | int) -> Any:
        """torch.onnx takes unsigned numbers for signed ones behind a shift; short ones have no kernel."""
        if input.dtype not in (torch.uint8, torch.int16):
            return operator(input, other) if alias else NotImplemented
        return operator(input.int(), other).to(input.dtype)

    return shift


for _packet, _alias in (
    (aten.bitwise_left_shift, aten.__lshift__),
    (aten.bitwise_right_shift, aten.__rshift__),
):
    decomposition(_packet.Tensor)(_shift(_packet.Tensor))
    decomposition(_packet.Tensor_Scalar)(_shift(_packet.Tensor_Scalar))
    decomposition(_alias.Tensor)(_shift(_packet.Tensor, alias=True))
    decomposition(_alias.Scalar)(_shift(_packet.Tensor_Scalar, alias=True))


def _of_doubles(operator: Any) -> Callable[..., Any]:
    """Returns PyTorch's own decomposition, for doubles: attributes of ONNX's operators are of fp32."""
    decomposition = decomposition_table[operator]

    def of_doubles(input: torch.Tensor, *args: Any, **settings: Any) -> Any:
        return decomposition(input, *args, **settings) if input.dtype == torch.float64 else NotImplemented

    return of_doubles


for _operator in (
    aten.elu.default,
    aten.hardtanh.default,
    aten.leaky_relu.default,
    aten.lerp.Scalar,
    aten.native_group_norm.default,
):
    decomposition(_operator)(_of_doubles(_operator))


def _scaled(operator: Any) -> Callable[..., Any]:
    def scaled(input: torch.Tensor, other: torch.Tensor, *, alpha: float = 1) -> Any:
        """The factor, likewise."""
        if alpha == 1 or torch.result_type(input, other) != torch.float64:
            return NotImplemented
        return operator(input, other * alpha)

    return scaled


decomposition(aten.add.Tensor)(_scaled(aten.add.Tensor))
decomposition(aten.sub.Tensor)(_scaled(aten.sub.Tensor))


@decomposition(aten.pow.Tensor_Scalar)
def _power(input: torch.Tensor, exponent: float) -> Any:
    """The exponent, likewise."""
    if input.dtype != torch.float64 or exponent == int(exponent):
        return NotImplemented
    return aten.pow.Tensor_Tensor(input, aten.scalar_tensor.default(exponent, dtype=torch.float64))


@decomposition(aten.pow.Scalar)
def _power_of_number(base: float, exponent: torch.Tensor) -> Any:
    if exponent.dtype != torch.float64:
        return NotImplemented
    return aten.pow.Tensor_Tensor(aten.scalar_tensor.default(base, dtype=torch.float64), exponent)
