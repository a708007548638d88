"""Symbolic sizes: arithmetic over the names of dimensions, stored as text and evaluated for the sizes of a batch."""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from .errors import shown

__all__ = ["evaluate", "evaluate_number", "fixed_dimensions", "holds", "symbols_of"]

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.Not: operator.not_}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "max": max,
    "min": min,
    "abs": abs,
    "int": int,
    "float": float,
    "round": round,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
}


# Larger than any 64-bit size or stride, and than the intermediate results in computing one.
_LARGEST_BITS = 512


def _power(base: Any, exponent: Any) -> Any:
    """Raises for powers too large to be a tensor size: an expression from a file could otherwise run forever."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _LARGEST_BITS:
        raise ValueError(f"{base} ** {exponent} is too large for a size")
    return base**exponent


_BINARY[ast.Pow] = _power


@functools.lru_cache(maxsize=4096)
def _parse(expression: str) -> ast.expr:
    try:
        return ast.parse(expression, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{shown(expression)} is not arithmetic over dimensions: {error!r}") from error


def evaluate(expression: int | str, sizes: Mapping[str, int]) -> int:
    """Returns the value of an expression for the given sizes.

    Args:
        expression: A number, or arithmetic and comparisons over symbols. Symbols are written as calls of ``dim``, so
            that any text can be a name: ``dim('batch') * 4``.
        sizes: Size of every symbol.

    Raises:
        ValueError: If the expression contains anything else.
        KeyError: If a symbol has no size.
    """
    return expression if isinstance(expression, int) else int(evaluate_number(expression, sizes))


def evaluate_number(expression: str, sizes: Mapping[str, int]) -> float:
    """Returns the value of an expression that need not be a size, such as a ratio of two; see :func:`evaluate`."""
    parsed = _parse(expression)
    try:
        value = _evaluate(parsed, sizes)
        int(value)  # neither complex nor infinite
    except (RecursionError, OverflowError, TypeError) as error:
        raise ValueError(f"{shown(expression)} has no value for {shown(dict(sizes))}: {error!r}") from error
    return value  # type: ignore[no-any-return]


def holds(condition: int | str, sizes: Mapping[str, int]) -> bool:
    """Returns whether a condition is true for the given sizes; a division by zero makes it false."""
    try:
        return bool(evaluate(condition, sizes))
    except ZeroDivisionError:
        return False


def symbols_of(expression: int | str) -> set[str]:
    """Returns the names of the symbols in an expression."""
    if isinstance(expression, int):
        return set()
    calls = (node for node in ast.walk(_parse(expression)) if isinstance(node, ast.Call))
    return {_symbol(call) for call in calls if isinstance(call.func, ast.Name) and call.func.id == "dim"}


def _symbol(call: ast.Call) -> str:
    argument = call.args[0] if len(call.args) == 1 else None
    if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
        raise ValueError(f"a symbol must be written as dim('name'), not as {ast.unparse(call)}")
    return argument.value


def _evaluate(node: ast.expr, sizes: Mapping[str, int]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_evaluate(node.left, sizes), _evaluate(node.right, sizes))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_evaluate(node.operand, sizes))
    if isinstance(node, ast.BoolOp):
        values = (_evaluate(value, sizes) for value in node.values)
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if isinstance(node, ast.IfExp):
        return _evaluate(node.body if _evaluate(node.test, sizes) else node.orelse, sizes)
    if isinstance(node, ast.Compare) and all(type(op) in _COMPARE for op in node.ops):
        sides = [_evaluate(side, sizes) for side in (node.left, *node.comparators)]
        return all(_COMPARE[type(op)](a, b) for op, a, b in zip(node.ops, sides, sides[1:], strict=False))
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name == "dim":
            return sizes[_symbol(node)]
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_evaluate(argument, sizes) for argument in node.args))
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic over dimensions")


def fixed_dimensions(sizes: Mapping[str, int]) -> str:
    """Returns ``dimension 'length' at 5``, or ``dimensions 'length' at 5, 'batch' at 2``, for a log line."""
    listed = ", ".join(f"{symbol!r} at {size}" for symbol, size in sizes.items())
    return f"dimension{'s' if len(sizes) > 1 else ''} {listed}"
