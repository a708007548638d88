"""Errors that are also instances of the class that legacy raised, for scripts that catch it."""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType
from typing import Any

__all__ = ["ASSERTED", "raising"]

Kinds = tuple[tuple[type[Exception] | tuple[type[Exception], ...], type[Exception]], ...]

ASSERTED: Kinds = (((TypeError, ValueError), AssertionError),)
"""Legacy checked the arguments of its constructors with ``assert``."""


class raising(ContextDecorator):
    """Makes errors instances of a second class as well: ``with raising((RuntimeError, RuntimeWarning)): ...``.

    Args:
        *kinds: Pairs of the class raised and the second class. Only errors of Python's built-in classes change.
    """

    def __init__(self, *kinds: Any) -> None:
        self._kinds: Kinds = kinds

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        for found, legacy in self._kinds:
            own = type(error).__module__ == "builtins"  # other classes may take other arguments
            if own and isinstance(error, found) and not isinstance(error, legacy):
                both = _both(type(error), legacy)
                raise both(*error.__reduce__()[1]).with_traceback(trace) from error.__cause__  # type: ignore[index]


def _both(kind: type[Exception], legacy: type[Exception]) -> type[Exception]:
    def reduce(error: Exception) -> Any:
        return kind, kind.__reduce__(error)[1]  # a pickle has the original class, which other processes know

    return type(kind.__name__, (kind, legacy), {"__module__": kind.__module__, "__reduce__": reduce})
