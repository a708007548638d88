"""Rounding division and remainders: torch.onnx rounds the quotient, PyTorch does not.

``1.0 // 0.1`` is 9 and not 10, because 0.1 is slightly more than a tenth; but the quotient rounds to 10 before it can
be rounded down. Subtracting the remainder first makes the division exact. torch.onnx also divides integers as floats,
which is wrong for large ones.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..fx.operator_table import Value, decomposition, op, translation

aten = torch.ops.aten
prims = torch.ops.prims


Operand = torch.Tensor | float


# Integer types that ONNX Runtime divides, compares and subtracts on all providers.
_DIVISIBLE = (torch.int32, torch.int64)


def _operands(first: Operand, second: Operand, rounded: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Returns both operands as tensors of the dtype in which PyTorch computes, and the dtype of the result.

    PyTorch computes 16-bit floats in fp32. Whether a Python number is ``rounded`` to 16 bits first depends on the
    operator.
    """
    dtype = torch.result_type(first, second)
    device = next(value.device for value in (first, second) if isinstance(value, torch.Tensor))
    within = dtype
    if dtype in (torch.float16, torch.bfloat16):
        within = torch.float32
    elif not dtype.is_floating_point and dtype not in _DIVISIBLE:
        within = torch.int32
    tensors = []
    for value in (first, second):
        if isinstance(value, torch.Tensor):
            tensors.append(value.to(dtype).to(within))
        else:
            number = torch.full((), value, dtype=dtype if rounded else within, device=device)
            tensors.append(number.to(within))
    return tensors[0], tensors[1], dtype


def _truncated(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Returns the quotient rounded towards zero."""
    if first.is_floating_point():
        return (first / second).trunc()
    quotient: torch.Tensor = prims.div.default(*torch.broadcast_tensors(first, second))  # type: ignore[no-untyped-call]
    return quotient


def _floored(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Returns the quotient rounded down, as ``c10::div_floor_floating`` and ``c10::div_floor_integer`` compute it."""
    rest = aten.fmod.Tensor(first, second)
    below = (rest != 0) & ((rest < 0) != (second < 0))
    if not first.is_floating_point():
        whole: torch.Tensor = _truncated(first, second) - below.to(first.dtype)
        return whole
    # The division is exact but for rounding, which may leave it just below a whole number.
    whole = (first - rest) / second - below.to(first.dtype)
    rounded = whole.floor()
    rounded = torch.where(whole - rounded > 0.5, rounded + 1, rounded)
    quotient = first / second
    rounded = torch.where(whole == 0, quotient * 0, rounded)  # a zero with the sign of the quotient
    return torch.where(second == 0, quotient, rounded)


@decomposition(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div_mode(first: Operand, second: Operand, *, rounding_mode: str | None) -> torch.Tensor:
    if rounding_mode is None:
        return torch.true_divide(first, second)  # type: ignore[arg-type]
    a, b, dtype = _operands(first, second)
    return (_floored(a, b) if rounding_mode == "floor" else _truncated(a, b)).to(dtype)


@decomposition(aten.floor_divide.default, aten.floor_divide.Scalar)
def _floor_divide(first: Operand, second: Operand) -> torch.Tensor:
    return _div_mode(first, second, rounding_mode="floor")


@decomposition(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def _remainder(first: Operand, second: Operand) -> torch.Tensor:
    """Returns the remainder, with the sign of the divisor."""
    a, b, dtype = _operands(first, second, rounded=True)
    rest = aten.fmod.Tensor(a, b)
    rest = torch.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
    result: torch.Tensor = rest.to(dtype)
    return result


@decomposition(aten.fmod.Tensor, aten.fmod.Scalar)
def _fmod(first: Operand, second: Operand) -> Any:
    """Leaves the operator to ONNX, except for 16-bit floats and Python numbers."""
    a, b, dtype = _operands(first, second, rounded=True)
    same = isinstance(first, torch.Tensor) and first.dtype == a.dtype == dtype
    if same and isinstance(second, torch.Tensor) and second.dtype == dtype:
        return NotImplemented
    return aten.fmod.Tensor(a, b).to(dtype)


@translation(prims.div.default)
def _divide(first: Value, second: Value) -> Value:
    """Divides floats, or integers with rounding towards zero."""
    return op.Div(first, second)


@translation(operator.floordiv)
def _floordiv(first: Value, second: Value) -> Value:
    """Divides integers and rounds down, as Python does; ONNX rounds towards zero."""
    return op.Div(op.Sub(first, op.Mod(first, second)), second)
