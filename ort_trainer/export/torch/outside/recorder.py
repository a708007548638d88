"""Records what a run of a model and its loss reads outside tensors, and what it leaves there.

Attributes of modules and of other objects are recorded as they are read: during the run, their classes have a
``__getattribute__`` that takes notes. Python has no way to watch global variables, variables of closures and defaults,
so those that the code of a function names are recorded when the function is first met.

What the run leaves is found by comparison with copies (``changes.py``).
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import enum
import functools
import gc
import inspect
import io
import itertools
import os
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from ....core.errors import ExportError
from .calls import Calls, functions_in
from .changes import HOOKS, OF_EVERY_MODULE, Copies, WritesToParameters
from .code import LIBRARIES, assigned_in, globals_of, imports_of, is_users, names_of, optional_in
from .containers import CHANGEABLE, copied, has_same_parts, refill
from .generators import is_generator
from .leftovers import Code, Leftovers, encode
from .notes import Notes
from .numbers import Expression, Growing, Number, TypeOf, Uses, places_of, text_of
from .output import position_of
from .places import MISSING, Access, Place, attributes_of, described, in_cell, of_class, read, referent, write
from .values import CONTAINERS, MEMORIES, VIEWS, are_equal_constants, is_plain, is_watched, parts_of

__all__ = ["Pair", "PartsExchanged", "Recorder"]

_TORCH, _OURS, _TORCH_MODELS = (
    f"{folder}{os.sep}"
    for folder in (Path(torch.__file__).parent, Path(__file__).parents[1], Path(torch.nn.__file__).parent)
)
# Of an autograd.Function, called after the run.
_CALLED_LATER = frozenset({"setup_context", "backward"})
# Objects that can't be watched, so all of their attributes count as read.
_NAMESPACES = (types.SimpleNamespace, threading.local)
# Kinds of steps to what can be replaced for a run.
_REPLACEABLE = frozenset({"attribute", "global", "cell", "item", "entry", "key"})


class PartsExchanged(ExportError):
    """A run has made or replaced modules, parameters or hooks."""


class Pair(nn.Module):
    """A model and a loss function, from which places begin.

    Args:
        model: The model.
        loss_fn: The loss function, or None.

    Attributes:
        arguments: Numbers among the arguments, by name.
    """

    model: nn.Module
    loss_fn: Any

    def __init__(self, model: nn.Module, loss_fn: Any = None) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn
        self.arguments: dict[str, Any] = {}


class Recorder:
    """Takes notes of one run.

    Args:
        root: Where places begin: a :class:`Pair`, or a module with the same attributes.
        numbers: Places of numbers that change from run to run.
        tables: Places where runs leave tables that depend on sizes alone, and what was there before: the run begins
            with that.
        settings: Places and values with which the run begins, too: what a former run has set or read there.
        apart: Likewise, places and what :meth:`apart` has returned for them.

    Attributes:
        reads: The places that the run has read, in order, with their values.
        tensors: Tensors at these places that are not the modules' own, by ``id``, each with its place.
        numbers: The argument; more can be added before a run.
        uses: What the run has done with the numbers.
        aliases: Pairs of places that hold one object.
        kept_apart: The argument ``apart``.
        modes: The modules, by ``id``, whose attribute ``training`` the run has read.
        used_caches: Whether the last run has called functions that keep results.
        leftovers: What the last run has left.
        result: The module's return value, encoded; None if it can't be encoded.
    """

    def __init__(
        self,
        root: Any,
        numbers: Collection[Place] = (),
        tables: Mapping[Place, Any] | None = None,
        settings: Mapping[Place, Any] | None = None,
        apart: Mapping[Place, torch.Tensor] | None = None,
    ) -> None:
        self._root, self.numbers = root, set(numbers)
        self.tables, self._settings = dict(tables or {}), dict(settings or {})
        self.kept_apart = dict(apart or {})
        self._thread = 0
        self.leftovers = Leftovers()
        self.result: Code | None = None
        self.used_caches = self._is_running = self._is_held = False
        # Where a capture has other tensors, which stand for them.
        self._parameters: list[tuple[Place, torch.Tensor]] = [
            ((*(Access("get", part) for part in path.split(".") if part), Access("tensor", key)), tensor)
            for path, module in root.named_modules()
            for key, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]
        self._own = {id(tensor) for _, tensor in self._parameters}
        self._begin()

    def _begin(self) -> None:
        self.reads: dict[Place, Any] = {}
        self.tensors: dict[int, tuple[torch.Tensor, Place]] = {}
        self.modes: dict[int, nn.Module] = {}
        self.aliases: dict[tuple[Place, Place], None] = {}
        self.uses = Uses()
        self._output: dict[str, None] = {}
        # What the run has met, so that it is recorded once.
        self._met: dict[int, tuple[Any, Place]] = {}  # id of an object -> the object, and its first place
        self._made: dict[int, Any] = {}  # what the run has made and put outside, by id
        self._seen: set[tuple[int, str]] = set()  # ids of objects, with attributes that were read of them
        self._foreign: set[int] = set()  # ids of modules that are not parts of the model
        self._of_classes: set[tuple[int, str]] = set()  # ids of classes and Python modules, with attributes recorded
        self._places_of_classes: dict[int, Place] = {}  # id of a class -> its first place
        self._holders: dict[int, list[tuple[type, Place, Any]]] = {}  # id of code -> a class, its attribute, the value
        self._codes: dict[int, types.CodeType] = {}  # of the functions that were met
        self._names: set[str] = set()  # names of globals and attributes in the code of all functions
        self._looked_up: set[int] = set()  # ids of classes and Python modules, of which these were recorded
        self._having: dict[str, dict[int, tuple[Any, Place]]] = {}  # a name -> those of them that have it, by id
        self._asked: list[tuple[Place, torch.Tensor, bool]] = []  # parameters and buffers with their requires_grad
        self._files: list[tuple[Place, Any, int]] = []  # each with its position when it was met
        self._counts: list[tuple[Place, Any, Any]] = []  # each with a copy from when it was met
        self._read_iterators: dict[Place, None] = {}  # other iterators, and counts from which the run has taken numbers
        self._values: dict[Place, None] = {}  # of tensors whose numbers were read
        self._listed: dict[Place, None] = {}  # of the __dict__s whose keys were read
        # What is replaced for the time of the run.
        self._classes: dict[type, Any] = {}  # class -> its own __getattribute__, or MISSING
        self._begun_with: dict[Place, Any] = {}  # what tables, settings and copies have replaced
        self._numbers: dict[Place, Any] = {}  # the numbers and lists that stand-ins have replaced
        self._growing: dict[Place, Growing] = {}  # the stand-ins for lists
        self._typed: list[dict[str, Any]] = []  # the global variables that have another "type"
        self._caches: list[tuple[Any, Any]] = []  # functions that keep results, and what they had kept before
        # What the run changes.
        self._copies = Copies()
        self._left: dict[Place, Any] = {}
        self._grown: set[Place] = set()  # of lists without a stand-in to which the run has appended
        self._counted: set[Place] = set()  # of numbers in containers that the run has replaced
        self._settled: dict[Place, Any] = {}  # settings with which a second run has left the same
        self._repeated: set[Place] = set()  # what it has changed in parts that PyTorch runs again

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Records the reads of the run in the context, and restores afterwards what it has changed."""
        self._end()
        self._begin()
        self._is_running = True
        self._thread = threading.get_ident()
        for place, value in (*self.tables.items(), *self._settings.items(), *self.kept_apart.items()):
            self._begun_with.setdefault(place, read(self._root, place))
            write(self._root, place, value)
        for place in sorted(self.numbers, key=described):
            value = read(self._root, place)
            if type(value) in (int, float, str):
                self._numbers[place] = value
                write(self._root, place, Number(value, ["at", place], self.uses))
            elif type(value) is list:
                self._numbers[place] = value
                self._growing[place] = Growing(value, place, self.uses)
                write(self._root, place, self._growing[place])
        self._watch_class(nn.Module)
        present = [(place, read(self._root, place)) for place, _ in self._parameters]
        self._asked = [(place, tensor, tensor.requires_grad) for place, tensor in present if tensor is not MISSING]
        try:
            for name, module in self._root.named_modules():
                if name:
                    self._meet_module(module, tuple(Access("get", part) for part in name.split(".")))
            for name, value in self._root.arguments.items():
                self._record((Access("get", "arguments"), Access("key", name)), value)
            if not isinstance(self._root.loss_fn, nn.Module):
                self._meet(self._root.loss_fn, (Access("get", "loss_fn"),))
            parameters = [*self._root.model.parameters()]
            is_real = all(type(parameter) is nn.Parameter for parameter in parameters)  # none that stands for one
            writes = WritesToParameters(parameters, self._copies) if is_real else contextlib.nullcontext()
            with (
                writes,
                mock.patch.object(torch.Tensor, "__getattr__", self._absent(), create=True),
                Calls(self._called),
            ):
                yield
        finally:
            if self._is_held:
                self._copies.restore_parts()  # while those stand for parameters that did when the run began
            else:
                self._end()

    @contextlib.contextmanager
    def with_backward_pass(self) -> Iterator[None]:
        """Extends the last run in the context to the context's end, as its backward pass reads outside, too.

        Raises:
            ExportError: If the backward pass has changed something there.
        """
        self._is_held = True
        try:
            yield
            for place in self._changed_since(self._left):
                raise ExportError(
                    f"the backward pass changes {described(place)!r}, in an autograd.Function or a hook, "
                    "which a graph can't do: change it in forward(), or after the step"
                )
        finally:
            self._is_held = False
            self._end()

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Notes what the run changes in the context, a part that PyTorch runs again in the backward pass."""
        before = self._changed()
        yield
        self._repeated.update(self._changed_since(before))

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
        changed = {change.place: change.now for change in self._copies.changes()}
        changed |= {(*place, Access("end", "")): growing.added for place, growing in self._growing.items()}
        return {place: copied(now) if isinstance(now, CHANGEABLE) else now for place, now in changed.items()}

    def _end(self) -> None:
        if self._is_running:
            self._is_running = False
            for kind, replaced in self._classes.items():
                _unwatch(kind, replaced)
            self._restore()

    def leave(self, strict: bool) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that the run has left outside, as its further results.

        Args:
            strict: Whether to raise an error for a value that a graph can't leave, instead of ignoring it.

        Raises:
            ExportError: If the run leaves a value that can't be encoded.
        """
        self.used_caches = any(function.cache_info() != before for function, before in self._caches)
        self._refuse_what_no_graph_does()
        if self.used_caches:
            self.uses.fixed.update(self._numbers)  # a result that was kept says not how it was computed
        flags = self._flags_of_hooks()
        recorded = (change for change in self._copies.changes() if change.place not in flags)
        changes = [(change.place, change.now, change.before) for change in recorded]
        self._left = self._changed()
        tensors: list[torch.Tensor] = []
        places = self._places_by_id()
        writes = []
        changes += [((*place, Access("end", "")), growing.added, []) for place, growing in self._growing.items()]
        # Lists that grow come last, with or without a stand-in, so that all runs leave tensors in the same order.
        changes.sort(key=lambda change: described(change[0]) if _is_growth(*change) else "")
        for place, now, before in changes:
            if place[-1].kind == "end" and not now:
                continue
            if are_equal_constants(now, before):
                continue
            others = places
            if place[-1].kind == "contents":  # the container itself stays at its place, so its parts are encoded
                others = {key: other for key, other in places.items() if key != id(now)}
                if _is_growth(place, now, before) and place[:-1] in self.reads:
                    self._grown.add(place[:-1])
                elif place[:-1] in self.reads:
                    self._counted |= {(*place[:-1], step) for step in _numbers_changed(now, before)}
            try:
                left = copied(now) if place[-1].kind == "contents" else now
                writes.append((place, encode(left, tensors, others)))
            except TypeError as reason:
                if not strict:
                    continue
                raise ExportError(
                    f"the run leaves {reason} in {described(place)!r}, which a graph can't do: keep tensors, numbers, "
                    "strings or containers of them, or keep it elsewhere than in forward() and the loss"
                ) from None
        self.leftovers = Leftovers(tuple(writes), len(tensors))
        self._note_assigned({place for place, _ in writes})
        return tuple(tensors)

    def _note_assigned(self, changed: set[Place]) -> None:
        """Records attributes as read that the run may have assigned the value that they had, as no copy shows that.

        Otherwise a user who changes such an attribute later would not see it assigned again.
        """
        codes = [value.__code__ for value, _ in self._met.values() if type(value) is types.FunctionType]
        for owner, place in [*self._met.values()]:
            try:
                values = attributes_of(owner)
            except AttributeError:  # it has slots only
                continue
            for name in sorted(self._names & values.keys() - OF_EVERY_MODULE):
                inner: Place = (*place, Access("attribute", name))
                if inner in self.reads or inner in changed or inner in self._numbers:
                    continue
                is_constant = is_plain(values[name]) or callable(values[name])
                if is_constant and any(name in assigned_in(code) for code in codes if name in names_of(code)):
                    self.reads[inner] = values[name]

    def _refuse_what_no_graph_does(self) -> None:
        """Raises an error for changes of arrays, reads of iterators, and random numbers that are not PyTorch's."""
        if "cache_clear" in self._names and self._caches:
            raise ExportError(
                "the run clears the cache of a function, which a graph can't do: clear it before the step, or keep the "
                "result in an attribute"
            )
        for place in self._repeated:
            if place in self.reads or place[-1].kind in ("contents", "end"):
                raise ExportError(
                    f"the run changes {described(place)!r} in torch.utils.checkpoint, so PyTorch changes it again in "
                    "the backward pass, which a graph can't do: change it outside of the part that is checkpointed"
                )
        for place, _, _ in self._with_other_requires_grad():
            raise ExportError(
                f"the run changes requires_grad of {described(place)!r}, which a graph can't do: change it before the "
                "step"
            )
        for place in self._copies.changed_memory():
            raise ExportError(
                f"the run changes {described(place)!r}, an array or a context variable, which a graph can't do: keep a "
                "tensor or a number in an attribute"
            )
        # Functions that were met may not have been called. A count's text shows whether a number was taken.
        self._read_iterators |= {place: None for place, count, before in self._counts if repr(count) != repr(before)}
        self._refuse_iterators()
        for name in self._copies.drawn():
            raise ExportError(
                f"the run draws numbers from {name}, which would be the same in every step of a graph: draw them with "
                "torch (torch.rand), or before the step and pass them as inputs"
            )

    def _with_other_requires_grad(self) -> list[tuple[Place, torch.Tensor, bool]]:
        """Returns the parameters whose ``requires_grad`` the run has set, each with what it was."""
        # A buffer that is changed in place gets a history instead, and is no leaf any more.
        return [entry for entry in self._asked if entry[1].requires_grad is not entry[2] and entry[1].is_leaf]

    def _refuse_iterators(self) -> None:
        for place in self._read_iterators:
            raise ExportError(
                f"the run reads the iterator {described(place)!r}, from which a graph can't take a value in each step: "
                "take it before the step, and pass it as an input"
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
        if self._copies.has_other_parts or (self._copies.has_other_hooks and not flags):
            raise PartsExchanged(
                f"forward() of {type(self._root.model).__name__} makes or replaces modules, parameters or hooks, "
                "which a graph can't do: run the model once before"
            )
        return flags

    def note_output(self, what: str, line: str) -> None:
        """Takes a note of what the run writes for people."""
        self._output[f"{what}\n  {line}"] = None

    @property
    def output(self) -> list[str]:
        """What the last run has written for people, also to files that were open before."""
        files = (f"writes to {described(place)!r}" for place, file, at in self._files if position_of(file) != at)
        return [*self._output, *files]

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

    def written(self, result: Any) -> tuple[torch.Tensor, ...]:
        """Encodes a module's return value, in :attr:`result`, and returns the tensors in it.

        Raises:
            TypeError: If it can't be encoded.
        """
        tensors: list[torch.Tensor] = []
        self.result = encode(result, tensors, self._places_by_id())
        return tuple(tensors)

    def value_read(self, tensor: torch.Tensor) -> None:
        """Ties the graph to the numbers in a tensor from outside; for a computed tensor, in all tensors met so far."""
        places = [place for other, place in self.outside().values() if other is tensor]
        self._values.update(dict.fromkeys(places or (place for _, place in self.outside().values())))
        if not places:
            for expression, _ in self.uses.scalars:
                self.uses.fixed.update(places_of(expression))

    def has_met(self, value: Any) -> bool:
        """Returns whether an object is from outside the last run."""
        return id(value) in self._met

    def _places_by_id(self) -> dict[int, Place]:
        """Returns the places of all objects and tensors that the run has met."""
        met = self._met | self.tensors  # copies, as a weak reference's callback may meet more meanwhile
        return {key: place for key, (_, place) in met.items()}

    def counters(self) -> set[Place]:
        """Returns the places of numbers that the run has read and replaced, and of lists to which it has appended."""
        counters = self._grown - self.uses.fixed
        counters |= self._counted
        for place, code in self.leftovers.writes:
            replaced = code[0] == "number" or (code[0] == "plain" and type(code[1]) in (int, float))
            if replaced and type(self.reads.get(place)) in (int, float) and place not in self.uses.fixed:
                counters.add(place)
        return counters

    def settings(self) -> dict[Place, Any]:
        """Returns the places that the run has read and set, such as a flag "initialized"; not those of numbers."""
        plain = ((place, code[1]) for place, code in self.leftovers.writes if code[0] == "plain")
        kinds = (type(None), bool, str)
        return {p: new for p, new in plain if isinstance(new, kinds) and isinstance(self.reads.get(p, ()), kinds)}

    def apart(self) -> dict[Place, torch.Tensor]:
        """Returns copies of tensors that are at several places, some of which the run replaces, as in a full deque.

        A run with a copy at each further place computes the same, as no graph changes such tensors in place.
        """
        written = {place[:-1] if place[-1].kind == "contents" else place for place, _ in self.leftovers.writes}
        outside = {id(tensor) for tensor, _ in self.outside().values()}
        copies = {}
        for pair in self.aliases:
            value, owner = read(self._root, pair[1]), read(self._root, pair[1][:-1])
            replaced = any(place in written or place[:-1] in written for place in pair)
            if replaced and id(value) in outside and pair[1][-1].kind in _REPLACEABLE and type(owner) is not tuple:
                copies[pair[1]] = value.detach().clone()
        return copies

    def settle(self, second: Recorder) -> None:
        """Takes the notes of a second run, which began with :meth:`settings`, if it has left the same otherwise."""
        # PyTorch writes only once, too, what the second run does not write.
        self._output, self._files = dict.fromkeys(second.output), []
        if second.leftovers.writes == tuple(w for w in self.leftovers.writes if w[0] not in second._settings):
            self._settled = second._settings
            for place, value in second.reads.items():
                self.reads.setdefault(place, value)

    def outside(self) -> dict[str, tuple[torch.Tensor, Place]]:
        """Returns the tensors from outside that the run has met, with their places, by a name for each."""
        by_name: dict[str, tuple[torch.Tensor, Place]] = {}
        of_model = set(map(id, (*self._root.model.parameters(), *self._root.model.buffers())))
        tensors = [entry for entry in self.tensors.values() if id(entry[0]) not in of_model]
        if isinstance(self._root.loss_fn, nn.Module):
            for path, module in self._root.loss_fn.named_modules():
                place = tuple(Access("get", part) for part in ("loss_fn", *path.split(".")) if part)
                for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                    if tensor is not None and id(tensor) not in of_model:
                        tensors.append((tensor, (*place, Access("tensor", key))))
        for tensor, place in tensors:
            by_name.setdefault(described(place), (tensor, place))
        return by_name

    def notes(self, used: Collection[str]) -> Notes:
        """Returns what the run has read and left.

        Args:
            used: Names of the tensors and expressions that are inputs of the graph.
        """
        numbers = {p: None for p in self._numbers if p in self.reads or p[:-1] in self.reads}
        fixed = [place for place in self.reads if place not in numbers or place in self.uses.fixed]
        kinds: list[tuple[Expression, Any]]
        kinds = [(["type", ["at", place]], type(self._numbers[place]).__name__) for place in numbers]
        # Of a container with such numbers, the other parts count.
        in_containers = {place[:-1]: None for place in numbers if place[-1].kind in ("item", "entry", "key")}
        for place in filter(fixed.__contains__, in_containers):
            fixed.remove(place)
            kinds.append((["keys", place], None))
            parts = [(*place, Access(*step)) for step, _ in parts_of(self.reads[place])]
            fixed += [part for part in parts if part not in numbers or part in self.uses.fixed]
        kinds += [(["same", *pair], True) for pair in self.aliases]
        kinds += [(["values", place], None) for place in self._values]
        kinds += [(["keys", place], None) for place in self._listed]
        scalars = {text_of(e): (e, str(tensor.dtype)) for e, tensor in self.uses.scalars}
        return Notes(
            reads=tuple(fixed),
            conditions=(*kinds, *self.uses.conditions),
            tensors={name: place for name, (_, place) in self.outside().items() if name in used},
            scalars={name: entry for name, entry in scalars.items() if name in used},
            leftovers=self.leftovers,
            result=self.result,
            tables=tuple(self.tables),
            settled=tuple(self._settled.items()),
        )

    def _restore(self) -> None:
        self._copies.restore()
        for _, tensor, requires_grad in self._with_other_requires_grad():
            tensor.requires_grad_(requires_grad)
        for place, count, before in self._counts:
            if repr(count) != repr(before):
                write(self._root, place, before)
        for values in self._typed:
            del values["type"]
        for function, before in self._caches:
            # It may have kept a stand-in for a number, a traced tensor, or a result of what the run has changed.
            # Where the run clears caches, the number of misses tells nothing.
            has_kept = "cache_clear" in self._names or (self._numbers and function.cache_info().misses != before.misses)
            if has_kept or _holds_traced(function):
                function.cache_clear()
        # Two places may be one, such as a variable of two closures: the first has what was there before.
        for place, value in reversed([*self._begun_with.items(), *self._numbers.items()]):
            write(self._root, place, value)

    def _meet_module(self, module: nn.Module, place: Place) -> None:
        """Takes note of a module, and copies what the run may change of it; its submodules are met separately."""
        if id(module) in self._met:
            return
        self._met[id(module)] = module, place
        values = attributes_of(module)
        self._copies.add_attributes(values, place)
        self._copies.add_parts(values)
        for key, tensor in (*values["_parameters"].items(), *values["_buffers"].items()):
            if tensor is not None:  # bitsandbytes keeps the scales of a weight in attributes, and moves them away
                of_tensor: Place = (*place, Access("tensor", key))
                self._copies.add_attributes(attributes_of(tensor), of_tensor)
                for name, value in attributes_of(tensor).items() if id(tensor) in self._own else ():
                    self._meet(value, (*of_tensor, Access("attribute", name)))
        for base, of_base in self._place_classes(type(module), (*place, Access("get", "__class__"))):
            self._copies.add_class(base, of_base)
        for name, value in values.items():
            if type(value) in CONTAINERS and name not in OF_EVERY_MODULE:
                self._copies.add_contents(value, (*place, Access("attribute", name)))
        for hooks in HOOKS:
            for at, hook in enumerate(values.get(hooks, {}).values()):
                self._meet(hook, (*place, Access("get", hooks), Access("entry", at)))

    def _meet(self, value: Any, place: Place) -> None:
        """Takes note of an object that the run may read from or change."""
        if isinstance(value, enum.Enum) and is_users(type(value).__module__):
            self._copies.add_attributes(attributes_of(value), place)
            for name, part in list(attributes_of(value).items()):
                self._record((*place, Access("attribute", name)), part)
        if value is MISSING or type(value) is Growing or (is_plain(value) and not isinstance(value, type)):
            return
        if value is sys.modules or id(value) in self._made:  # the modules that code reads are met at their names
            return
        if isinstance(value, torch.Tensor):
            if type(value) in (torch.Tensor, nn.Parameter):  # not one that stands for a parameter during a capture
                self._note_alias(self.tensors.setdefault(id(value), (value, place))[1], place)
                self._copies.add_tensor(value)
            return
        if isinstance(value, (types.ModuleType, type)):
            if id(value) not in self._looked_up:
                self._looked_up.add(id(value))
                if isinstance(value, enum.EnumMeta):
                    for name in value.__members__:
                        self._meet(value[name], (*place, Access("get", name)))
                for owner, of_owner in self._with_bases(value, place):
                    for name in vars(owner):
                        self._having.setdefault(name, {})[id(owner)] = owner, of_owner
                self._meet_names(value, place, frozenset(self._names), data_only=True)
            return
        if id(value) in self._met:
            if not isinstance(value, (nn.Module, types.FunctionType, types.MethodType)):  # compared by identity anyway
                self._note_alias(self._met[id(value)][1], place)
            return
        if isinstance(value, nn.Module):  # one that is not a part of the model
            for name, module in value.named_modules():
                inner = (*place, *(Access("get", part) for part in name.split("."))) if name else place
                self._meet_module(module, inner)
                self._foreign.add(id(module))
                for kind in ("_modules", *HOOKS):
                    self._record((*inner, Access("attribute", kind)), attributes_of(module)[kind])
                for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                    self._record((*inner, Access("tensor", key)), tensor)
            return
        self._met[id(value)] = value, place
        if isinstance(value, types.FunctionType):
            self._meet_function(value, place)
        elif isinstance(value, types.MethodType):
            self._meet(value.__self__, (*place, Access("get", "__self__")))
            self._meet(value.__func__, (*place, Access("get", "__func__")))
        elif isinstance(value, (*CONTAINERS, functools.partial)):
            self._copies.add_contents(value, place)
            for step, part in parts_of(value):
                self._meet(part, (*place, Access(*step)))
            for at, key in enumerate(copied(value) if isinstance(value, dict) else ()):
                self._meet(key, (*place, Access("member", at)))
            if type(value) not in CONTAINERS:
                self._meet_object(value, place)
        elif is_generator(value):
            self._copies.add_generator(value, place)
        elif isinstance(value, types.BuiltinFunctionType):
            if isinstance(value.__self__, (random.Random, *CONTAINERS)):  # a method that was kept
                self._record((*place, Access("get", "__self__")), value.__self__)
        elif isinstance(value, weakref.ref) or type(value) in weakref.ProxyTypes:
            self._meet(referent(value), (*place, Access("referent", "")))
        elif isinstance(value, VIEWS):
            self._meet(value.mapping, (*place, Access("get", "mapping")))
        elif isinstance(value, types.MappingProxyType):
            for key, part in value.items():
                self._meet(part, (*place, Access("key", key)))
        elif isinstance(value, Iterator):
            if isinstance(value, io.IOBase):  # what files hold is not watched
                position = position_of(value)
                self._files += [] if position is None else [(place, value, position)]
            elif type(value) is itertools.count:
                self._counts.append((place, value, copy.copy(value)))
            else:
                self._read_iterators[place] = None
                self._refuse_iterators()  # before the run takes a value, which nothing could put back
        elif isinstance(value, MEMORIES):
            self._copies.add_memory(value, place)
            for step, part in parts_of(value):
                self._meet(part, (*place, Access(*step)))
        else:
            self._meet_object(value, place)

    def _note_alias(self, first: Place, second: Place) -> None:
        """Notes that two places hold one object, as what is read and left is noted at the first of them."""
        if first != second:
            self.aliases[first, second] = None

    def _meet_object(self, value: Any, place: Place) -> None:
        """Takes note of an object of a user's class: watches the class, or records all attributes if that fails."""
        kind = type(value)
        # Such as a function wrapped by functools.lru_cache. Statically, as a user's __getattr__ may run any code.
        wrapped = inspect.getattr_static(value, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType):
            self._meet(wrapped, (*place, Access("get", "__wrapped__")))
            if isinstance(value, functools._lru_cache_wrapper) and is_users(value.__module__):
                self._caches.append((value, value.cache_info()))
                for step, part in parts_of(value):
                    self._meet(part, (*place, Access(*step)))
        can_be_watched = is_watched(kind) and self._watch_class(kind)
        if not can_be_watched and kind not in _NAMESPACES:
            return
        try:
            values = attributes_of(value)
            self._copies.add_attributes(values, place)
        except AttributeError:  # it has slots only
            values = {}
        self._copies.add_slots(value, place)
        for name, part in () if can_be_watched else values.items():
            self._record((*place, Access("attribute", name)), part)
        self._meet_names(kind, (*place, Access("get", "__class__")), frozenset(self._names), data_only=can_be_watched)

    def _absent(self) -> Callable[[torch.Tensor, str], Any]:
        """Returns what reads attributes of the tensors for which others stand during a capture, which lack them."""
        now = [(read(self._root, place), place, tensor) for place, tensor in self._parameters]
        stands_for = {id(other): (other, place, tensor) for other, place, tensor in now if other is not tensor}
        mine = self._thread

        def absent(owner: torch.Tensor, name: str) -> Any:
            value: Any = MISSING
            by_user = not sys._getframe(1).f_code.co_filename.startswith((_TORCH, _OURS))
            if id(owner) in stands_for and by_user and threading.get_ident() == mine:
                _, place, tensor = stands_for[id(owner)]
                value = attributes_of(tensor).get(name, MISSING)
                self._record((*place, Access("attribute", name)), value)
            if value is MISSING:
                raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}", name=name, obj=owner)
            return value

        return absent

    def _called(self, frame: types.FrameType) -> None:
        """Records a function that runs, at its place: in a class of its first argument, or by its name."""
        code, values = frame.f_code, frame.f_globals
        if id(code) in self._codes:
            return
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if id(owner) in self._met:
            self._place_classes(type(owner), (*self._met[id(owner)][1], Access("get", "__class__")))
        bases = {*type(owner).__mro__, *(owner.__mro__ if isinstance(owner, type) else ())}
        holders = self._holders.get(id(code), [])
        for _, place, value in [entry for entry in holders if entry[0] in bases] or holders:
            self._record_function(code, place, value)
        if holders:
            return
        holder: Any = sys.modules.get(values["__name__"])
        of_module: Place = (Access("module", values["__name__"]),)
        is_module = holder is not None and vars(holder) is values
        place = of_module
        for part in (*getattr(code, "co_qualname", code.co_name).split("."), "") if is_module else ():
            for name, value in list(vars(holder).items()):
                is_old = self._copies.is_old(vars(holder), name, value)
                if is_old and self._record_function(code, (*place, Access("attribute", name)), value):
                    return
            holder, place = vars(holder).get(part), (*place, Access("attribute", part))
            if not isinstance(holder, type):
                break
        if is_module:  # the function has no place, as those that this run has made, but its global variables have
            self._meet_code(code, values, of_module, "attribute")

    def _record_function(self, code: types.CodeType, place: Place, value: Any) -> bool:
        """Records the function with this code in an attribute, such as a property; returns whether it is there."""
        for steps, function in functions_in(value):
            if function.__code__ is code:
                self._record(place, value)
                self._record((*place, *steps), function)
                return True
        return False

    def _meet_function(self, function: types.FunctionType, place: Place) -> None:
        """Records what a function may read: its closure, defaults, globals, and the modules that it imports."""
        self._codes[id(function.__code__)] = function.__code__
        self._copies.add_function(function, place)
        for at, cell in enumerate(function.__closure__ or ()):
            inner: Place = (*place, Access("cell", at))  # type: ignore[assignment]
            if self._copies.add_cell(cell, inner) is in_cell(cell):
                self._record(inner, in_cell(cell))
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                self._record((*place, Access("get", name)), getattr(function, name))
        self._record((*place, Access("get", "__code__")), function.__code__)
        if is_users(function.__globals__.get("__name__")):
            code = function.__code__
            self._meet_code(code, function.__globals__, place, "global")
            for at, cell in enumerate(function.__closure__ or ()):
                names = names_of(code) | _CALLED_LATER
                self._meet_names(in_cell(cell), (*place, Access("cell", at)), names, optional_in(code))

    def _meet_code(self, code: types.CodeType, values: dict[str, Any], place: Place, kind: str) -> None:
        """Records the global variables that code may read.

        Args:
            code: The code.
            values: The global variables.
            place: Of the function, or the Python module.
            kind: The kind of the step from there to a global variable.
        """
        names, optional = names_of(code), optional_in(code)
        new = names - self._names
        self._names |= names
        having = {key: entry for name in sorted(new) for key, entry in self._having.get(name, {}).items()}
        for known, of_known in having.values():
            self._meet_names(known, of_known, new, data_only=True)
        if self._numbers and "type" in names and "type" not in values:
            values["type"] = TypeOf
            self._typed.append(values)
        for name in sorted(names):
            if name not in values and hasattr(builtins, name):
                continue
            is_data = name in values and not isinstance(values[name], (types.ModuleType, types.FunctionType, type))
            if is_data and name not in globals_of(code):  # the name of an attribute
                continue
            inner: Place = (*place, Access(kind, name))  # type: ignore[assignment]
            self._copies.add_global(values, name, inner)
            if name in values:
                self._record_if_old(values, name, place, values[name], kind)
                self._meet_names(values[name], inner, names | _CALLED_LATER, optional)
            elif name in optional and name in globals_of(code):
                self._record_if_old(values, name, place, MISSING, kind)
        for name in sorted(imports_of(code, values)):
            self._meet_names(sys.modules[name], (*place, Access("module", name)), names, optional)

    def _meet_names(
        self,
        value: Any,
        place: Place,
        names: frozenset[str],
        optional: frozenset[str] = frozenset(),
        data_only: bool = False,
    ) -> None:
        """Records what code may read of a class, a function or a Python module: nothing can watch their attributes.

        Args:
            value: The class, function or module.
            place: Its place.
            names: The names in the code.
            optional: Those of them that may be absent.
            data_only: Whether to leave out functions, as the code that names them does not call them on this class.
        """
        if isinstance(value, (type, types.ModuleType, types.FunctionType)):
            room = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
            for name in sorted(optional) if is_users(room) else ():
                if inspect.getattr_static(value, name, MISSING) is MISSING:
                    self._record((*place, Access("get" if isinstance(value, type) else "attribute", name)), MISSING)
        if isinstance(value, types.ModuleType):
            of_user = is_users(value.__name__)
            if value.__name__.partition(".")[0] in LIBRARIES:
                return
            for name in sorted(names & vars(value).keys()):
                part = vars(value)[name]
                is_new = (id(value), name) not in self._of_classes
                if is_new and (
                    not callable(part) or (of_user and not data_only)
                ):  # Python's own functions don't change
                    self._of_classes.add((id(value), name))
                    if of_user:
                        self._copies.add_global(vars(value), name, (*place, Access("attribute", name)))
                    self._record_if_old(vars(value), name, place, part)
        elif isinstance(value, types.FunctionType):
            self._copies.add_attributes(vars(value), place)
            for name in sorted(names & vars(value).keys()):
                self._record_if_old(vars(value), name, place, vars(value)[name])
        elif isinstance(value, type):
            for base, of_base in self._with_bases(value, place):
                self._copies.add_class(base, of_base)
                # __getattribute__ is ours, for the time of the run.
                for name in sorted(names & vars(base).keys() - {"__getattribute__"}):
                    part = vars(base)[name]
                    function = part.__func__ if type(part) in (classmethod, staticmethod) else part
                    function = part.fget if type(part) is property else function
                    code = function.__code__ if type(function) is types.FunctionType else None
                    if (id(base), name) in self._of_classes or (code is not None and data_only):
                        continue
                    self._of_classes.add((id(base), name))
                    self._record_if_old(base, name, of_base, part)
                    if code is not None:  # a method may read attributes of its class
                        self._meet_names(value, place, names_of(code), optional_in(code), data_only=True)

    def _with_bases(self, value: Any, place: Place) -> list[tuple[Any, Place]]:
        """Returns a Python module; or a class, its bases and metaclasses; of users alone."""
        if isinstance(value, type):
            of_metaclass = self._place_classes(type(value), (*place, Access("get", "__class__")))
            return [*self._place_classes(value, place), *of_metaclass]
        return [] if value.__name__.partition(".")[0] in LIBRARIES else [(value, place)]

    def _place_classes(self, kind: type, place: Place) -> list[tuple[type, Place]]:
        """Returns a class and its bases, except for PyTorch's and Python's, each with the first place it was met at."""
        placed = []
        for at, base in enumerate(kind.__mro__):
            if is_users(base.__module__) and not issubclass(base, enum.Enum):  # which keeps combinations of flags
                if id(base) not in self._places_of_classes:
                    of_base: Place = (*place, Access("get", "__mro__"), Access("item", at))  # type: ignore[assignment]
                    self._places_of_classes[id(base)] = of_base
                    for name, value in list(vars(base).items()):
                        for _, function in functions_in(value):
                            entry = base, (*of_base, Access("attribute", name)), value
                            self._holders.setdefault(id(function.__code__), []).append(entry)
                placed.append((base, self._places_of_classes[id(base)]))
        return placed

    def _record(self, place: Place, value: Any) -> None:
        """Records the value of a place as read."""
        if isinstance(value, (staticmethod, classmethod)):
            place, value = (*place, Access("get", "__func__")), value.__func__  # type: ignore[assignment]
        if isinstance(value, property):
            place, value = (*place, Access("get", "fget")), value.fget
        if isinstance(value, types.ModuleType):
            self._meet(value, place)
        if isinstance(value, (types.ModuleType, types.MemberDescriptorType)):
            return
        if place not in self.reads:
            if type(value) in (Number, Growing):
                for own in (place,) if place in self._numbers else places_of(value.expression):
                    self.reads.setdefault(own, self._numbers[own])
                    if own != place:  # met on another way, which may lead elsewhere later
                        self._record(own[:-1], read(self._root, own[:-1]))
                return
            self.reads[place] = value
            self._meet(value, place)

    def _read(self, owner: Any, name: str, value: Any) -> None:
        """Records that an attribute was read."""
        _, place = self._met[id(owner)]
        if isinstance(owner, nn.Module):
            if name == "training":
                self.modes[id(owner)] = owner
                if id(owner) in self._foreign:
                    self._record((*place, Access("attribute", name)), value)
            if name in OF_EVERY_MODULE:
                return
            file = sys._getframe(2).f_code.co_filename
            of_models = file.startswith(_TORCH_MODELS) and name != "__dict__"
            if (file.startswith(_TORCH) and not of_models) or file.startswith(_OURS):
                self._seen.discard((id(owner), name))  # an exporter looks at everything
                return
        try:
            values = attributes_of(owner)
        except AttributeError:  # it has slots only
            values = None
        of_type = of_class(type(owner), name)
        kept = isinstance(of_type, types.MemberDescriptorType) or (values is not None and name in values)
        if name.startswith("__") and name != "__dict__" and not kept:
            return
        if name == "__dict__":
            self._listed[(*place, Access("get", name))] = None
            for key, entry in list(values.items()):
                if key in OF_EVERY_MODULE:
                    continue
                self._record_if_old(values, key, place, entry)
        elif values is not None and name in values:
            self._record_if_old(values, name, place, values[name])
        elif isinstance(of_type, types.MemberDescriptorType) and not isinstance(owner, nn.Module):
            self._record_if_old(owner, name, place, value, "get")
        elif of_type is not MISSING:
            of_user = any(name in vars(base) for base in type(owner).__mro__ if is_users(base.__module__))
            if of_user or name == "forward" or not callable(of_type):
                self._record_if_old(values, name, place, MISSING)
            if of_user or name == "forward":
                self._record((*place, Access("class", name)), of_type)
            elif isinstance(of_type, types.GetSetDescriptorType):  # a property's own reads are recorded as it runs
                self._record((*place, Access("get", name)), value)
            if of_user and type(of_type) is types.FunctionType:
                code = of_type.__code__
                of_class_ = (*place, Access("get", "__class__"))
                self._meet_names(type(owner), of_class_, names_of(code), optional_in(code), data_only=True)
        elif isinstance(owner, nn.Module) and name in {**owner._modules, **owner._parameters, **owner._buffers}:
            pass  # the model's own parts
        elif value is MISSING:
            self._record_if_old(values, name, place, MISSING)
            self._record((*place, Access("class", name)), MISSING)
        else:  # what a __getattr__ or __getattribute__ makes, such as a config's other names
            self._record((*place, Access("get", name)), value)

    def _record_if_old(self, owner: Any, name: str, place: Place, value: Any, kind: str = "attribute") -> None:
        """Records an attribute or a global variable, unless this run has assigned it."""
        if owner is None:
            return
        if self._copies.is_old(owner, name, value):
            self._record((*place, Access(kind, name)), value)
        elif not any(id(value) in known for known in (self._met, self._looked_up, self.tensors)):
            self._made[id(value)] = value

    def _watch_class(self, kind: type) -> bool:
        """Takes notes of what is read of the objects of a class; returns False if that is impossible."""
        if any(base in self._classes for base in kind.__mro__):
            return True
        original: Any = kind.__getattribute__
        met, seen, mine = self._met, self._seen, self._thread

        def watched(owner: Any, name: str) -> Any:
            key = id(owner), name
            if key in seen or key[0] not in met or threading.get_ident() != mine:
                return original(owner, name)
            seen.add(key)
            try:
                value = original(owner, name)
            except AttributeError:
                self._read(owner, name, MISSING)
                raise
            self._read(owner, name, value)
            return value

        replaced = vars(kind).get("__getattribute__", MISSING)
        try:
            kind.__getattribute__ = watched  # type: ignore[method-assign, assignment]
        except TypeError:  # of an extension
            return False
        self._classes[kind] = replaced
        return True


def _is_growth(place: Place, now: Any, before: Any) -> bool:
    """Returns whether a change is that of a list to which the run has appended."""
    grown = type(now) is list and len(now) > len(before) and has_same_parts(now[: len(before)], before)
    return place[-1].kind == "end" or (place[-1].kind == "contents" and grown)


def _numbers_changed(now: Any, before: Any) -> Iterator[Access]:
    """Yields the steps to the numbers in a dict or a list that have become other numbers, if nothing was added."""
    same = list(now) == list(before) if isinstance(now, dict) else len(now) == len(before)
    if isinstance(now, (dict, list)) and same:
        for (step, value), (_, old) in zip(parts_of(now), parts_of(before), strict=True):
            if type(value) in (int, float) and type(old) in (int, float) and value is not old:
                yield Access(*step)


def _holds_traced(function: Any) -> bool:
    """Returns whether a function with a cache has kept a tensor that a capture has traced."""
    kept = [part for part in gc.get_referents(function) if part is not vars(function)]
    leaves = torch.utils._pytree.tree_leaves(kept)
    return any(isinstance(leaf, torch.Tensor) and type(leaf) not in (torch.Tensor, nn.Parameter) for leaf in leaves)


def _unwatch(kind: type, replaced: Any) -> None:
    if replaced is MISSING:
        del kind.__getattribute__
    else:
        kind.__getattribute__ = replaced  # type: ignore[method-assign]
