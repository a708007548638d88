"""Reads and writes containers by their built-in base class: a user's subclass may run code at each access."""

from __future__ import annotations

import gc
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from operator import is_
from typing import Any

CHANGEABLE = (dict, list, set, deque)
"""Containers whose contents can change."""
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)


def copied(container: Any) -> Any:
    """Returns the contents of a container as a new dict, list, set or deque."""
    base = _base_of(container)
    if base in (OrderedDict, dict):
        return {key: dict.__getitem__(container, key) for key in base.__iter__(container)}
    return base.copy(container) if type(container) is base else base(base.__iter__(container))


def members(container: Any) -> Iterator[Any]:
    """Returns an iterator over the keys of a dict, or over the parts of another container."""
    return iter(container) if isinstance(container, frozenset) else _base_of(container).__iter__(container)


def values(container: Any) -> Iterator[Any]:
    """Returns an iterator over the values of a dict."""
    return iter(_base_of(container).values(container))


def kept_by(function: Any) -> list[Any]:
    """Returns the arguments and results that a function with a cache of ``functools`` has kept, in a lasting order."""
    if not function.cache_info().currsize:
        return []
    parts = [part for part in gc.get_referents(function) if part is not vars(function)]
    if function.cache_parameters()["maxsize"] is None:
        return [result for part in parts if type(part) is dict for result in part.values()]
    parts = [part for part in parts if not isinstance(part, (type, types.FunctionType)) and not _holds_links(part)]
    return sorted(parts, key=id)  # otherwise a hit changes the order


def _holds_links(part: Any) -> bool:
    return type(part) is dict and any(type(entry).__name__ == "_lru_list_elem" for entry in part.values())


def refill(container: Any, contents: Any) -> None:
    """Replaces the contents of a dict, list, set or deque by those of another."""
    base, parts = _base_of(container), copied(contents)
    base.clear(container)
    if isinstance(parts, dict):
        for key, value in parts.items():
            base.__setitem__(container, key, value)
    else:
        (set.update if base is set else base.extend)(container, parts)


def has_same_parts(container: Any, contents: Any) -> bool:
    """Returns whether a container holds the same objects in the same order as what :func:`copied` has returned."""
    if len(container) != len(contents):
        return False
    if isinstance(container, set):
        return set(map(id, container)) == set(map(id, contents))
    now = container if type(container) in _BASES else copied(container)
    return all(map(is_, now, contents)) and (
        not isinstance(now, dict) or all(map(is_, now.values(), contents.values()))
    )


def _base_of(container: Any) -> Any:
    return next(base for base in _BASES if isinstance(container, base))
