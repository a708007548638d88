"""Unique names of values and nodes."""

from __future__ import annotations

from collections.abc import Iterable


class Names:
    """Hands out unused names."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)

    def unique(self, name: str) -> str:
        """Returns the name, with a number appended if it is taken."""
        candidate, number = name, 1
        while candidate in self._taken:
            candidate, number = f"{name}_{number}", number + 1
        self._taken.add(candidate)
        return candidate
