"""Functions that others assign to ``forward`` of an ``ORTModule``: do they call its graphs, or take their place?

Accelerate assigns functions that change a result, and call what ``forward`` was before. TRL assigns another forward
pass, which calls layers of the module, and should itself become a graph. It may hold what ``forward`` was before, for
other calls: only a call shows of which kind a function is.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

_DEEPEST = 6


class _Marked(functools.partial[Any]):
    """A function that looks like another one, and has its signature."""

    like: Any = None

    def as_of(self, function: Any) -> Any:
        """Returns itself, with name and signature of a function."""
        functools.update_wrapper(self, function)
        self.like = function
        return self


class Graphed(_Marked):
    """What ``forward`` of an ``ORTModule`` is: runs the module as a graph."""


class Outer(_Marked):
    """A function that was assigned to ``forward`` and holds a :class:`Graphed`."""


class Inner(_Marked):
    """What ``forward`` of the module is for an :class:`Outer` that does not call the graphs."""


class Assigned:
    """A function that was assigned to ``forward``, in the state of an ``ORTModule``.

    Its deep copy calls the graphs of the copy. (PyTorch's modules are called through methods, which are copied with
    their modules, but Python copies no closures.)

    Args:
        function: What ``forward`` of the ``ORTModule`` is.

    Attributes:
        function: What was assigned.
    """

    def __init__(self, function: Graphed | Outer) -> None:
        is_plain = isinstance(function, Graphed)
        self.function: Callable[..., Any] = function.like if is_plain else function.args[-1]

    def __deepcopy__(self, memo: dict[int, Any]) -> Assigned:
        duplicate = copy.copy(self)
        duplicate.function = _copied(self.function, memo)
        return duplicate


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Returns a deep copy, also of functions with the ``forward`` of an ``ORTModule`` in their closures."""
    if not isinstance(value, types.FunctionType) or not value.__closure__ or graphed_in(value) is None:
        return copy.deepcopy(value, memo)
    cells = []
    for cell in value.__closure__:
        held = cell.cell_contents
        cells.append(types.CellType(_copied(held, memo)) if callable(held) and graphed_in(held) else cell)
    duplicate = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
    duplicate.__kwdefaults__ = value.__kwdefaults__
    vars(duplicate).update({key: _copied(entry, memo) for key, entry in vars(value).items()})
    return duplicate


def graphed_in(function: Callable[..., Any]) -> Graphed | None:
    """Returns the ``forward`` of an ``ORTModule`` that a function holds, and so probably calls; None if there is none.

    It may be in a closure, a global or an attribute, among the arguments of a partial, or be kept by a module that is
    one of these.
    """
    seen: set[int] = set()

    def search(value: Any, depth: int) -> Graphed | None:
        if isinstance(value, Graphed):
            return value
        if depth > _DEEPEST or id(value) in seen:
            return None
        seen.add(id(value))
        return next((graphed for part in _held(value) if (graphed := search(part, depth + 1))), None)

    return search(function, 0)


def rebound(function: Callable[..., Any], old: Any, new: Any) -> Callable[..., Any]:
    """Returns a method of ``old``, or a partial that has it as an argument, with ``new`` instead; others unchanged.

    The module keeps the function, and could not be copied if it held a method of its own wrapper.
    """
    if isinstance(function, types.MethodType) and function.__self__ is old:
        return types.MethodType(function.__func__, new)
    if type(function) is functools.partial and any(value is old for value in function.args):
        args = (new if value is old else value for value in function.args)
        return functools.partial(function.func, *args, **function.keywords)
    return function


def _held(value: Any) -> list[Any]:
    """Returns the functions that a function, partial or module holds."""
    if isinstance(value, nn.Module):
        module = vars(value).get("module", value)  # an ORTModule keeps attributes in its module
        return [part for key, part in vars(module).items() if key != "forward" and isinstance(part, _Marked)]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values(), *vars(value).values()]
    held = [getattr(value, name, None) for name in ("__func__", "__self__", "__wrapped__")]
    for cell in getattr(value, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    code = getattr(value, "__code__", None)
    if code is not None:  # a function: its globals may be anything, so only marked functions among them count
        of_globals = (value.__globals__.get(name) for name in code.co_names)
        held += [part for part in of_globals if isinstance(part, _Marked)]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(value, type):
        held += attributes.values()
    return [part for part in held if callable(part)]
