"""Finds what a run changes outside tensors: copies what it may change, one level deep, as soon as it is met."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .containers import CHANGEABLE, copied, has_same_parts, refill
from .generators import has_drawn, name_of, put_back, state_of
from .places import MISSING, Access, Place, described, referent, slots_of
from .values import are_equal_constants, frozen

OF_EVERY_MODULE = frozenset(nn.Module().__dict__) | frozenset(
    {"_call_impl", "_wrapped_call_impl", "_compiled_call_impl", "_flat_weights", "_flat_weight_refs"}
)
"""What every module has: its parts, which a ModelWatch compares, and its mode. (Recurrent layers of PyTorch keep
references to their weights.)"""
# In bytes. A larger array or tensor is data rather than a setting, and takes long to copy.
_LARGEST = 1 << 24
_PARTS = ("_modules", "_parameters", "_buffers")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
"""Hooks of the backward pass, with which a model can't be exported."""
GLOBAL_HOOKS = {kind: vars(nn.modules.module)[f"_global{kind}"] for kind in (*HOOKS, *BACKWARD_HOOKS)}
"""Hooks of all modules."""


class Change(NamedTuple):
    """A change that a run has made.

    Attributes:
        place: Where.
        now: The new value.
        before: The old value.
        restore: Puts a value there.
    """

    place: Place
    now: Any
    before: Any
    restore: Callable[[Any], object]


class Copies:
    """Copies of what a run may change."""

    def __init__(self) -> None:
        self._attributes: dict[int, tuple[Place, dict[str, Any], dict[str, Any]]] = {}
        self._classes: dict[int, tuple[Place, type, dict[str, Any]]] = {}
        self._contents: dict[int, tuple[Place, Any, Any]] = {}
        self._memories: dict[int, tuple[Place, Any, Any]] = {}
        self._variables: dict[tuple[int, str], tuple[Place, Any, Any]] = {}
        self._parts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._hooks: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._generators: list[tuple[Place, Any, Any]] = []

    def add_attributes(self, values: dict[str, Any], place: Place) -> None:
        """Copies an object's ``__dict__``."""
        self._attributes.setdefault(id(values), (place, values, dict(values)))

    def add_class(self, kind: type, place: Place) -> None:
        """Copies the attributes of a class."""
        self._classes.setdefault(id(kind), (place, kind, dict(vars(kind))))

    def add_slots(self, owner: Any, place: Place) -> None:
        """Copies what an object has in slots."""
        for name in slots_of(type(owner)):
            self.add_variable(owner, name, (*place, Access("get", name)))

    def add_function(self, function: types.FunctionType, place: Place) -> None:
        """Copies what a function has besides its ``__dict__``."""
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self.add_variable(function, name, (*place, Access("get", name)))

    def add_parts(self, values: dict[str, Any]) -> None:
        """Copies the dicts of submodules, parameters, buffers and hooks in a module's ``__dict__``."""
        for kinds, copies in ((_PARTS, self._parts), (HOOKS, self._hooks)):
            copies += [(values[kind], dict(values[kind])) for kind in kinds]

    def add_contents(self, value: Any, place: Place) -> None:
        """Copies a container, if it can be changed. Modules that a run imports are no state."""
        if isinstance(value, CHANGEABLE) and value is not sys.modules:
            self._contents.setdefault(id(value), (place, value, copied(value)))

    def add_memory(self, value: Any, place: Place) -> None:
        """Copies the contents of one of :data:`~.values.MEMORIES`, except for an array too large to be a setting."""
        if isinstance(value, contextvars.ContextVar):
            self._memories[id(value)] = place, value, referent(value)
        elif memoryview(value).nbytes <= _LARGEST:
            self._memories[id(value)] = place, value, copy.copy(value)

    def add_tensor(self, value: torch.Tensor, at_most: int = _LARGEST) -> None:
        """Copies a tensor of at most so many bytes; a larger one is no state."""
        if value.layout is torch.strided and value.nbytes <= at_most and id(value) not in self._tensors:
            with _untraced():
                self._tensors[id(value)] = value, value.detach().clone()

    def add_generator(self, generator: Any, place: Place) -> None:
        """Remembers the state of a generator of random numbers."""
        with _untraced():
            self._generators.append((place, generator, state_of(generator)))

    def add_variable(self, owner: Any, name: str, place: Place) -> Any:
        """Remembers a variable, which may not exist yet, and returns what it held before the run.

        Args:
            owner: Has it: global variables, a cell of a closure, or an object with slots.
            name: Its name; "cell_contents" of a cell.
            place: Its place.
        """
        return self._variables.setdefault((id(owner), name), (place, owner, _variable(owner, name)))[2]

    def is_old(self, owner: Any, name: str, value: Any) -> bool:
        """Returns whether a value is from before the run.

        Args:
            owner: Has it: an object's ``__dict__``, or the object for its slots, a class, or global variables.
            name: The name of the attribute or variable.
            value: The value.
        """
        if (id(owner), name) in self._variables:
            return self._variables[id(owner), name][2] is value
        entry = self._classes.get(id(owner)) or self._attributes.get(id(owner))
        return entry is None or entry[2].get(name, MISSING) is value

    def changed_memory(self) -> Iterator[Place]:
        """Yields the places of arrays and context variables that the run has changed."""
        for place, value, before in self._memories.values():
            if isinstance(value, contextvars.ContextVar):
                now = referent(value)
                is_same = now is before or are_equal_constants(now, before)
            elif isinstance(value, numpy.ndarray) and value.dtype.hasobject:
                is_same = [*map(id, value.flat)] == [*map(id, before.flat)]
            else:
                is_same = frozen(value) == frozen(before)
            if not is_same:
                yield place

    def drawn(self) -> Iterator[str]:
        """Yields the generators from which the run has drawn, by name or place."""
        for place, generator, state in self._generators:
            if has_drawn(generator, state):
                yield name_of(generator) or repr(described(place))

    @property
    def has_other_parts(self) -> bool:
        """Whether the run has made or replaced modules, parameters or buffers."""
        return bool(self.other_parts())

    @property
    def has_other_hooks(self) -> bool:
        """Whether the run has made or replaced hooks."""
        return any(not has_same_parts(now, before) for now, before in self._hooks)

    def other_parts(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Returns the dicts of parts that the run has changed, each with a copy, as :meth:`restore` changes them."""
        return [(now, dict(now)) for now, before in self._parts if not has_same_parts(now, before)]

    def changes(self) -> Iterator[Change]:
        """Yields what the run has changed, except for parts of modules."""
        for place, values, before in self._attributes.values():
            for key in dict.fromkeys((*before, *values)):
                now, old = values.get(key, MISSING), before.get(key, MISSING)
                if now is not old and key not in OF_EVERY_MODULE - {"training"}:
                    yield Change((*place, Access("attribute", key)), now, old, functools.partial(_assign, values, key))
        for place, kind, before in self._classes.values():
            for key in dict.fromkeys((*before, *vars(kind))):
                now, old = vars(kind).get(key, MISSING), before.get(key, MISSING)
                if now is not old and not key.startswith("__") and not key.startswith("_abc_"):
                    yield Change((*place, Access("attribute", key)), now, old, functools.partial(_set, kind, key))
        for (_, name), (place, owner, old) in self._variables.items():
            now, put = _variable(owner, name), _assign if type(owner) is dict else _set
            if now is not old:
                yield Change(place, now, old, functools.partial(put, owner, name))
        for place, container, before in self._contents.values():
            if not has_same_parts(container, before):
                restore = functools.partial(refill, container)
                yield Change((*place, Access("contents", "")), container, before, restore)

    def restore(self) -> None:
        """Undoes the run's changes."""
        for change in list(self.changes()):
            change.restore(change.before)
        for _, value, before in self._memories.values():
            if not isinstance(value, contextvars.ContextVar):
                value[... if isinstance(value, numpy.ndarray) else slice(None)] = before
            elif before is not MISSING and referent(value) is not before:
                value.set(before)
        with _untraced(), torch.no_grad():
            for tensor, numbers in self._tensors.values():
                if not torch.equal(tensor, numbers):
                    tensor.copy_(numbers)
            for _, generator, state in self._generators:
                put_back(generator, state)
        self.restore_parts()

    def restore_parts(self) -> None:
        """Undoes changes of submodules, parameters, buffers and hooks, and drops their copies."""
        for now, before in (*self._parts, *self._hooks):
            if not has_same_parts(now, before):
                refill(now, before)
        self._parts, self._hooks = [], []


class WritesToParameters(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies each parameter before a run that is not traced changes it in place, for example through ``.data``.

    Args:
        parameters: The parameters.
        copies: Take the copies, and put them back.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], copies: Copies) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = {parameter.data_ptr(): parameter for parameter in parameters if parameter.numel()}
        self._copies = copies

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        if operator._schema.is_mutable:
            for argument, value in zip(operator._schema.arguments, args, strict=False):
                if argument.is_write and isinstance(value, torch.Tensor):
                    changed = self._parameters.get(value.untyped_storage().data_ptr())
                    if changed is not None:
                        self._copies.add_tensor(changed, at_most=changed.nbytes)
        return operator(*args, **(kwargs or {}))


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Lets PyTorch compute in the context, although a run is traced."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    if value is MISSING:
        values.pop(key, None)
    else:
        values[key] = value


def _set(owner: Any, key: str, value: Any) -> None:
    if value is MISSING:
        delattr(owner, key)
    else:
        setattr(owner, key, value)


def _variable(owner: Any, name: str) -> Any:
    if type(owner) is dict:
        return owner.get(name, MISSING)
    try:
        return object.__getattribute__(owner, name)
    except (AttributeError, ValueError):  # the latter of a cell
        return MISSING
