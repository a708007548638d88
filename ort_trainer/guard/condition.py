"""A condition of many small terms, compiled as one Python function: the fastest way to ask whether nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..outside.places import MISSING


class Condition:
    """Terms of Python code, and the objects that they name.

    Args:
        names: Names that the terms may use.
    """

    def __init__(self, **names: Any) -> None:
        self._terms: dict[str, None] = {}
        self._objects: dict[str, Any] = {"MISSING": MISSING, **names}
        self._names: dict[int, str] = {}
        self._of_classes: dict[type, Mapping[str, Any]] = {}
        # Kinds of terms of which there are hundreds: one call checks all of them.
        self._empty: list[Mapping[str, Any]] = []
        self._typed: dict[int, Any] = {}
        self._described: dict[int, Any] = {}

    def attributes_of(self, kind: type) -> str:
        """Returns a name for the attributes of a class, always the same one."""
        return self.name(self._of_classes.setdefault(kind, vars(kind)))

    def name(self, value: Any) -> str:
        """Returns a name for an object, which lives as long as the condition."""
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"o{len(self._names)}"
            self._objects[name] = value
        return name

    def is_new(self, value: Any) -> bool:
        """Returns whether an object is asked about for the first time: its contents need terms only once."""
        count = len(self._described)
        self._described[id(value)] = value
        return len(self._described) > count

    def add(self, term: str) -> None:
        """Adds a term, which may contain names of objects."""
        self._terms[term] = None

    def has_type(self, value: Any) -> None:
        """Adds that an object still has its present class: code may assign another one to ``__class__``."""
        self._typed[id(value)] = value

    def has_entries(self, values: Mapping[str, Any]) -> None:
        """Adds that a mapping has the entries that it has now, and no others."""
        if not values:
            self._empty.append(values)
            return
        mapping = self.name(values)
        self.add(f"len({mapping}) == {len(values)}")
        for key, value in values.items():
            self.add(f"{mapping}[{key!r}] is {self.name(value)}")

    def function(self) -> Callable[[], bool]:
        """Returns the condition as a function; it raises an error if a term reads what no longer exists."""
        if self._empty:
            self.add(f"not any({self.name(self._empty)})")
        if self._typed:
            objects = list(self._typed.values())
            self.add(f"list(map(type, {self.name(objects)})) == {self.name(list(map(type, objects)))}")
        code = f"def holds():\n    return {' and '.join(self._terms) or 'True'}"
        exec(compile(code, "<guard>", "exec"), self._objects)  # a loop over the terms would take several times as long
        function: Callable[[], bool] = self._objects["holds"]
        return function
