"""The question before every step: do the places that graphs depend on still have the values that they had?

Values are first compared by identity, by one compiled function. Only where another object is found are values compared.
Places where other objects with equal values are found again and again are left out of that function.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn

from ..core.errors import shown, warn
from ..engine.ownership import owned_dtype
from ..outside.containers import CHANGEABLE, copied, has_same_parts
from ..outside.notes import Notes
from ..outside.numbers import Expression, evaluate
from ..outside.places import GONE, MISSING, Access, Place, attributes_of, described, read, reader
from ..outside.values import LARGE, MEMORIES, frozen, is_leaf, parts_of
from .condition import Condition

_log = logging.getLogger(__name__)
_MOST_NAMED = 5


@dataclass(frozen=True)
class Root:
    """Where places begin.

    Attributes:
        model: The model.
        loss_fn: The loss function, or None.
        arguments: Numbers among the arguments of a call, by name.
        left: The tensors that runs of graphs have left, by place.
    """

    model: nn.Module
    loss_fn: Any = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    left: dict[Place, torch.Tensor] = field(default_factory=dict)


@dataclass
class _Variant:
    """A state of the model for which graphs were exported.

    Attributes:
        structure: What graphs depend on besides places.
        number: Its number.
        values: Index of a place or condition -> the stand-ins for the values for which the graphs were made.
        notes: The notes of the exports.
    """

    structure: Hashable
    number: int
    values: dict[int, frozenset[Hashable]] = field(default_factory=dict)
    notes: list[Notes] = field(default_factory=list)


class Reads:
    """Watches the places that the exports of a model have read, and passes tensors between these places and graphs.

    Args:
        root: Where places begin.

    Attributes:
        numbers: Places of numbers that have changed, for which graphs should have inputs.
        changes: What had changed when the model last left a variant, as text.
        carries: Whether any graph takes tensors from outside.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._watched: list[Place | Expression] = []
        self._indices: dict[str, int] = {}
        self._values: list[Hashable] = []
        self._objects: list[Any] = []
        self._volatile: set[int] = set()
        self._variants: list[_Variant] = []
        self._count = itertools.count()
        self._current: dict[Hashable, _Variant] = {}
        self._last: _Variant | None = None
        self._unchanged: Callable[[], bool] = _always
        self._carried: dict[str, tuple[Any, int]] = {}  # each with its address
        self._scalars: dict[str, torch.Tensor] = {}
        self._warned: set[Place] = set()
        self.numbers: set[Place] = set()
        self.changes: list[str] = []
        self.carries = False
        self._tables: dict[Place, Any] = {}

    def variant(self, structure: Hashable) -> int:
        """Returns the number of the variant in which the model is: graphs of one number may be used for it.

        Args:
            structure: What graphs depend on besides places.
        """
        try:
            same = self._unchanged()
        except GONE:
            same = False
        if not same:
            self._look()
        elif self._volatile:
            now = functools.partial(read, self._root)
            self._compare({index: self._value(index, now) for index in self._volatile})
        variant = self._current.get(structure)
        if variant is None:
            variant = self._current[structure] = self._find(structure)
        self._last = variant
        return variant.number

    def add(self, notes: Notes) -> None:
        """Takes the notes of an export for the variant that :meth:`variant` has returned last."""
        for place in notes.tables:
            self._tables.setdefault(place, read(self._root, place))
        variant = self._last
        if variant is None:  # nobody has asked, so nobody will use the graph
            return
        if variant not in self._variants:
            self._variants.append(variant)
        settled, now = dict(notes.settled), reader(self._root)
        for what in (*notes.reads, *(expression for expression, _ in notes.conditions)):
            index = self._index(what, now)
            values = {self._values[index]}
            if isinstance(what, tuple) and what in settled:
                values.add(frozen(settled[what]))
            variant.values[index] = variant.values.get(index, frozenset(values)) & values
        variant.notes.append(notes)
        self.carries = self.carries or bool(notes.tensors or notes.scalars)
        self._compile()

    def shown(self, notes: Notes) -> dict[str, str]:
        """Returns the numbers, strings and bools on which an export that was made now depends, as texts by place."""
        now = reader(self._root)
        stand_ins = {place: self._value(self._index(place, now), now) for place in notes.reads}
        plain = (bool, int, float, str, type(None))
        return {
            described(place): _shown(value)
            for place, value in stand_ins.items()
            if isinstance(value, tuple) and value[0] in plain
        }

    def carried(self, owned: bool = True) -> Mapping[str, torch.Tensor]:
        """Returns the tensors from outside that graphs of the current variant take and that are new, by name.

        Args:
            owned: Whether in the dtypes that a trainer keeps: fp32 for bfloat16. The graphs of calls take bfloat16.
        """
        tensors: dict[str, torch.Tensor] = {}
        notes = [] if self._last is None else self._last.notes
        for name, place in {name: place for entry in notes for name, place in entry.tensors.items()}.items():
            tensor = read(self._root, place)
            before, address = self._carried.get(name, (MISSING, 0))
            if tensor is before and tensor.data_ptr() == address and tensor.is_contiguous():
                continue
            kept = owned_dtype(tensor.dtype) if owned else tensor.dtype
            converted = tensor.detach().to(dtype=kept).resolve_conj().resolve_neg().contiguous()
            if converted.data_ptr() == tensor.data_ptr():  # otherwise it is a copy, which must be renewed in every step
                self._carried[name] = tensor, tensor.data_ptr()
            tensors[name] = converted
        for name, (expression, dtype) in {n: e for entry in notes for n, e in entry.scalars.items()}.items():
            value = evaluate(expression, self._root)
            if name not in self._scalars or str(self._scalars[name].dtype) != dtype:
                scalar = torch.zeros((), dtype=getattr(torch, dtype.removeprefix("torch.")))
                tensors[name] = self._scalars[name] = scalar
            self._scalars[name].fill_(value)
        return tensors

    @property
    def tables(self) -> Mapping[Place, Any]:
        """Places of tables that depend on sizes alone, and what was there before the first run.

        Without those where the user has put something since.
        """
        now = {place: read(self._root, place) for place in self._tables}
        return {
            place: before
            for place, before in self._tables.items()
            if now[place] is before or now[place] is self._root.left.get(place)
        }

    def _index(self, what: Any, now: Callable[[Place], Any]) -> int:
        """Returns the index of a place or an expression; begins to watch it if it is new."""
        key = repr(what)
        if key not in self._indices:
            self._indices[key] = index = len(self._watched)
            self._watched.append(what)
            self._objects.append(None if isinstance(what, list) else now(what))
            self._values.append(self._value(index, now))
            # Objects that are replaced are noticed; tensors come and go.
            if isinstance(what, list) and (what[0] != "same" or isinstance(read(self._root, what[1]), torch.Tensor)):
                self._volatile.add(index)
        return self._indices[key]

    def _value(self, index: int, now: Callable[[Place], Any]) -> Hashable:
        """Returns the stand-in for the present value of a place or an expression; ``now`` reads places."""
        what = self._watched[index]
        try:
            if isinstance(what, list):
                return frozen(evaluate(what, self._root))
            value = now(what)
            # A table that a run of a graph has left counts as what was there before the first run.
            is_table = what in self._tables and value is not None and value is self._root.left.get(what)
            return frozen(self._tables[what] if is_table else value)
        except (*GONE, ArithmeticError):
            return MISSING

    def _find(self, structure: Hashable) -> _Variant:
        """Returns the variant whose graphs are valid for the present values, or a new one."""
        for variant in self._variants:
            if variant.structure == structure and all(
                self._values[i] in values for i, values in variant.values.items()
            ):
                return variant
        return _Variant(structure, next(self._count))

    def _look(self) -> None:
        """Compares all values."""
        now = reader(self._root)
        changed = self._compare({index: self._value(index, now) for index in range(len(self._watched))})
        for index, what in enumerate(self._watched):
            if isinstance(what, tuple):
                value = now(what)
                # What is read of an object is watched at the object, so it must be noticed if it is replaced.
                often = index not in changed or what in self.numbers
                if value is not self._objects[index] and often and is_leaf(value, tensors=True):
                    self._volatile.add(index)
                self._objects[index] = value
        self._compile()

    def _compare(self, values: Mapping[int, Hashable]) -> Collection[int]:
        """Takes values by index, and returns which have changed; if any has, other graphs may be needed."""
        changed = {index: value for index, value in values.items() if value != self._values[index]}
        if changed:
            self._report(changed)
            for index, value in changed.items():
                self._values[index] = value
            self._current = {}
        return changed

    def _report(self, changed: Mapping[int, Hashable]) -> None:
        """Logs the changes for which no graph was made; numbers among them become inputs of later graphs."""
        where: dict[str, list[str]] = {}
        for index, new in changed.items():
            place, old = self._watched[index], self._values[index]
            accepting = [variant.values[index] for variant in self._variants if index in variant.values]
            if isinstance(place, list) or all(new in accepted for accepted in accepting):
                continue
            if _is_number(old) and _is_number(new):
                self.numbers.add(place)
            owner, _, key = described(place).rpartition(".")
            where.setdefault(f"{key}: {_shown(old)} -> {_shown(new)}", []).append(owner)
            if place[0].key == "loss_fn" and place not in self._warned:
                self._warned.add(place)
                warn(f"loss_fn reads {_name_at(self._root, place)!r}, {_change(old, new)}")
        self.changes = [f"{change} in {listed(owners)}" for change, owners in where.items()]
        if self.changes:
            _log.info("the model has changed: %s", "; ".join(self.changes[:_MOST_NAMED]))

    def _compile(self) -> None:
        condition = Condition(frozen=frozen, read=read, has_same_parts=has_same_parts)
        now = reader(self._root)
        added: set[Place] = set()
        for index, place in enumerate(self._watched):
            if not isinstance(place, tuple) or index in self._volatile:
                continue
            for at in range(1, len(place) + 1):  # what is on the way to the value counts, too
                part = place[:at]
                if part not in added and (at == len(place) or not isinstance(now(part), nn.Module)):
                    added.add(part)
                    _add_place(condition, now(part[:-1]), now(part), part[-1])
        self._unchanged = condition.function()


def _always() -> bool:
    return True


def _add_place(condition: Condition, owner: Any, value: Any, step: Access) -> None:
    """Adds that a place, one step from an owner, holds the value that it holds now."""
    kind, key = step
    if owner is MISSING:
        return
    if kind in ("item", "entry", "member") and isinstance(owner, (*CHANGEABLE, tuple, frozenset)):
        _add_contents(condition, owner)
        return
    if value is MISSING:
        try:
            read(owner, (step,))
        except GONE:  # the owner, whose own place counts, is now of a kind that has no such places
            return
    name = condition.name
    if kind in ("attribute", "global"):
        values = owner.__globals__ if kind == "global" else attributes_of(owner)
        if value is MISSING:
            condition.add(f"{key!r} not in {name(values)}")
            return
        where = f"{name(values)}[{key!r}]"
    elif kind == "class":
        condition.has_type(owner)
        for base in type(owner).__mro__:
            where = f"{condition.attributes_of(base)}[{key!r}]"
            if key in vars(base):
                break
            condition.add(f"{key!r} not in {condition.attributes_of(base)}")
        else:
            return
    elif kind == "cell" and value is not MISSING:
        where = f"{name(owner.__closure__[key])}.cell_contents"
    elif kind in ("item", "key") and value is not MISSING:
        where = f"{name(owner)}[{key!r}]"
    elif kind == "get" and getattr(owner, str(key), MISSING) is value:
        where = f"{name(owner)}.{key}" if value is not MISSING else f"getattr({name(owner)}, {key!r}, MISSING)"
    elif kind == "get":  # made anew at each access
        condition.add(f"frozen(getattr({name(owner)}, {key!r}, MISSING)) == {name(frozen(value))}")
        return
    else:
        where = f"read({name(owner)}, {name((step,))})"
    condition.add(f"{where} is {name(value)}")
    _add_contents(condition, value)


def _add_contents(condition: Condition, value: Any) -> None:
    """Adds that an object was not changed in place, as far as graphs depend on it."""
    # Every layer of a model may read the same configuration. What is imported has no effect by itself.
    if value is sys.modules or not condition.is_new(value):
        return
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            name = condition.name(value)
            condition.add(f"{name}.shape == {condition.name(value.shape)}")
            condition.add(f"{name}.requires_grad is {value.requires_grad}")
    elif isinstance(value, CHANGEABLE):
        condition.add(f"has_same_parts({condition.name(value)}, {condition.name(copied(value))})")
    elif isinstance(value, numpy.ndarray) and value.nbytes > LARGE:
        condition.add(f"{condition.name(_Seldom(value))}()")
    elif isinstance(value, (*MEMORIES, functools._lru_cache_wrapper)):
        is_same = f"frozen({condition.name(value)}) == {condition.name(frozen(value))}"
        if isinstance(value, functools._lru_cache_wrapper) and not any(parts_of(value)):  # so it has just to stay so
            counts = tuple(value.cache_info()[1:])
            is_same = f"({condition.name(value)}.cache_info()[1:] == {counts} or {is_same})"
        condition.add(is_same)
    for _, part in parts_of(value):
        _add_contents(condition, part)


class _Seldom:
    """Asks whether an array is still as it is now, when it is called for the 1st, 2nd, 4th time and so on."""

    def __init__(self, array: Any) -> None:
        self._array, self._before, self._count = array, frozen(array), 0

    def __call__(self) -> bool:
        self._count += 1
        return self._count & (self._count - 1) != 0 or frozen(self._array) == self._before


def _is_number(value: Hashable) -> bool:
    return isinstance(value, tuple) and value[0] in (int, float)


def _shown(value: Hashable) -> str:
    """Returns the value of a stand-in as text."""
    if not isinstance(value, tuple) or not isinstance(value[0], type):
        return repr(value)
    if value[0] in (float, complex):
        return str(value[1])
    if issubclass(value[0], torch.Tensor) and len(value) > 3:
        return f"a tensor of shape {list(value[2])} and dtype {value[1]}"  # type: ignore[call-overload]
    plain = len(value) == 2 and not isinstance(value[1], tuple) and value[0] is not slice
    return shown(value[1]) if plain else f"another {value[0].__name__}"


def _name_at(root: Root, place: Place) -> str:
    """Returns the name of a variable or an attribute."""
    step = place[-1]
    if step.kind == "cell":
        return str(read(root, place[:-1]).__code__.co_freevars[int(step.key)])
    return str(step.key)


def _change(old: Hashable, new: Hashable) -> str:
    """Returns the rest of the warning that a value which the loss function reads has changed."""
    if _is_number(old) and _is_number(new):
        return (
            f"which has changed from {_shown(old)} to {_shown(new)}: the model is exported again, with an input for "
            f"it where it only enters arithmetic, otherwise for each value. An argument of loss_fn in "
            "trainer.loss_parameters needs no further export"
        )
    return "which has changed: the model is exported again for each value"


def listed(names: Sequence[str]) -> str:
    """Returns names for a message: the first ones, and how many more there are."""
    quoted = [repr(name) if name else "the model" for name in names]
    more = f" and {len(quoted) - _MOST_NAMED} more" if len(quoted) > _MOST_NAMED else ""
    return ", ".join(quoted[:_MOST_NAMED]) + more
