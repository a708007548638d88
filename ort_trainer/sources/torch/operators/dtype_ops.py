"""Operators that torch.onnx translates wrongly for some element types, or that ONNX does not have for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table

__all__ = ["DTYPE_DECOMPOSITIONS"]

aten = torch.ops.aten


def _is_whole(value: torch.Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex()


def _shift(operator: Any, alias: bool = False) -> Callable[..., Any]:
    def shift(input: torch.Tensor, other: torch.Tensor | int) -> Any:
        """torch.onnx takes unsigned numbers for signed ones behind a shift; short ones have no kernel."""
        if input.dtype not in (torch.uint8, torch.int16):
            return operator(input, other) if alias else NotImplemented
        return operator(input.int(), other).to(input.dtype)

    return shift


def _rounding(input: torch.Tensor) -> Any:
    """Whole numbers are round already."""
    return input.clone() if _is_whole(input) else NotImplemented


def _is_not_finite(input: torch.Tensor) -> Any:
    return torch.zeros_like(input, dtype=torch.bool) if _is_whole(input) else NotImplemented


def _product(operator: Any) -> Callable[..., Any]:
    def product(
        input: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Any:
        """ONNX has a product with a sum for fractions only, with factors of fp32, and of no empty matrices."""
        is_empty = isinstance(first.shape[-1], int) and first.shape[-1] == 0
        if not is_empty and not _is_whole(input) and (input.dtype != torch.float64 or alpha == beta == 1):
            return NotImplemented
        return beta * input + alpha * operator(first, second)

    return product


def _index_of_extremum(largest: bool) -> Callable[..., Any]:
    def index(input: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        """ONNX Runtime looks for the extremum of 32-bit numbers only; the first of a sorted list is the same."""
        if input.dtype != torch.int64 or input.dim() == 0:
            return NotImplemented
        if dim is None:
            found = input.reshape(-1).topk(1, 0, largest).indices
            return found.reshape([1] * input.dim()) if keepdim else found.squeeze(0)
        found = input.topk(1, dim, largest).indices
        return found if keepdim else found.squeeze(dim)

    return index


def _of_doubles(operator: Any) -> Callable[..., Any]:
    """Returns PyTorch's own decomposition, for doubles: attributes of ONNX's operators are of fp32."""
    decomposition = decomposition_table[operator]

    def of_doubles(input: torch.Tensor, *args: Any, **settings: Any) -> Any:
        return decomposition(input, *args, **settings) if input.dtype == torch.float64 else NotImplemented

    return of_doubles


def _scaled(operator: Any) -> Callable[..., Any]:
    def scaled(input: torch.Tensor, other: torch.Tensor, *, alpha: float = 1) -> Any:
        """The factor, likewise."""
        if alpha == 1 or torch.result_type(input, other) != torch.float64:
            return NotImplemented
        return operator(input, other * alpha)

    return scaled


def _power(input: torch.Tensor, exponent: float) -> Any:
    """The exponent, likewise."""
    if input.dtype != torch.float64 or exponent == int(exponent):
        return NotImplemented
    return aten.pow.Tensor_Tensor(input, aten.scalar_tensor.default(exponent, dtype=torch.float64))


def _power_of_number(base: float, exponent: torch.Tensor) -> Any:
    if exponent.dtype != torch.float64:
        return NotImplemented
    return aten.pow.Tensor_Tensor(aten.scalar_tensor.default(base, dtype=torch.float64), exponent)


DTYPE_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.ceil.default, aten.floor.default, aten.round.default, aten.trunc.default), _rounding),
    **dict.fromkeys((aten.isinf.default, aten.isnan.default), _is_not_finite),
    aten.argmax.default: _index_of_extremum(largest=True),
    aten.argmin.default: _index_of_extremum(largest=False),
    **{
        operator: _of_doubles(operator)
        for operator in (
            aten.elu.default,
            aten.hardtanh.default,
            aten.leaky_relu.default,
            aten.lerp.Scalar,
            aten.native_group_norm.default,
        )
    },
    aten.add.Tensor: _scaled(aten.add.Tensor),
    aten.sub.Tensor: _scaled(aten.sub.Tensor),
    aten.pow.Scalar: _power_of_number,
    aten.pow.Tensor_Scalar: _power,
    aten.addmm.default: _product(aten.mm.default),
    aten.baddbmm.default: _product(aten.bmm.default),
    aten.__lshift__.Scalar: _shift(aten.bitwise_left_shift.Tensor_Scalar, alias=True),
    aten.__lshift__.Tensor: _shift(aten.bitwise_left_shift.Tensor, alias=True),
    aten.__rshift__.Scalar: _shift(aten.bitwise_right_shift.Tensor_Scalar, alias=True),
    aten.__rshift__.Tensor: _shift(aten.bitwise_right_shift.Tensor, alias=True),
    aten.bitwise_left_shift.Tensor: _shift(aten.bitwise_left_shift.Tensor),
    aten.bitwise_left_shift.Tensor_Scalar: _shift(aten.bitwise_left_shift.Tensor_Scalar),
    aten.bitwise_right_shift.Tensor: _shift(aten.bitwise_right_shift.Tensor),
    aten.bitwise_right_shift.Tensor_Scalar: _shift(aten.bitwise_right_shift.Tensor_Scalar),
}
