"""Watches what a run reads of objects: their classes have a ``__getattribute__`` that takes notes while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from typing import Any

from .places import MISSING


class Watch:
    """Takes notes of the attributes that one thread reads.

    Args:
        objects: The ids of the objects to watch.
        read: Called with an object, the name of an attribute, and its value or ``MISSING``, when it is first read.

    Attributes:
        seen: Ids of objects, with names of attributes that were read of them.
    """

    def __init__(self, objects: Container[int], read: Callable[[Any, str, Any], None]) -> None:
        self._objects, self._read = objects, read
        self._thread = threading.get_ident()
        self._classes: dict[type, Any] = {}  # class -> its own __getattribute__, or MISSING
        self.seen: set[tuple[int, str]] = set()

    def add(self, kind: type) -> bool:
        """Watches the objects of a class; returns False if that is impossible."""
        if any(base in self._classes for base in kind.__mro__):
            return True
        original: Any = kind.__getattribute__
        objects, seen, read, mine = self._objects, self.seen, self._read, self._thread

        def watched(owner: Any, name: str) -> Any:
            key = id(owner), name
            if key in seen or key[0] not in objects or threading.get_ident() != mine:
                return original(owner, name)
            seen.add(key)
            try:
                value = original(owner, name)
            except AttributeError:
                read(owner, name, MISSING)
                raise
            read(owner, name, value)
            return value

        replaced = vars(kind).get("__getattribute__", MISSING)
        try:
            kind.__getattribute__ = watched  # type: ignore[method-assign, assignment]
        except TypeError:  # of an extension
            return False
        self._classes[kind] = replaced
        return True

    def end(self) -> None:
        """Puts the classes back."""
        for kind, replaced in self._classes.items():
            if replaced is MISSING:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = replaced  # type: ignore[method-assign]
        self._classes = {}
