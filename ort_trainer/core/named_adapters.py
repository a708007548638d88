"""Adapters by name, of which one is active and the others wait in memory."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from .errors import shown, was_given

State = TypeVar("State")


class NamedAdapters(ABC, Generic[State]):
    """Adapters by name, of which one is active and the others wait in memory.

    Args:
        name: The name of the active one.

    Attributes:
        active: The name of the active one.

    Raises:
        TypeError: If the name is no str.
    """

    def __init__(self, name: str) -> None:
        _check_name(name)
        self._waiting: dict[str, State] = {}
        self.active = name

    @property
    def names(self) -> list[str]:
        """The names of all adapters, the active one first."""
        return [self.active, *self._waiting]

    def add(self, name: str, like: str | None = None) -> None:
        """Adds an adapter, which waits until it is activated.

        Args:
            name: Its name.
            like: The adapter to copy, with its moments; None for a fresh one.

        Raises:
            TypeError: If the name is no str.
            ValueError: If the name is taken, or ``like`` is unknown.
        """
        self._check_new(name)
        if like is None:
            self._waiting[name] = self._fresh()
        else:
            self._check(like)
            self._waiting[name] = self._current() if like == self.active else copy.deepcopy(self._waiting[like])

    def activate(self, name: str) -> None:
        """Makes an adapter the one that steps train; the present one waits, with its moments.

        Raises:
            ValueError: If the name is unknown.
            RuntimeError: In an accumulation window, whose gradients are of the present one.
        """
        self._check(name)
        if name == self.active:
            return
        self._check_window()
        present = self._current()
        self._restore(self._waiting[name], present)
        del self._waiting[name]
        self._waiting[self.active] = present
        self.active = name

    def remove(self, name: str) -> None:
        """Removes an adapter that waits.

        Raises:
            ValueError: If the name is unknown, or the adapter is the active one.
        """
        self._check(name)
        if name == self.active:
            raise ValueError(f"{name!r} is the active adapter: activate another one before you remove it")
        del self._waiting[name]

    @abstractmethod
    def _current(self) -> State:
        """Returns a copy of the active state."""

    @abstractmethod
    def _fresh(self) -> State:
        """Returns a new state."""

    @abstractmethod
    def _restore(self, state: State, present: State) -> None:
        """Makes a state the active one, instead of the present one."""

    @abstractmethod
    def _check_window(self) -> None:
        """Raises a RuntimeError in an accumulation window."""

    def _check(self, name: str) -> None:
        if name not in self.names:
            raise ValueError(f"there is no adapter {shown(name)}: there are {self.names}")

    def _check_new(self, name: str) -> None:
        _check_name(name)
        if name in self.names:
            raise ValueError(f"there is an adapter {name!r} already: remove it first, or use another name")


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, but {was_given(name)}")
