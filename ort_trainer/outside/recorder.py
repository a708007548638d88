"""Records what a run of a model and its loss reads outside tensors, and what it leaves there.

A run begins with what former runs have left (``beginning.py``). ``met.py`` knows what it has met and read, and
``effects.py`` what it has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn

from ..core.errors import ExportError
from .beginning import Beginning
from .calls import Calls
from .changes import Copies, WritesToParameters
from .effects import Effects
from .leftovers import Code, Leftovers, encode
from .met import Met
from .notes import Notes
from .numbers import Expression, Uses, places_of, text_of
from .output import position_of
from .places import MISSING, Access, Place, described, read
from .values import parts_of

# Kinds of steps to what can be replaced for a run.
_REPLACEABLE = frozenset({"attribute", "global", "cell", "item", "entry", "key"})


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
        others: Other places and values with which the run begins: what :meth:`settings` and :meth:`apart` of a former
            recorder have returned.

    Attributes:
        numbers: The argument; more can be added before a run.
        uses: What the run has done with the numbers.
        others: The argument.
        met: What the last run has met and read.
        effects: What it has changed.
        used_caches: Whether the last run has called functions that keep results.
        leftovers: What the last run has left.
        result: The module's return value, encoded; None if it can't be encoded.
    """

    def __init__(
        self,
        root: Any,
        numbers: Collection[Place] = (),
        tables: Mapping[Place, Any] | None = None,
        others: Mapping[Place, Any] | None = None,
    ) -> None:
        self._root, self.numbers = root, set(numbers)
        self.tables, self.others = dict(tables or {}), dict(others or {})
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
        self._beginning, self._copies = Beginning(self._root), Copies()
        own = {id(tensor) for _, tensor in self._parameters}
        self.met = Met(self._root, self._copies, self._beginning.numbers, own)
        self.effects = Effects(self._root, self._copies, self._beginning, self.met)
        self._output: dict[str, None] = {}
        self._asked: list[tuple[Place, torch.Tensor, bool]] = []  # parameters and buffers with their requires_grad
        self._values: dict[Place, None] = {}  # of tensors whose numbers were read
        self._settled: dict[Place, Any] = {}  # settings with which a second run has left the same

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Records the reads of the run in the context, and restores afterwards what it has changed."""
        self._end()
        self._begin()
        self._is_running = True
        self._beginning.put({**self.tables, **self.others}, self.numbers, self.uses)
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
                Calls(self.met.called, self.effects.look),
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
            self.effects.refuse_later_changes()
        finally:
            self._is_held = False
            self._end()

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
            ExportError: If the run has done what a graph can't do.
        """
        self.used_caches = any(function.cache_info() != before for function, before in self.met.caches)
        self.met.refuse()
        for place, _, _ in self._with_other_requires_grad():
            raise ExportError(
                f"the run changes requires_grad of {described(place)!r}, which a graph can't do: change it before the "
                "step"
            )
        self.effects.refuse()
        if self.used_caches:
            self.uses.fixed.update(self._beginning.numbers)  # a result that was kept says not how it was computed
        self.leftovers, tensors = self.effects.encoded(strict)
        self.met.note_assigned({place for place, _ in self.leftovers.writes})
        return tensors

    def _with_other_requires_grad(self) -> list[tuple[Place, torch.Tensor, bool]]:
        """Returns the parameters whose ``requires_grad`` the run has set, each with what it was."""
        # A buffer that is changed in place gets a history instead, and is no leaf any more.
        return [entry for entry in self._asked if entry[1].requires_grad is not entry[2] and entry[1].is_leaf]

    def note_output(self, what: str, line: str) -> None:
        """Takes a note of what the run writes for people."""
        self._output[f"{what}\n  {line}"] = None

    @property
    def output(self) -> list[str]:
        """What the last run has written for people, also to files that were open before."""
        files = (f"writes to {described(place)!r}" for place, file, at in self.met.files if position_of(file) != at)
        return [*self._output, *files]

    def written(self, result: Any) -> tuple[torch.Tensor, ...]:
        """Encodes a module's return value, in :attr:`result`, and returns the tensors in it.

        Raises:
            TypeError: If it can't be encoded.
        """
        tensors: list[torch.Tensor] = []
        self.result = encode(result, tensors, self.met.places())
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

    def settle(self, second: Recorder, settings: Mapping[Place, Any]) -> None:
        """Takes the notes of a second run, which began with :meth:`settings`, if it has left the same otherwise."""
        # PyTorch writes only once, too, what the second run does not write.
        self._output, self.met.files = dict.fromkeys(second.output), []
        if second.leftovers.writes == tuple(write for write in self.leftovers.writes if write[0] not in settings):
            self._settled = dict(settings)
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
        replaced = self._beginning.numbers
        numbers = {p: None for p in replaced if p in self.met.reads or p[:-1] in self.met.reads}
        fixed = [place for place in self.met.reads if place not in numbers or place in self.uses.fixed]
        kinds: list[tuple[Expression, Any]]
        kinds = [(["type", ["place", place]], type(replaced[place]).__name__) for place in numbers]
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
        self._beginning.end()
