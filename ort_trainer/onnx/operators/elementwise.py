"""Elementwise operators: arithmetic, comparisons, logic and bits, rounding, and functions of one number."""

from __future__ import annotations

import functools
import operator as python
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..node_table import Node, known_operator, operator
from ..values import Known, each

_Tensor = torch.Tensor
_NO_LIMIT = torch.finfo(torch.float32).max
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def _widened(function: Callable[..., _Tensor]) -> Callable[..., _Tensor]:
    """Returns a function that computes unsigned types in int64, because PyTorch has few kernels for them."""

    @functools.wraps(function)
    def wrapped(*args: Any, **keywords: Any) -> _Tensor:
        dtype = next((a.dtype for a in args if isinstance(a, _Tensor) and a.dtype in _UNSIGNED), None)
        if dtype is None:
            return function(*args, **keywords)
        args = tuple(a.to(torch.int64) if isinstance(a, _Tensor) and a.dtype in _UNSIGNED else a for a in args)
        result = function(*args, **keywords)
        return result.to(dtype) if result.dtype == torch.int64 else result

    return wrapped


def _filled(value: Any, other: Any) -> _Tensor:
    """Returns a number as a tensor of the other operand's dtype."""
    return value if isinstance(value, _Tensor) else torch.full((), value, dtype=other.dtype)


def unary(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a function of torch, which has no signature for the registry to inspect."""
    return lambda x: function(x)


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Like :func:`unary`, for two operands."""
    return lambda a, b: function(a, b)


for _name, _function in {"Add": python.add, "Sub": python.sub, "Mul": python.mul}.items():
    operator(_name, since=7, scalars=True)(_widened(_binary(_function)))
    known_operator(_name, since=7)(_binary(_function))


@operator("Div", since=7, scalars=True)
@_widened
def _divide(a: Any, b: Any) -> _Tensor:
    a = _filled(a, b)
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


@known_operator("Div", since=7)
def _divide_known(a: Known, b: Known) -> Any:
    if a.dtype.kind == "f" or b.dtype.kind == "f":
        return a / b if object not in (a.dtype, b.dtype) else NotImplemented
    if not all(isinstance(value, (int, np.integer, torch.SymInt)) for value in (*a.flat, *b.flat)):
        return NotImplemented  # symbolic floating-point numbers
    if not b.all():
        return NotImplemented  # leaves division by zero to the function for tensors
    floor = a // b
    # ONNX truncates, which differs from the floor if the signs differ and there is a remainder.
    return floor if all(np.broadcast((a >= 0) == (b > 0)).iters[0]) else floor + ((a % b != 0) & ((a < 0) != (b < 0)))


@operator("Mod", since=10, scalars=(1,))
@_widened
def _modulo(a: _Tensor, b: Any, *, fmod: int) -> _Tensor:
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


@known_operator("Mod", since=10)
def _modulo_known(a: Known, b: Known, *, fmod: int) -> Any:
    return a % b if not fmod and b.all() else NotImplemented


@operator("Pow", since=7, scalars=(1,))
def _power(base: _Tensor, exponent: Any) -> _Tensor:
    if base.dtype in _UNSIGNED:
        return torch.pow(base.to(torch.int64), _signed(exponent)).to(base.dtype)
    if not base.is_floating_point() and isinstance(exponent, _Tensor) and not exponent.is_floating_point():
        return torch.pow(base, _signed(exponent)).to(base.dtype)
    return torch.pow(base, _signed(exponent)).to(base.dtype)


def _signed(value: Any) -> Any:
    return value.to(torch.int64) if isinstance(value, _Tensor) and value.dtype in _UNSIGNED else value


def _folded(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Like :func:`unary`, for any number of operands of a function of two."""
    return lambda *values: functools.reduce(function, values)


operator("Sum", since=6)(_folded(python.add))


@operator("Mean", since=6)
def _mean(*values: _Tensor) -> _Tensor:
    return functools.reduce(python.add, values) / len(values)


def _extreme(of_arrays: Callable[..., Any], of_symbols: Callable[..., Any]) -> Callable[..., Any]:
    def extreme(*values: Known) -> Any:
        if any(value.dtype.kind == "f" for value in values):
            return NotImplemented  # they may be NaN, which torch.sym_max does not propagate
        are_numbers = all(value.dtype.kind in "iub" for value in values)
        return functools.reduce(of_arrays if are_numbers else np.frompyfunc(of_symbols, 2, 1), values)

    return extreme


for _name, _function, _known in (
    ("Max", torch.maximum, _extreme(np.maximum, torch.sym_max)),
    ("Min", torch.minimum, _extreme(np.minimum, torch.sym_min)),
):
    operator(_name, since=6)(_widened(_folded(_function)))
    known_operator(_name, since=6)(_known)


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "Equal": python.eq,
    "Greater": python.gt,
    "GreaterOrEqual": python.ge,
    "Less": python.lt,
    "LessOrEqual": python.le,
}


def _decided(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a comparison of sizes that is decided in the trace: the exporter records its outcome as a condition."""
    return lambda a, b: np.asarray(compare(a, b)).astype(np.bool_)


for _name, _function in _COMPARISONS.items():
    operator(_name, since=7, scalars=True)(_widened(_binary(_function)))
    known_operator(_name, since=7)(_decided(_function))


for _name, _function, _of_arrays in (
    ("And", torch.logical_and, np.logical_and),
    ("Or", torch.logical_or, np.logical_or),
    ("Xor", torch.logical_xor, np.logical_xor),
):
    operator(_name, since=7)(_binary(_function))
    known_operator(_name, since=7)(_binary(_of_arrays))
operator("Not")(unary(torch.logical_not))
known_operator("Not")(unary(np.logical_not))
for _name, _function in {"BitwiseAnd": python.and_, "BitwiseOr": python.or_, "BitwiseXor": python.xor}.items():
    operator(_name, since=18)(_widened(_binary(_function)))
operator("BitwiseNot", since=18)(_widened(unary(python.invert)))


@operator("BitShift", since=11)
@_widened
def _shift(x: _Tensor, bits: _Tensor, *, direction: str, node: Node) -> _Tensor:
    if direction == "LEFT":
        return torch.bitwise_left_shift(x, bits)
    if direction != "RIGHT":
        raise node.error(f"direction is {direction!r}, but must be 'LEFT' or 'RIGHT'")
    if x.dtype != torch.int64:
        return torch.bitwise_right_shift(x, bits)
    # A shift of int64 repeats the sign bit, but the operand may be an unsigned number: the new bits are cleared.
    rest = torch.bitwise_left_shift(torch.ones_like(bits), 63 - (bits - 1).clamp(min=0)) - 1
    return torch.where(bits == 0, x, torch.bitwise_right_shift(x, bits) & rest)


# Only y may be a Python number: two would not determine the dtype.
@operator("Where", since=9, scalars=(2,))
@_widened
def _where(condition: _Tensor, x: _Tensor, y: Any) -> _Tensor:
    return torch.where(condition, x, y)


known_operator("Where", since=9)(lambda condition, x, y: np.where(condition, x, y))


_FUNCTIONS: dict[str, Callable[[_Tensor], _Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Round": torch.round,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
for _name, _of_tensor in _FUNCTIONS.items():
    operator(_name)(_widened(unary(_of_tensor)))


@operator("Sign", since=9)
@_widened
def _sign(x: _Tensor) -> _Tensor:
    return torch.where(torch.isnan(x), x, torch.sign(x)) if x.is_floating_point() else torch.sign(x)


@operator("IsInf", since=10)
def _is_infinite(x: _Tensor, *, detect_negative: int, detect_positive: int) -> _Tensor:
    if not x.is_floating_point() or x.dtype.itemsize == 1:
        x = x.float()
    is_infinite = torch.isposinf(x) if detect_positive else torch.zeros_like(x, dtype=torch.bool)
    return is_infinite | torch.isneginf(x) if detect_negative else is_infinite


known_operator("Abs")(unary(np.abs))
known_operator("Neg")(unary(python.neg))


@known_operator("Floor")
def _floor_known(x: Known) -> Any:
    return np.floor(x) if x.dtype.kind == "f" else each(_floored, x)


@known_operator("Ceil")
def _ceil_known(x: Known) -> Any:
    return np.ceil(x) if x.dtype.kind == "f" else each(lambda value: -_floored(-value), x)


@known_operator("Sqrt")
def _root_known(x: Known) -> Any:
    return np.sqrt(x) if x.dtype.kind == "f" else NotImplemented


def _floored(value: Any) -> Any:
    """Returns the floor of a symbolic floating-point number, as a floating-point number."""
    return torch.sym_float(value.__floor__())  # type: ignore[no-untyped-call]


@operator("Clip", since=6, scalars=(1, 2))
@_widened
def _clip(x: _Tensor, min: Any, max: Any) -> _Tensor:
    # Before version 11, an absent limit is the greatest number of float32, which a half can't represent.
    if x.dtype.itemsize == 2:
        min, max = (None if isinstance(limit, float) and abs(limit) >= _NO_LIMIT else limit for limit in (min, max))
    # Two clamps in ONNX's order: if min > max, max wins. Each limit may be a number or a tensor.
    x = x if min is None else torch.clamp(x, min=min)
    return x if max is None else torch.clamp(x, max=max)
