"""State that runs of a model leave outside tensors and read again, as checkpoints hold it: by path, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core.errors import CheckpointError, shown, warn
from .containers import CHANGEABLE, refill
from .leftovers import Code, decode, encode
from .notes import Notes
from .numbers import places_of
from .places import Access, Place, described, read, write

_IN_CONTAINERS = frozenset({"item", "entry", "key"})
_PARTS = ("list", "tuple", "set", "frozenset")


class CarriedState:
    """The state at the places that graphs write and read again, such as the hidden state of a network in a tuple.

    Only the notes of an export name these places, so a loaded state waits for an export: a file never decides where
    something is written.

    Args:
        root: Where places begin.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._read: dict[str, Place] = {}
        self._carried: dict[str, Place] = {}
        self._waiting: dict[str, tuple[Code, list[torch.Tensor]]] = {}
        self._warned: set[str] = set()

    def note(self, notes: Notes) -> None:
        """Takes the notes of an export."""
        expressions = [expression for expression, _ in (*notes.conditions, *notes.scalars.values())]
        numbers = (tuple(Access(*step) for step in place) for each in expressions for place in places_of(each))
        read_places = {*notes.reads, *notes.tensors.values(), *numbers}
        self._read |= {described(place): place for place in read_places}
        for place, _ in notes.leftovers.writes:
            where = place[:-1] if place[-1].kind in ("contents", "end") else place
            if where not in notes.tables and any(_belongs(where, other) for other in read_places):
                self._carried[described(where)] = where

    def collect(self) -> dict[str, dict[str, Any]]:
        """Returns the state: path -> ``value`` (see :func:`~.leftovers.encode`) and the ``tensors`` in it.

        Leaves out what a checkpoint can't hold, with a warning that names the place.
        """
        state = {name: {"value": code, "tensors": tensors} for name, (code, tensors) in self._waiting.items()}
        for name, place in self._carried.items():
            tensors: list[torch.Tensor] = []
            try:
                code = encode(read(self._root, place), tensors, {})
                _check(code, len(tensors))
            except (TypeError, ValueError):
                if name not in self._warned:
                    self._warned.add(name)
                    value = read(self._root, place)
                    warn(
                        f"the state dict is without what the model keeps in {name!r}, an object of the class "
                        f"{type(value).__name__}: keep tensors, numbers, strings, or lists, tuples and dicts of them"
                    )
                continue
            state[name] = {"value": code, "tensors": [tensor.detach() for tensor in tensors]}
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes what :meth:`collect` has returned; it is put in place as soon as an export has named the places.

        Raises:
            CheckpointError: If an entry is damaged. Nothing has changed then.
        """
        checked = {}
        for name, entry in state.items():
            try:
                code, tensors = entry["value"], list(entry["tensors"])
                _check(code, len(tensors))
            except (IndexError, KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"state_dict[outside][{name}] is damaged: {shown(entry)}") from error
            checked[name] = code, tensors
        self._waiting = checked
        self.put()

    def put(self) -> bool:
        """Puts loaded values into the places that exports have named by now; returns whether there were any."""
        places, device = self._read | self._carried, next(self._root.model.parameters(), torch.zeros(())).device
        ready = {name: entry for name, entry in self._waiting.items() if name in places}
        for name, (code, tensors) in ready.items():
            now, value = read(self._root, places[name]), decode(code, [t.to(device) for t in tensors], self._root)
            if type(now) is type(value) and isinstance(now, CHANGEABLE):
                refill(now, value)  # others may hold it too
            else:
                write(self._root, places[name], value)
            del self._waiting[name]
        return bool(ready)


def _belongs(left: Place, read_place: Place) -> bool:
    """Returns whether a run leaves, at one place, the value that is read at another, a part of it, or its container."""
    inner = left[len(read_place) :]
    is_part = left[: len(read_place)] == read_place and all(step.kind in _IN_CONTAINERS for step in inner)
    return is_part or read_place[: len(left)] == left


def _check(code: Any, tensors: int) -> None:
    """Checks code from a file: it may describe only values of built-in classes, as decoding could create any object.

    Raises:
        IndexError, TypeError, ValueError: If it is invalid.
    """
    kind, *rest = code
    parts: Any = ()
    if kind in _PARTS:
        parts = rest[0]
    elif kind == "deque" and (rest[0] is None or type(rest[0]) is int):
        parts = rest[1]
    elif kind == "dict" and rest[0] in ("dict", "OrderedDict"):
        parts = [part for pair in rest[1] for part in pair]
    elif kind == "tensor":
        range(tensors).index(rest[0])
    elif kind != "plain" or not isinstance(rest[0], (type(None), bool, int, float, str)):
        raise ValueError(kind)
    for part in parts:
        _check(part, tensors)
