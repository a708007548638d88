"""Reads and writes containers by their built-in base class: a user's subclass may run code at each access."""

from __future__ import annotations

from collections import OrderedDict, deque
from operator import is_
from typing import Any

__all__ = ["CHANGEABLE", "copied", "has_same_parts", "in_order", "refill"]

CHANGEABLE = (dict, list, set, deque)
"""Containers whose contents can change."""
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)


def copied(container: Any) -> Any:
    """Returns the contents of a container as a new dict, list, set or deque."""
    base = _base_of(container)
    if base in (OrderedDict, dict):
        return {key: dict.__getitem__(container, key) for key in base.__iter__(container)}
    return base.copy(container) if type(container) is base else base(base.__iter__(container))


def in_order(container: Any) -> Any:
    """Returns an iterator over the values of a dict, or the members of a set."""
    base = _base_of(container)
    return iter(base.values(container) if base in (OrderedDict, dict) else base.__iter__(container))


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
