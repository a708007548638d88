"""Operators that torch.onnx translates wrongly for some dtypes, or that ONNX lacks for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table

from ..fx.operator_table import Value, decomposition, ir, op, translation, untranslated

aten = torch.ops.aten


# The input is complex, the result real: no ONNX Runtime loads torch.onnx's translation.
untranslated(aten._fft_c2r.default)


def is_whole(value: torch.Tensor) -> bool:
    """Returns whether a tensor is of integers or bools."""
    return not value.is_floating_point() and not value.is_complex()


@decomposition(aten.ceil.default, aten.floor.default, aten.round.default, aten.trunc.default)
def _rounding(input: torch.Tensor) -> Any:
    """Copies integers, which need no rounding."""
    return input.clone() if is_whole(input) else NotImplemented


@decomposition(aten.isinf.default, aten.isnan.default)
def _is_not_finite(input: torch.Tensor) -> Any:
    return torch.zeros_like(input, dtype=torch.bool) if is_whole(input) else NotImplemented


def _shift(operator: Any, alias: bool = False) -> Callable[..., Any]:
    def shift(input: torch.Tensor, other: torch.Tensor | int) -> Any:
        """Shifts as int32: torch.onnx treats unsigned numbers as signed after a shift, and int16 has no kernel."""
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


def _of_dtypes(operator: Any, *dtypes: torch.dtype) -> Callable[..., Any]:
    """Returns PyTorch's own decomposition, for some dtypes only."""
    decomposition = decomposition_table[operator]

    def of_dtypes(input: torch.Tensor, *args: Any, **settings: Any) -> Any:
        return decomposition(input, *args, **settings) if input.dtype in dtypes else NotImplemented

    return of_dtypes


# Attributes of ONNX operators are fp32, and ONNX's Elu takes no bfloat16.
decomposition(aten.elu.default)(_of_dtypes(aten.elu.default, torch.float64, torch.bfloat16))
for _operator in (
    aten.hardtanh.default,
    aten.leaky_relu.default,
    aten.lerp.Scalar,
):
    decomposition(_operator)(_of_dtypes(_operator, torch.float64))
# Without weights, torch.onnx's translation mixes fp32 and bfloat16.
decomposition(aten.native_group_norm.default)(_of_dtypes(aten.native_group_norm.default, torch.float64, torch.bfloat16))


def _logarithm(base: int) -> Callable[[torch.Tensor], Any]:
    def logarithm(input: torch.Tensor) -> Any:
        """Divides doubles by a double: torch.onnx rounds the logarithm of the base to fp32."""
        return input.log() / math.log(base) if input.dtype == torch.float64 else NotImplemented

    return logarithm


decomposition(aten.log2.default)(_logarithm(2))
decomposition(aten.log10.default)(_logarithm(10))


def _scaled(operator: Any) -> Callable[..., Any]:
    def scaled(input: torch.Tensor, other: torch.Tensor, *, alpha: float = 1) -> Any:
        """Multiplies by the factor separately for doubles: an attribute would be fp32."""
        if alpha == 1 or torch.result_type(input, other) != torch.float64:
            return NotImplemented
        return operator(input, other * alpha)

    return scaled


decomposition(aten.add.Tensor)(_scaled(aten.add.Tensor))
decomposition(aten.sub.Tensor)(_scaled(aten.sub.Tensor))


def _with_a_size(operator: Any) -> Callable[..., Any]:
    def with_a_size(input: torch.Tensor, other: Any, *alpha: Any) -> Any:
        """Makes a number that is computed from sizes, as in the gradient of a variance, a tensor."""
        if not isinstance(other, (torch.SymInt, torch.SymFloat)):
            return NotImplemented
        dtype = input.dtype if input.is_floating_point() or isinstance(other, torch.SymInt) else None
        return operator(input, aten.scalar_tensor.default(other, dtype=dtype), *alpha)

    return with_a_size


for _packet in (aten.add, aten.sub, aten.mul, aten.div):
    decomposition(_packet.Scalar)(_with_a_size(_packet.Tensor))


@decomposition(aten.pow.Tensor_Scalar)
def _power(input: torch.Tensor, exponent: float) -> Any:
    """Makes the exponent a tensor if it is computed from sizes, and for doubles: torch.onnx would round it to fp32."""
    if isinstance(exponent, torch.SymFloat):
        dtype = input.dtype if input.is_floating_point() else torch.get_default_dtype()
        return aten.pow.Tensor_Tensor(input, aten.scalar_tensor.default(exponent, dtype=dtype))
    if input.dtype != torch.float64 or exponent == int(exponent):
        return NotImplemented
    return aten.pow.Tensor_Tensor(input, aten.scalar_tensor.default(exponent, dtype=torch.float64))


@decomposition(aten.pow.Scalar)
def _power_of_number(base: float, exponent: torch.Tensor) -> Any:
    if exponent.dtype != torch.float64:
        return NotImplemented
    return aten.pow.Tensor_Tensor(aten.scalar_tensor.default(base, dtype=torch.float64), exponent)


@translation(aten.scalar_tensor.default)
def number(s: Any, dtype: int = -1, **placement: Any) -> Value:
    """Returns a number in the requested precision: torch.onnx rounds it to fp32 on the way to double precision."""
    if isinstance(s, (bool, int, float)):
        return op.Constant(value=ir.tensor(s, dtype=ir.DataType.FLOAT if dtype == -1 else ir.DataType(dtype)))
    return s if dtype == -1 else op.Cast(s, to=dtype)


@translation(aten.full.default)
def _full(size: Sequence[Any], fill_value: Any, dtype: int = -1, **placement: Any) -> Value:
    """Returns a tensor with the same number in every element."""
    if dtype == -1 and isinstance(fill_value, (bool, int)):
        dtype = ir.DataType.BOOL if isinstance(fill_value, bool) else ir.DataType.INT64
    value = number(fill_value, dtype)
    sizes = [op.Constant(value_ints=[n]) if isinstance(n, int) else op.Reshape(n, [-1]) for n in size]
    return op.Expand(value, op.Concat(*sizes, axis=0) if sizes else op.Constant(value_ints=[]))


@translation(aten.full_like.default)
def _full_like(value: Value, fill_value: Any, dtype: int = -1, **placement: Any) -> Value:
    """Returns a tensor of one number, in the shape of another and, by default, in its dtype."""
    return op.Expand(number(fill_value, value.dtype if dtype == -1 else dtype), op.Shape(value))
