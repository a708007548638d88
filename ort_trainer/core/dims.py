"""Symbolic sizes: arithmetic over the names of dimensions, stored as text and evaluated for the sizes of a batch."""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from .errors import shown

# Expressions also come from untrusted files, so these limits bound the cost of an evaluation. c/src/expressions.cc and
# js/src/expressions.ts have the same limits, so that an expression has the same value in every language.
_LONGEST = 10_000
_MOST_OPERATIONS = 1_000
_DEEPEST = 100
# Whole numbers have 64 bits, as sizes and strides have.
_BEYOND = 1 << 63


def _power(base: Any, exponent: Any) -> Any:
    # Checked before the power is computed, which could take all memory.
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1 and exponent > 63:
        raise ValueError(f"{base} ** {exponent} is too large for a size")
    return base**exponent


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: lambda a, b: float(a) / float(b),  # as in the other languages, for numbers beyond 2**53
    ast.Mod: operator.mod,
    ast.Pow: _power,
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
_EXTREMES: dict[str, Callable[..., Any]] = {"max": max, "min": min}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **_EXTREMES,
    "abs": abs,
    "int": int,
    "float": float,
    "round": round,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
    "math.trunc": math.trunc,
}


@functools.lru_cache(maxsize=4096)
def _parse(expression: str) -> ast.expr:
    """Returns a checked expression.

    Raises:
        ValueError: If it is too large, or contains anything but arithmetic over dimensions.
    """
    try:
        if len(expression) > _LONGEST:
            raise ValueError(f"it has {len(expression)} characters, and at most {_LONGEST} are allowed")
        parsed = ast.parse(expression, mode="eval").body
        _check(parsed)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{shown(expression)} is not arithmetic over dimensions: {error}") from error
    return parsed


def _check(expression: ast.expr) -> None:
    """Raises a ValueError if an expression is not arithmetic over dimensions, or exceeds the limits."""
    pending, operations = [(expression, 0)], 0
    while pending:
        node, depth = pending.pop()
        operands = _operands(node)
        operations += max(len(operands) - 1, bool(operands))
        if operations > _MOST_OPERATIONS or depth > _DEEPEST:
            raise ValueError(f"it has more than {_MOST_OPERATIONS} operations, or is nested more than {_DEEPEST} deep")
        # A chain, such as a + b + c, is no deeper than each of its operands.
        chained = node.left if isinstance(node, ast.BinOp) else None
        pending += [(part, depth + (part is not chained)) for part in operands]


def _operands(node: ast.expr) -> list[ast.expr]:
    """Returns the operands of an operation; a number and a symbol have none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        _checked(node.value)
        return []
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return [node.operand]
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.IfExp):
        return [node.test, node.body, node.orelse]
    if isinstance(node, ast.Compare) and all(type(op) in _COMPARE for op in node.ops):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Call) and not node.keywords:
        name = _called(node)
        if name == "dim":
            _symbol(node)
            return []
        if name in _FUNCTIONS and (len(node.args) > 1 if name in _EXTREMES else len(node.args) == 1):
            return node.args
    raise ValueError(f"{shown(ast.unparse(node))} is not allowed")


def _called(call: ast.Call) -> str:
    """Returns the name of the called function, such as ``math.floor``; empty for other expressions."""
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def evaluate(expression: int | str, sizes: Mapping[str, int]) -> int:
    """Returns the value of an expression for the given sizes.

    Args:
        expression: A number, or arithmetic and comparisons over symbols. Symbols are written as calls of ``dim``, so
            that any text can be a name: ``dim('batch') * 4``.
        sizes: Size of every symbol.

    Raises:
        ValueError: If the expression contains anything else, or it or a part of it has no value: it divides by zero, or
            a number is not finite or has more than 64 bits.
        KeyError: If a symbol has no size.
    """
    return expression if isinstance(expression, int) else int(_checked(int(evaluate_number(expression, sizes))))


def evaluate_number(expression: str, sizes: Mapping[str, int]) -> float:
    """Returns the value of an expression that need not be a size, such as a ratio of two; see :func:`evaluate`."""
    try:
        return _number(expression, sizes)
    except ZeroDivisionError as error:
        raise _no_value(expression, sizes, "it divides by zero") from error


def holds(condition: int | str, sizes: Mapping[str, int]) -> bool:
    """Returns whether a condition is true for the given sizes; a division by zero makes it false."""
    try:
        return bool(condition if isinstance(condition, int) else _number(condition, sizes))
    except ZeroDivisionError:
        return False


def _number(expression: str, sizes: Mapping[str, int]) -> float:
    """Returns the value of an expression; a division by zero raises a ZeroDivisionError."""
    parsed = _parse(expression)
    try:
        return _evaluate(parsed, sizes)  # type: ignore[no-any-return]
    except OverflowError as error:
        raise _no_value(expression, sizes, "a number in it is not finite") from error
    except (ValueError, RecursionError) as error:
        raise _no_value(expression, sizes, str(error)) from error


def _no_value(expression: str, sizes: Mapping[str, int], reason: str) -> ValueError:
    return ValueError(f"{shown(expression)} has no value for {shown(dict(sizes))}: {reason}")


def symbols_of(expression: int | str) -> set[str]:
    """Returns the names of the symbols in an expression."""
    if isinstance(expression, int):
        return set()
    calls = (node for node in ast.walk(_parse(expression)) if isinstance(node, ast.Call))
    return {_symbol(call) for call in calls if isinstance(call.func, ast.Name) and call.func.id == "dim"}


def _symbol(call: ast.Call) -> str:
    """Returns the name of the symbol in a call of ``dim``."""
    argument = call.args[0] if len(call.args) == 1 else None
    if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
        raise ValueError(f"a symbol must be written as dim('name'), not as {shown(ast.unparse(call))}")
    return argument.value


def _evaluate(node: ast.expr, sizes: Mapping[str, int]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.BinOp):
        chain = []  # a loop, because a long sum would exceed Python's recursion limit
        while isinstance(node, ast.BinOp):
            chain.append(node)
            node = node.left
        value = _evaluate(node, sizes)
        for link in reversed(chain):
            value = _checked(_BINARY[type(link.op)](value, _evaluate(link.right, sizes)))
        return value
    if isinstance(node, ast.UnaryOp):
        return _checked(_UNARY[type(node.op)](_evaluate(node.operand, sizes)))
    if isinstance(node, ast.BoolOp):
        values = (_evaluate(value, sizes) for value in node.values)
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if isinstance(node, ast.IfExp):
        return _evaluate(node.body if _evaluate(node.test, sizes) else node.orelse, sizes)
    if isinstance(node, ast.Compare):
        sides = [_evaluate(side, sizes) for side in (node.left, *node.comparators)]
        return all(_COMPARE[type(op)](a, b) for op, a, b in zip(node.ops, sides, sides[1:], strict=False))
    assert isinstance(node, ast.Call)  # _operands has checked it
    name = _called(node)
    if name == "dim":
        return _checked(sizes[_symbol(node)])
    return _checked(_FUNCTIONS[name](*(_evaluate(argument, sizes) for argument in node.args)))


def _checked(value: Any) -> Any:
    """Returns a number that is finite and no larger than a size can be."""
    if isinstance(value, int):
        if -_BEYOND <= value < _BEYOND:
            return value
        raise ValueError("a number in it has more than 64 bits")
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError("a number in it is complex or not finite")
    return value


def fixed_dimensions(sizes: Mapping[str, int]) -> str:
    """Returns ``dimension 'length' at 5``, or ``dimensions 'length' at 5, 'batch' at 2``, for a log line."""
    listed = ", ".join(f"{symbol!r} at {size}" for symbol, size in sizes.items())
    return f"dimension{'s' if len(sizes) > 1 else ''} {listed}"
