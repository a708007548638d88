"""What a run begins with in place of what is there: what former runs have left, and stand-ins for numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .numbers import Growing, Number, Uses
from .places import Place, described, read, write


class Beginning:
    """Puts values in their places for the time of a run.

    Args:
        root: Where places begin.

    Attributes:
        numbers: The numbers, strings and lists that stand-ins have replaced, by place.
        lists: The stand-ins for lists, by place.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._replaced: dict[Place, Any] = {}
        self.numbers: dict[Place, Any] = {}
        self.lists: dict[Place, Growing] = {}

    def put(self, values: Mapping[Place, Any], numbers: Collection[Place], uses: Uses) -> None:
        """Begins a run.

        Args:
            values: What to put, by place.
            numbers: Places where stand-ins replace what changes from run to run.
            uses: Takes notes of what the run does with these.
        """
        for place, value in values.items():
            self._replaced[place] = read(self._root, place)
            write(self._root, place, value)
        stand_in: Growing | Number
        for place in sorted(numbers, key=described):
            value = read(self._root, place)
            if type(value) is list:
                stand_in = self.lists[place] = Growing(value, place, uses)
            elif type(value) in (int, float, str):
                stand_in = Number(value, ["place", place], uses)
            else:
                continue
            self.numbers[place] = value
            write(self._root, place, stand_in)

    def end(self) -> None:
        """Puts back what was there."""
        # Two places may be one, such as a variable of two closures: the first has what was there before.
        for place, value in reversed([*self._replaced.items(), *self.numbers.items()]):
            write(self._root, place, value)
