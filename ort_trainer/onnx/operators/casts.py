"""Casts between types, with ONNX's saturation and rounding where PyTorch's differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ..embedded import WEIGHT_TYPES
from ..node_table import Node, known_operator, operator
from ..values import Known, Rounded, as_tensor, each, is_known, torch_dtype

_Tensor = torch.Tensor
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
_WITH_INFINITY = (torch.float8_e5m2,)
# Integers of fewer than 8 bits, and their bits: tensors store them in 8-bit integers.
_SMALL = {ir.DataType.INT4: 4, ir.DataType.UINT4: 4, ir.DataType.INT2: 2, ir.DataType.UINT2: 2}


@operator("Cast", since=6, takes_rounded=True)
def _cast(x: _Tensor | Rounded, *, to: int, saturate: int = 1, round_mode: str = "up", node: Node) -> _Tensor:
    kind = ir.DataType(to)
    return cast(_numbers(x, kind), kind, bool(saturate), round_mode, node)


def _numbers(x: Any, kind: ir.DataType) -> Any:
    """Returns quantized numbers with their gradient if they become floats, and in their own type otherwise."""
    if not isinstance(x, Rounded):
        return x
    return x.values if kind in WEIGHT_TYPES else x.tensor


@known_operator("Cast", since=6)
def _cast_known(x: Known, *, to: int, saturate: int = 1, round_mode: str = "up") -> Any:
    kind = ir.DataType(to)
    if x.dtype != object:
        return x.astype(kind.numpy()) if kind in _OF_NUMPY else NotImplemented
    if kind in (ir.DataType.INT64, ir.DataType.INT32):
        return each(int_of, x)
    if kind in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return each(torch.sym_float, x)
    return NotImplemented


_OF_NUMPY = (
    ir.DataType.INT64,
    ir.DataType.INT32,
    ir.DataType.FLOAT,
    ir.DataType.DOUBLE,
    ir.DataType.FLOAT16,
    ir.DataType.BOOL,
)


def int_of(value: Any) -> Any:
    """Returns a number, symbolic or not, truncated to an integer."""
    return value if isinstance(value, (int, torch.SymInt)) else torch.sym_int(value)  # type: ignore[no-untyped-call]


@operator("CastLike", since=15, known_inputs=(0,), takes_rounded=True)
def _cast_like(x: Any, like: _Tensor | Rounded, *, saturate: int = 1, round_mode: str = "up", node: Node) -> Any:
    kind = node.input_type(1) or ir.tensor_adapters.from_torch_dtype(like.dtype)
    if is_known(x):
        cast_array = _cast_known(x, to=kind)
        if cast_array is not NotImplemented:
            return cast_array
    return cast(as_tensor(_numbers(x, kind)), kind, bool(saturate), round_mode, node)


def cast(x: _Tensor, kind: ir.DataType, saturate: bool, round_mode: str, node: Node) -> _Tensor:
    """Returns a tensor in another ONNX type.

    Args:
        x: The tensor.
        kind: The type.
        saturate: Whether numbers beyond the range of an 8-bit float become its largest number, instead of inf or NaN.
        round_mode: How to round to float8e8m0: up, down or nearest.
        node: The node, for errors.
    """
    if kind in _SMALL:
        return _to_small_integer(x, kind)
    if kind == ir.DataType.FLOAT4E2M1:
        return _to_float4(x).to(torch_dtype(kind))
    dtype = torch_dtype(kind)
    if dtype in _FLOAT8:
        return _to_float8(x, dtype, saturate)
    if dtype == torch.float8_e8m0fnu:
        return _to_e8m0(x, saturate, round_mode, node)
    if dtype == torch.bool and x.dtype.itemsize == 1 and x.is_floating_point():
        x = x.float()
    return x.to(dtype)


def _to_small_integer(x: _Tensor, kind: ir.DataType) -> _Tensor:
    """Keeps the lowest bits, as two's complement for signed types."""
    bits, dtype = _SMALL[kind], torch_dtype(kind)
    whole = x.to(torch.int64) & ((1 << bits) - 1)
    if dtype == torch.int8:
        whole = torch.where(whole >= 1 << (bits - 1), whole - (1 << bits), whole)
    return whole.to(dtype)


def _to_float4(x: _Tensor) -> _Tensor:
    """Rounds to 0, 0.5, 1, 1.5, 2, 3, 4 and 6 and their negatives, ties to the even mantissa."""
    x = x.float()
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    rounded = torch.copysign((torch.round(size / step) * step).clamp(max=6), x)
    return torch.where(torch.isnan(x), -0.0, rounded)  # the type has no NaN


def _to_float8(x: _Tensor, dtype: torch.dtype, saturate: bool) -> _Tensor:
    """Rounds to an 8-bit float; without saturation, numbers beyond its range become inf, or NaN if it has no inf."""
    if not x.is_floating_point() or x.dtype.itemsize == 1:
        x = x.float()
    limit = torch.finfo(dtype).max
    if saturate:
        return torch.where(torch.isnan(x), x, x.clamp(-limit, limit)).to(dtype)
    rounded = x.to(dtype)
    # Some releases of PyTorch saturate in the cast, others don't: numbers too large are replaced before the cast.
    beyond = (x.abs() > limit) & ((rounded.float().abs() >= limit) | torch.isnan(rounded.float()))
    too_large = beyond & (x.abs() >= limit + _half_step(dtype))
    outside = torch.where(x > 0, torch.inf, -torch.inf) if dtype in _WITH_INFINITY else torch.full_like(x, torch.nan)
    return torch.where(too_large | torch.isinf(x), outside.to(x.dtype), x).to(dtype)


def _half_step(dtype: torch.dtype) -> float:
    """Returns half the distance between the largest number of a type and the next if there were one.

    Numbers nearer than that to the largest are rounded to it: half of 2^(exponent - mantissa bits).
    """
    limit = torch.finfo(dtype).max
    bits = 3 if dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz) else 2
    exponent: int = int(np.floor(np.log2(limit)))
    return float(2.0 ** (exponent - bits - 1))


def _to_e8m0(x: _Tensor, saturate: bool, round_mode: str, node: Node) -> _Tensor:
    """Rounds to float8e8m0, whose numbers are powers of two without a sign: the code is the exponent plus 127."""
    if round_mode not in ("up", "down", "nearest"):
        raise node.error(f"round_mode is {round_mode!r}, but must be 'up', 'down' or 'nearest'")
    size = x.float()
    mantissa, exponent = torch.frexp(size)  # 0.5 <= mantissa < 1
    exponent = exponent - 1
    if round_mode == "up":
        exponent = exponent + (mantissa > 0.5).to(exponent.dtype)
    elif round_mode == "nearest":
        exponent = exponent + (mantissa >= 0.75).to(exponent.dtype)
    code = (exponent + 127).clamp(0, 254)
    code = torch.where(torch.isnan(size) | (size < 0), 255, code)
    code = torch.where(torch.isinf(size), 254 if saturate else 255, code)
    return torch.where(size == 0, 0, code).to(torch.uint8).view(torch.float8_e8m0fnu)


@operator("BitCast", since=26)
def _bit_cast(x: _Tensor, *, to: int, node: Node) -> _Tensor:
    kind = ir.DataType(to)
    if kind in _SMALL or kind == ir.DataType.FLOAT4E2M1:
        raise node.error(f"a BitCast to {kind.name} is not supported: PyTorch has no such tensors")
    return x.view(torch_dtype(kind))
