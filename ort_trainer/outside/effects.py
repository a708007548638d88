"""What a run has changed outside tensors, and what each step of its graph leaves of that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..core.errors import ExportError
from .beginning import Beginning
from .changes import Change, Copies
from .containers import CHANGEABLE, copied, has_same_parts, refill
from .leftovers import Leftovers, encode
from .met import Met
from .places import MISSING, Access, Place, described, read, write
from .values import are_equal_constants, parts_of

_END = Access("end", "")


class PartsExchanged(ExportError):
    """A run has made or replaced modules, parameters or hooks."""


class Effects:
    """Compares what is outside with what was there when a run began.

    Args:
        root: Where places begin; see :class:`~.recorder.Recorder`.
        copies: Of what the run may change.
        beginning: What the run has begun with.
        met: What it has met.

    Attributes:
        counters: Places of numbers that the run has read and replaced, and of lists to which it has appended.
    """

    def __init__(self, root: Any, copies: Copies, beginning: Beginning, met: Met) -> None:
        self._root, self._copies, self._beginning, self._met = root, copies, beginning, met
        self._at_end: dict[Place, Any] = {}  # what had changed when the run had ended
        self._repeated: set[Place] = set()  # what it has changed in parts that PyTorch runs again
        self._before_part: dict[Place, Any] | None = None  # what it had changed before such a part, while in one
        self.counters: set[Place] = set()

    def _changed_since(self, before: Mapping[Place, Any]) -> Iterator[Place]:
        """Yields the places that the run has changed since :meth:`_changed` has returned something."""
        changed = self._changed()
        for place in dict.fromkeys((*before, *changed)):  # it may have been changed back
            now, then = changed.get(place, MISSING), before.get(place, MISSING)
            is_same = isinstance(now, CHANGEABLE) and type(now) is type(then) and has_same_parts(now, then)
            if now is not then and not is_same:
                yield place

    def _changed(self) -> dict[Place, Any]:
        """Returns what the run has changed so far, except for parts of modules, with copies of containers."""
        return {c.place: copied(c.now) if isinstance(c.now, CHANGEABLE) else c.now for c in self._changes()}

    def _changes(self) -> list[Change]:
        growing = self._beginning.lists.items()
        ends = [Change((*place, _END), each.added, [], each, _END) for place, each in growing if each.added]
        return [*self._copies.changes(), *ends]

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Notes what the run changes in the context, a part that PyTorch runs again in the backward pass.

        That run ends with the last tensor that it needs, perhaps before the part changes something back: so each
        operator looks.
        """
        outer, self._before_part = self._before_part, self._changed()
        yield
        self.look()
        self._before_part = outer

    def look(self) -> None:
        """Notes what a part that PyTorch runs again has changed so far, while in one."""
        if self._before_part is not None:
            self._repeated.update(self._changed_since(self._before_part))

    def refuse_later_changes(self) -> None:
        """Raises an error if something has changed since :meth:`encoded`."""
        for place in self._changed_since(self._at_end):
            raise ExportError(
                f"the backward pass changes {described(place)!r}, in an autograd.Function or a hook, "
                "which a graph can't do: change it in forward(), or after the step"
            )

    def encoded(self, strict: bool) -> tuple[Leftovers, tuple[torch.Tensor, ...]]:
        """Returns what each step leaves, and the tensors in it.

        Args:
            strict: Whether to raise an error for a value that a graph can't leave, instead of ignoring it.

        Raises:
            ExportError: If the run leaves a value that can't be encoded.
        """
        flags, places = self._flags_of_hooks(), self._met.places()
        changes = [c for c in self._changes() if c.place not in flags and not are_equal_constants(c.now, c.before)]
        # Lists that grow come last, with or without a stand-in, so that all runs leave tensors in the same order.
        changes.sort(key=lambda change: described(change.place) if _is_growth(change) else "")
        self._at_end = self._changed()
        self.counters = {place for change in changes for place in self._counted(change)}
        tensors: list[torch.Tensor] = []
        writes = []
        for change in changes:
            now, others = change.now, places
            if change.step.kind == "contents":  # the container itself stays at its place, so its parts are encoded
                now, others = copied(now), {key: place for key, place in places.items() if key != id(now)}
            try:
                writes.append((change.place, encode(now, tensors, others)))
            except TypeError as reason:
                if not strict:
                    continue
                raise ExportError(
                    f"the run leaves {reason} in {described(change.place)!r}, which a graph can't do: keep tensors, "
                    "numbers, strings or containers of them, or keep it elsewhere than in forward() and the loss"
                ) from None
        return Leftovers(tuple(writes), len(tensors)), tuple(tensors)

    def _counted(self, change: Change) -> Iterator[Place]:
        """Yields the places of numbers that the run has read and replaced, or of a list to which it has appended."""
        owner = change.place[:-1]
        if change.step.kind == "contents" and owner in self._met.reads:
            if _is_growth(change):
                yield owner
            else:
                yield from ((*owner, step) for step in _numbers_changed(change.now, change.before))
        elif _is_number(change.now) and type(self._met.reads.get(change.place)) in (int, float):
            yield change.place

    def refuse(self) -> None:
        """Raises an error for changes that no graph makes: of arrays, of generators, or twice."""
        for place in self._repeated:
            if place in self._met.reads or place[-1].kind in ("contents", "end"):
                raise ExportError(
                    f"the run changes {described(place)!r} in torch.utils.checkpoint, so PyTorch changes it again in "
                    "the backward pass, which a graph can't do: change it outside of the part that is checkpointed"
                )
        for place in self._copies.changed_memory():
            raise ExportError(
                f"the run changes {described(place)!r}, an array or a context variable, which a graph can't do: keep a "
                "tensor or a number in an attribute"
            )
        for name in self._copies.drawn():
            raise ExportError(
                f"the run draws numbers from {name}, which would be the same in every step of a graph: draw them with "
                "torch (torch.rand), or before the step and pass them as inputs"
            )

    def _flags_of_hooks(self) -> set[Place]:
        """Returns the attributes by which a model remembers that it has registered its hooks.

        They are not left, as the hooks are not: each capture begins without both, so the model registers them again.

        Raises:
            PartsExchanged: If the run has made other parts, or hooks without such an attribute, as then every run does.
        """
        flags: set[Place] = set()
        if self._copies.has_other_hooks:
            places = [change.place for change in self._copies.changes() if change.now is True]
            flags = {place for place in places if isinstance(read(self._root, place[:-1]), nn.Module)}
        if self._copies.other_parts() or (self._copies.has_other_hooks and not flags):
            raise PartsExchanged(
                f"forward() of {type(self._root.model).__name__} makes or replaces modules, parameters or hooks, "
                "which a graph can't do: run the model once before"
            )
        return flags

    def replaced(self) -> dict[Place, Any]:
        """Returns the former values at the places that the run has changed so far; another run can begin with them."""
        return {change.place: change.before for change in self._copies.changes()}

    def exchange(self) -> Callable[[], None]:
        """Returns what repeats, after the run, its exchange of modules, and the flags that say so."""
        flags = [(c.place, c.now) for c in self._copies.changes() if isinstance(c.now, (bool, str, type(None)))]
        parts = self._copies.other_parts()

        def again() -> None:
            for now, then in parts:
                refill(now, then)
            for place, value in flags:
                write(self._root, place, value)

        return again


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or isinstance(value, (torch.SymInt, torch.SymFloat))


def _is_growth(change: Change) -> bool:
    """Returns whether a change is that of a list to which the run has appended."""
    now, before, kind = change.now, change.before, change.step.kind
    grown = type(now) is list and len(now) > len(before) and has_same_parts(now[: len(before)], before)
    return kind == "end" or (kind == "contents" and grown)


def _numbers_changed(now: Any, before: Any) -> Iterator[Access]:
    """Yields the steps to the numbers in a dict or a list that have become other numbers, if nothing was added."""
    same = list(now) == list(before) if isinstance(now, dict) else len(now) == len(before)
    if isinstance(now, (dict, list)) and same:
        for (step, value), (_, old) in zip(parts_of(now), parts_of(before), strict=True):
            if type(value) in (int, float) and type(old) in (int, float) and value is not old:
                yield Access(*step)
