"""Records what a run of a model and its loss reads outside tensors, and what it leaves there.

``watch.py`` watches what is read of objects, and ``met.py`` knows what the run has met and read. What it leaves is
found here, by comparison with copies (``changes.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from ..core.errors import ExportError
from .calls import Calls
from .changes import OF_EVERY_MODULE, Copies, WritesToParameters
from .code import assigned_in
from .containers import CHANGEABLE, copied, has_same_parts, refill
from .leftovers import Code, Leftovers, encode
from .met import Met
from .notes import Notes
from .numbers import Expression, Growing, Number, Uses, places_of, text_of
from .output import position_of
from .places import MISSING, Access, Place, attributes_of, described, read, slots_of, write
from .values import are_equal_constants, is_leaf, parts_of

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
        numbers: The argument; more can be added before a run.
        uses: What the run has done with the numbers.
        kept_apart: The argument ``apart``.
        met: What the last run has met and read.
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
        self._begin()

    def _begin(self) -> None:
        self.uses = Uses()
        self._output: dict[str, None] = {}
        self._asked: list[tuple[Place, torch.Tensor, bool]] = []  # parameters and buffers with their requires_grad
        self._values: dict[Place, None] = {}  # of tensors whose numbers were read
        # What is replaced for the time of the run.
        self._begun_with: dict[Place, Any] = {}  # what tables, settings and copies have replaced
        self._numbers: dict[Place, Any] = {}  # the numbers and lists that stand-ins have replaced
        self._growing: dict[Place, Growing] = {}  # the stand-ins for lists
        # What the run changes.
        self._copies = Copies()
        self.met = Met(self._root, self._copies, self._numbers, {id(tensor) for _, tensor in self._parameters})
        self._left: dict[Place, Any] = {}
        self._grown: set[Place] = set()  # of lists without a stand-in to which the run has appended
        self._counted: set[Place] = set()  # of numbers in containers that the run has replaced
        self._settled: dict[Place, Any] = {}  # settings with which a second run has left the same
        self._repeated: set[Place] = set()  # what it has changed in parts that PyTorch runs again
        self._before_part: dict[Place, Any] | None = None  # what it had changed before such a part, while in one

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Records the reads of the run in the context, and restores afterwards what it has changed."""
        self._end()
        self._begin()
        self._is_running = True
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
        self.met.watch.add(nn.Module)
        present = [(place, read(self._root, place)) for place, _ in self._parameters]
        self._asked = [(place, tensor, tensor.requires_grad) for place, tensor in present if tensor is not MISSING]
        try:
            for name, module in self._root.named_modules():
                if name:
                    self.met.meet_module(module, tuple(Access("get", part) for part in name.split(".")))
            for name, value in self._root.arguments.items():
                self.met.record((Access("get", "arguments"), Access("key", name)), value)
            if not isinstance(self._root.loss_fn, nn.Module):
                self.met.meet(self._root.loss_fn, (Access("get", "loss_fn"),))
            parameters = [*self._root.model.parameters()]
            is_real = all(type(parameter) is nn.Parameter for parameter in parameters)  # none that stands for one
            writes = WritesToParameters(parameters, self._copies) if is_real else contextlib.nullcontext()
            with (
                writes,
                mock.patch.object(torch.Tensor, "__getattr__", self.met.of_stand_ins(self._parameters), create=True),
                Calls(self.met.called, self._look),
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
        """Notes what the run changes in the context, a part that PyTorch runs again in the backward pass.

        That run ends with the last tensor that it needs, perhaps before the part changes something back: so each
        operator looks.
        """
        outer, self._before_part = self._before_part, self._changed()
        yield
        self._look()
        self._before_part = outer

    def _look(self) -> None:
        if self._before_part is not None:
            self._repeated.update(self._changed_since(self._before_part))

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
            self.met.watch.end()
            self._restore()

    def leave(self, strict: bool) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that the run has left outside, as its further results.

        Args:
            strict: Whether to raise an error for a value that a graph can't leave, instead of ignoring it.

        Raises:
            ExportError: If the run leaves a value that can't be encoded.
        """
        self.used_caches = any(function.cache_info() != before for function, before in self.met.caches)
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
                if _is_growth(place, now, before) and place[:-1] in self.met.reads:
                    self._grown.add(place[:-1])
                elif place[:-1] in self.met.reads:
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
        assigned = frozenset[str]().union(*map(assigned_in, [*self.met.ran]))  # a copy, as this run goes on
        for owner, place in [*self.met.objects.values()]:
            steps = [Access("get", name) for name in assigned.intersection(slots_of(type(owner)))]
            with contextlib.suppress(AttributeError):  # it has slots only
                names = assigned & attributes_of(owner).keys() - OF_EVERY_MODULE
                steps += [Access("attribute", name) for name in names]
            for step in sorted(steps):
                inner = (*place, step)
                if inner in self.met.reads or inner in changed or inner in self._numbers:
                    continue
                value = read(self._root, inner)
                if value is not MISSING and (is_leaf(value) or callable(value)):
                    self.met.reads[inner] = value

    def _refuse_what_no_graph_does(self) -> None:
        """Raises an error for changes of arrays, reads of iterators, and random numbers that are not PyTorch's."""
        if self.met.clears_caches:
            raise ExportError(
                "the run clears the cache of a function, which a graph can't do: clear it before the step, or keep the "
                "result in an attribute"
            )
        for place in self._repeated:
            if place in self.met.reads or place[-1].kind in ("contents", "end"):
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
        self.met.refuse_iterators()
        for name in self._copies.drawn():
            raise ExportError(
                f"the run draws numbers from {name}, which would be the same in every step of a graph: draw them with "
                "torch (torch.rand), or before the step and pass them as inputs"
            )

    def _with_other_requires_grad(self) -> list[tuple[Place, torch.Tensor, bool]]:
        """Returns the parameters whose ``requires_grad`` the run has set, each with what it was."""
        # A buffer that is changed in place gets a history instead, and is no leaf any more.
        return [entry for entry in self._asked if entry[1].requires_grad is not entry[2] and entry[1].is_leaf]

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
        files = (f"writes to {described(place)!r}" for place, file, at in self.met.files if position_of(file) != at)
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
        return id(value) in self.met.objects

    def _places_by_id(self) -> dict[int, Place]:
        """Returns the places of all objects and tensors that the run has met."""
        met = self.met.objects | self.met.tensors  # copies, as a weak reference's callback may meet more meanwhile
        return {key: place for key, (_, place) in met.items()}

    def counters(self) -> set[Place]:
        """Returns the places of numbers that the run has read and replaced, and of lists to which it has appended."""
        counters = self._grown - self.uses.fixed
        counters |= self._counted
        for place, code in self.leftovers.writes:
            replaced = code[0] == "number" or (code[0] == "plain" and type(code[1]) in (int, float))
            if replaced and type(self.met.reads.get(place)) in (int, float) and place not in self.uses.fixed:
                counters.add(place)
        return counters

    def settings(self) -> dict[Place, Any]:
        """Returns the places that the run has read and set, such as a flag "initialized"; not those of numbers."""
        plain = ((place, code[1]) for place, code in self.leftovers.writes if code[0] == "plain")
        kinds = (type(None), bool, str)
        return {p: new for p, new in plain if isinstance(new, kinds) and isinstance(self.met.reads.get(p, ()), kinds)}

    def apart(self) -> dict[Place, torch.Tensor]:
        """Returns copies of tensors that are at several places, some of which the run replaces, as in a full deque.

        A run with a copy at each further place computes the same, as no graph changes such tensors in place.
        """
        written = {place[:-1] if place[-1].kind == "contents" else place for place, _ in self.leftovers.writes}
        outside = {id(tensor) for tensor, _ in self.outside().values()}
        copies = {}
        for pair in self.met.aliases:
            value, owner = read(self._root, pair[1]), read(self._root, pair[1][:-1])
            replaced = any(place in written or place[:-1] in written for place in pair)
            if replaced and id(value) in outside and pair[1][-1].kind in _REPLACEABLE and type(owner) is not tuple:
                copies[pair[1]] = value.detach().clone()
        return copies

    def settle(self, second: Recorder) -> None:
        """Takes the notes of a second run, which began with :meth:`settings`, if it has left the same otherwise."""
        # PyTorch writes only once, too, what the second run does not write.
        self._output, self.met.files = dict.fromkeys(second.output), []
        if second.leftovers.writes == tuple(w for w in self.leftovers.writes if w[0] not in second._settings):
            self._settled = second._settings
            for place, value in second.met.reads.items():
                self.met.reads.setdefault(place, value)

    def outside(self) -> dict[str, tuple[torch.Tensor, Place]]:
        """Returns the tensors from outside that the run has met, with their places, by a name for each."""
        by_name: dict[str, tuple[torch.Tensor, Place]] = {}
        of_model = set(map(id, (*self._root.model.parameters(), *self._root.model.buffers())))
        tensors = [entry for entry in self.met.tensors.values() if id(entry[0]) not in of_model]
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
        numbers = {p: None for p in self._numbers if p in self.met.reads or p[:-1] in self.met.reads}
        fixed = [place for place in self.met.reads if place not in numbers or place in self.uses.fixed]
        kinds: list[tuple[Expression, Any]]
        kinds = [(["type", ["at", place]], type(self._numbers[place]).__name__) for place in numbers]
        # Of a container with such numbers, the other parts count.
        in_containers = {place[:-1]: None for place in numbers if place[-1].kind in ("item", "entry", "key")}
        for place in filter(fixed.__contains__, in_containers):
            fixed.remove(place)
            kinds.append((["keys", place], None))
            parts = [(*place, Access(*step)) for step, _ in parts_of(self.met.reads[place])]
            fixed += [part for part in parts if part not in numbers or part in self.uses.fixed]
        kinds += [(["same", *pair], True) for pair in self.met.aliases]
        kinds += [(["values", place], None) for place in self._values]
        kinds += [(["keys", place], None) for place in self.met.listed]
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
        self.met.end()
        # Two places may be one, such as a variable of two closures: the first has what was there before.
        for place, value in reversed([*self._begun_with.items(), *self._numbers.items()]):
            write(self._root, place, value)


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
