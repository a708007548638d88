"""Operators that torch.onnx translates wrongly for some element types, or that ONNX does not have for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

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
        """ONNX has a product of matrices of whole numbers, but none with a sum."""
        if not _is_whole(input):
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


def _lerp(input: torch.Tensor, end: torch.Tensor, weight: float) -> Any:
    """torch.onnx rounds the weight to fp32."""
    return input + (end - input) * weight if input.dtype == torch.float64 else NotImplemented


def _vector_norm(
    input: torch.Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """torch.onnx computes the norm of doubles in fp32."""
    input = input if dtype is None else input.to(dtype)
    if input.dtype != torch.float64:
        return NotImplemented
    size, axes = input.abs(), list(range(input.dim())) if dim is None else list(dim)
    if ord in (math.inf, -math.inf):
        return (torch.amax if ord > 0 else torch.amin)(size, axes, keepdim)
    if ord == 0:
        return (size != 0).to(input.dtype).sum(axes, keepdim)
    if ord == 1:
        return size.sum(axes, keepdim)
    return (size * size).sum(axes, keepdim).sqrt() if ord == 2 else (size**ord).sum(axes, keepdim) ** (1 / ord)


DTYPE_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.ceil.default, aten.floor.default, aten.round.default, aten.trunc.default), _rounding),
    **dict.fromkeys((aten.isinf.default, aten.isnan.default), _is_not_finite),
    aten.argmax.default: _index_of_extremum(largest=True),
    aten.argmin.default: _index_of_extremum(largest=False),
    aten.lerp.Scalar: _lerp,
    aten.linalg_vector_norm.default: _vector_norm,
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
