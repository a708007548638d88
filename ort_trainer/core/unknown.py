"""Errors for names that are not there: what was probably meant, and how to call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def nearest(name: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Returns the names that are most like one, whatever their case, the best first; none if no name resembles it.

    Args:
        name: The name.
        known: The names that there are.
        count: How many to return at most.
    """
    import difflib  # takes two milliseconds to import, and only errors need it

    small = {each.lower(): each for each in known}
    return [small[each] for each in difflib.get_close_matches(name.lower(), small, count)]


def meant(name: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    """Returns what was probably meant by a name, as the end of a message; else all names that there are.

    Args:
        name: The name.
        known: The names that there are.
        elsewhere: What other libraries call it -> what is written here.
    """
    known = sorted(known)
    close = [elsewhere[name]] if name in elsewhere else nearest(name, known)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


def explains_calls(example: str, elsewhere: Mapping[str, str]) -> Callable[[_Function], _Function]:
    """Returns a decorator of methods: a call with arguments that it does not take is an error with the way out.

    Args:
        example: How it is called.
        elsewhere: What other libraries call arguments -> what is written here.
    """

    def decorate(method: _Function) -> _Function:
        @functools.wraps(method)
        def explained(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # it comes from inside
                    raise
                what = str(error)
            name = type(self).__name__ if method.__name__ == "__init__" else f"{type(self).__name__}.{method.__name__}"
            from .signatures import signature_of  # a slow import, which only errors need

            known = [*signature_of(method).parameters][1:]
            unknown = [key for key in kwargs if key not in known]
            if unknown:
                what = f"{name}() has no argument {unknown[0]!r}: {meant(unknown[0], known, elsewhere)}"
            raise TypeError(f"{what}{'' if what.endswith('?') else '.'} It is called as in {example}") from None

        return explained  # type: ignore[return-value]

    return decorate
