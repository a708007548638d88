"""Numbers that change from run to run: during a capture, an object stands in for each and records how it is used.

Strings among the arguments of a call are treated alike, as many are not used at all, such as the names of files.

Arithmetic on such a number outside tensors becomes an expression, which is evaluated again for each run. In the
arithmetic of tensors, or as the rate of a dropout (``rates.py``), the expression is an input of the graph. A comparison
becomes a condition of the graph. Any other use ties the graph to the number's value.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from .places import Place, described, read
from .rates import DROPOUTS

Expression = list[Any]
"""``["at", place]``, ``["is", number]``, ``["same", place, place]`` (whether both hold one object), ``["keys", place]``
(of a dict, or the length of a list), ``["values", place]`` (the numbers in a tensor), or the name of an operator, or
``type``, and its operands. Of what a run leaves, also ``["symbolic", number]``, a number that the run computes, which
becomes ``["number", 0]``, the run's first tensor."""

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "abs")
}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}
_ROUNDINGS: dict[str, Callable[..., Any]] = {name: getattr(math, name) for name in ("floor", "ceil", "trunc")}
_ROUNDINGS["round"] = round
_NAMES_OF_MATH = (
    "sqrt exp expm1 log log1p log2 log10 pow fabs fmod copysign hypot erf erfc degrees radians "
    "sin cos tan asin acos atan atan2 sinh cosh tanh"
)
_OF_MATH: dict[str, Callable[..., Any]] = {name: getattr(math, name) for name in _NAMES_OF_MATH.split()}
_OPERATORS = {**_ARITHMETIC, **_COMPARISONS, **_ROUNDINGS, **{f"math.{name}": _OF_MATH[name] for name in _OF_MATH}}
# Functions in which a number may be a tensor without dimensions, with the same result.
_OF_TENSORS = frozenset(
    {
        *(getattr(torch, name) for name in ("add", "sub", "mul", "div", "true_divide", "pow", *_COMPARISONS)),
        *(
            getattr(torch.Tensor, name)
            for base in ("add", "sub", "mul", "truediv")
            for name in (f"__{base}__", f"__r{base}__", f"__i{base}__")
        ),
        *(getattr(torch.Tensor, f"{name}{end}") for name in ("add", "sub", "mul", "div", "pow") for end in ("", "_")),
        *(getattr(torch.Tensor, name) for base in ("pow", *_COMPARISONS) for name in (base, f"__{base}__")),
    }
)


def evaluate(expression: Expression, root: Any, tensors: Sequence[torch.Tensor] = ()) -> Any:
    """Returns the value of an expression now.

    Args:
        expression: The expression.
        root: Where places begin.
        tensors: Those of the run.
    """
    kind, *rest = expression
    if kind == "number":
        return tensors[rest[0]].item()
    if kind == "at":
        return read(root, tuple(map(tuple, rest[0])))  # type: ignore[arg-type]
    if kind == "is":
        return rest[0]
    if kind == "same":
        first, second = (read(root, tuple(map(tuple, place))) for place in rest)  # type: ignore[arg-type]
        return first is second
    if kind == "keys":
        value = read(root, tuple(map(tuple, rest[0])))  # type: ignore[arg-type]
        return type(value), tuple(value) if isinstance(value, dict) else len(value)
    if kind == "values":
        value = read(root, tuple(map(tuple, rest[0])))  # type: ignore[arg-type]
        return repr(value.tolist()) if isinstance(value, torch.Tensor) else type(value).__name__
    if kind == "type":
        return type(evaluate(rest[0], root)).__name__
    return _OPERATORS[kind](*(evaluate(part, root, tensors) for part in rest))


def places_of(expression: Expression) -> list[Place]:
    """Returns the places in an expression."""
    kind, *rest = expression
    if kind in ("at", "same", "keys", "values"):
        return rest[: 2 if kind == "same" else 1]
    return [] if kind in ("is", "symbolic") else [place for part in rest for place in places_of(part)]


def text_of(expression: Expression) -> str:
    """Returns an expression as text, such as ``add(calls, 1)``."""
    kind, *rest = expression
    if kind == "at":
        return described(rest[0])
    return repr(rest[0]) if kind in ("is", "symbolic") else f"{kind}({', '.join(map(text_of, rest))})"


class Uses:
    """How a run has used its numbers.

    Attributes:
        conditions: Comparisons and types, each with its result.
        fixed: Places of numbers whose values the run depends on.
        scalars: Expressions that have entered the arithmetic of tensors, with the tensors that stand for them.
    """

    def __init__(self) -> None:
        self.conditions: list[tuple[Expression, Any]] = []
        self.fixed: set[Place] = set()
        self.scalars: list[tuple[Expression, torch.Tensor]] = []

    def scalar(self, number: Number) -> torch.Tensor:
        """Returns the tensor for an expression: real, even where tensors are traced, so that it becomes an input."""
        for expression, tensor in self.scalars:
            if expression == number.expression:
                return tensor
        with torch.utils._python_dispatch._disable_current_modes():
            dtype = torch.float64 if isinstance(number.value, float) else torch.int64
            tensor = torch.tensor(number.value, dtype=dtype)
        self.scalars.append((number.expression, tensor))
        return tensor


class Number:
    """Stands for a number during a run.

    ``isinstance`` takes it for an int or a float, but it does not derive from them: C code that takes numbers would
    read the value without a trace.

    Args:
        value: The number now.
        expression: How it is computed.
        uses: Takes notes.
    """

    def __init__(self, value: Any, expression: Expression, uses: Uses) -> None:
        self.value, self.expression, self.uses = value, expression, uses

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    @property
    def is_symbolic(self) -> bool:
        """Whether a number that the run computes is in it."""
        return isinstance(self.value, (torch.SymInt, torch.SymFloat))

    def fixed(self) -> Any:
        """Returns the value, on which the run then depends."""
        self.uses.fixed.update(places_of(self.expression))
        return self.value

    def __bool__(self) -> bool:
        return bool(_compared("ne", self, 0))

    def __hash__(self) -> int:
        return hash(self.fixed())

    def __repr__(self) -> str:
        return repr(self.fixed())

    def __format__(self, spec: str) -> str:
        return format(self.fixed(), spec)

    def __int__(self) -> int:
        return int(self.fixed())

    def __float__(self) -> float:
        return float(self.fixed())

    def __index__(self) -> int:
        return operator.index(self.fixed())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fixed(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in DROPOUTS:
            at, name, dropout = DROPOUTS[function]
            rate = args[at] if len(args) > at else kwargs.get(name)
            if type(rate) is Number:
                keywords = {key: _plain(value) for key, value in kwargs.items() if key != name}
                return dropout(rate, *map(_plain, args[:at] + args[at + 1 :]), **keywords)
        for name in ("other", "exponent"):  # the second operand, as a keyword
            if type(kwargs.get(name)) is Number and len(args) == 1:
                args, kwargs = (*args, kwargs[name]), {key: value for key, value in kwargs.items() if key != name}
        numbers = [value for value in args if type(value) is Number]
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        whole = any(isinstance(number.value, float) for number in numbers) and not all(
            tensor.is_floating_point() or tensor.is_complex() for tensor in tensors
        )
        whole = whole or any(isinstance(number.value, bool) or number.is_symbolic for number in numbers)
        if function in _OF_TENSORS and tensors and not whole:
            scalars = [value.uses.scalar(value) if type(value) is Number else value for value in args]
            converted = _not_promoted(scalars, tensors)
        else:
            converted = [_plain(value) for value in args]
        return function(*converted, **{key: _plain(value) for key, value in kwargs.items()})


class TensorsAsNumbers(TorchFunctionMode):
    """A context in which tensors stand for numbers in the arithmetic of tensors.

    Args:
        numbers: The tensors, floating-point ones without dimensions.
    """

    def __init__(self, numbers: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._numbers = {id(number): number for number in numbers}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _OF_TENSORS and any(id(value) in self._numbers for value in args):
            tensors = [value for value in args if isinstance(value, torch.Tensor) and id(value) not in self._numbers]
            if tensors and all(tensor.is_floating_point() for tensor in tensors):
                args = _not_promoted(args, tensors)
        return function(*args, **(kwargs or {}))


def _not_promoted(operands: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
    """Returns operands with the dtype of those that don't stand for numbers, if none of these has dimensions.

    A tensor without dimensions promotes others without dimensions; the number that it stands for does not.

    Args:
        operands: Tensors.
        tensors: Those of them that don't stand for numbers.
    """
    if any(tensor.dim() for tensor in tensors):
        return operands
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return [value.to(dtype) for value in operands]


class Growing:
    """Stands for a list to which a run appends; any other use ties the graph to the list's contents.

    Args:
        value: The list.
        place: Its place.
        uses: Takes notes.

    Attributes:
        added: What was appended.
        expression: Says where the list is.
    """

    def __init__(self, value: list[Any], place: Place, uses: Uses) -> None:
        self._value, self._uses = value, uses
        self.added: list[Any] = []
        self.expression: Expression = ["at", place]

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return list

    def append(self, value: Any) -> None:
        """Appends a value."""
        self.added.append(value)

    def extend(self, values: Any) -> None:
        """Appends values."""
        self.added.extend(values)

    def __iadd__(self, values: Any) -> Growing:
        self.added.extend(values)
        return self

    def _fixed(self) -> list[Any]:
        self._uses.fixed.update(places_of(self.expression))
        return [*self._value, *self.added]

    def __len__(self) -> int:
        return len(self._fixed())

    def __iter__(self) -> Any:
        return iter(self._fixed())

    def __getitem__(self, index: Any) -> Any:
        return self._fixed()[index]

    def __contains__(self, value: Any) -> bool:
        return value in self._fixed()

    def __add__(self, other: Any) -> Any:
        return self._fixed() + other


class _Kind(type):
    """The class of :class:`TypeOf`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        stands_in = len(args) == 1 and type(args[0]) in (Number, Growing)
        return args[0].__class__ if stands_in else type(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)


class TypeOf(metaclass=_Kind):
    """Stands for ``type`` in code that meets stand-ins: of such a one, it returns the class of what it stands for."""


def _plain(value: Any) -> Any:
    """Returns a value with plain numbers and lists in place of stand-ins, on whose values the run then depends."""
    if type(value) is Number:
        return value.fixed()
    if type(value) is Growing:
        return list(value)
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value


def _operand(value: Any) -> tuple[Any, Expression] | None:
    """Returns the value and the expression of an operand; None if it is not a number."""
    if type(value) is Number:
        return value.value, value.expression
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value, ["symbolic", value]
    return (value, ["is", value]) if type(value) in (int, float, bool) else None


def _arithmetic(name: str, mine: Number, *others: Any) -> Any:
    operands = [_operand(value) for value in (mine, *others)]
    if None in operands:
        return NotImplemented
    return _computed(name, operands, mine.uses)


def _reversed(name: str, mine: Number, other: Any) -> Any:
    operand = _operand(other)
    return NotImplemented if operand is None else _computed(name, [operand, (mine.value, mine.expression)], mine.uses)


def _computed(name: str, operands: Sequence[Any], uses: Uses) -> Number:
    """Returns a number that is computed from others, given their values and expressions."""
    values, expressions = zip(*operands, strict=True)
    result = Number(_OPERATORS[name](*values), [name, *expressions], uses)
    if name == "pow" and not result.is_symbolic:  # 2 ** 1 is an int, and 2 ** -1 a float
        uses.conditions.append((["type", result.expression], type(result.value).__name__))
    return result


def _compared(name: str, mine: Number, other: Any) -> Any:
    operand = _operand(other)
    if operand is None or mine.is_symbolic or isinstance(operand[0], (torch.SymInt, torch.SymFloat)):
        other = _plain(other)
        return _COMPARISONS[name](mine.fixed(), other) if not isinstance(other, torch.Tensor) else NotImplemented
    result = bool(_COMPARISONS[name](mine.value, operand[0]))
    mine.uses.conditions.append(([name, mine.expression, operand[1]], result))
    return result


@contextlib.contextmanager
def functions_of_numbers() -> Iterator[None]:
    """A context in which functions of ``math`` take numbers that change from run to run."""

    def of_numbers(name: str) -> Callable[..., Any]:
        def function(*values: Any) -> Any:
            number = next((value for value in values if type(value) is Number and not value.is_symbolic), None)
            operands = [_operand(value) for value in values]
            if number is None or None in operands:
                return _OF_MATH[name](*values)
            return _computed(f"math.{name}", operands, number.uses)

        return function

    with contextlib.ExitStack() as stack:
        for name in _OF_MATH:
            stack.enter_context(mock.patch.object(math, name, of_numbers(name)))
        yield


def _define() -> None:
    """Adds the arithmetic operators and comparisons to :class:`Number`."""

    def method(function: Callable[..., Any], name: str) -> Any:
        return lambda *operands: function(name, *operands)

    for name in _ARITHMETIC:
        setattr(Number, f"__{name}__", method(_arithmetic, name))
        setattr(Number, f"__r{name}__", method(_reversed, name))
    for name in _ROUNDINGS:
        setattr(Number, f"__{name}__", method(_arithmetic, name))
    for name in _COMPARISONS:
        setattr(Number, f"__{name}__", method(_compared, name))


_define()
