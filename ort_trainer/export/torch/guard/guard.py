"""The guard of a PyTorch model's graphs: do they still mean what model and loss mean?

A graph is fixed to what the model was at its capture, so a :class:`ModelWatch` compares its modules and settings, and a
:class:`LossWatch` what the loss function reads from outside: a closure, a global, an attribute.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import nn

from ....core.errors import shown, warn
from ....core.interrupts import uninterrupted
from ...model_source import Named, nothing_to_train
from ..borrow import BORROWED
from ..step_module import canonical_names, content_of
from .shared_tensors import SharedTensors

__all__ = ["Guard", "ModelChangedError", "ModelWatch"]

_log = logging.getLogger(__name__)
_OWN_OF_MODULE = frozenset(nn.Module().__dict__)
_PLAIN = (bool, int, float, str)
_parameter_state = attrgetter("requires_grad", "dtype", "shape")
# Containers with more entries or deeper nesting are not watched: comparing them at every step is too slow.
_MOST_ENTRIES, _DEEPEST = 1000, 4
_Reader = tuple[str, Callable[[], Any]]


class ModelChangedError(RuntimeError):
    """A model has other modules or parameters than before."""


class Guard:
    """Watches what graphs of a model depend on: its modules and settings, the loss function, and their memory.

    Args:
        model: The model.
        loss_fn: The loss function, or None.
        trainable: Canonical names of the parameters that may be trained.
        frozen: Names of parameters that are never trained, even if they require grad.
        share: Whether the trainer works on the model's own tensors.

    Attributes:
        memory: The model's own tensors, if the trainer works on them.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Any, trainable: Collection[str], frozen: Collection[str], share: bool
    ) -> None:
        self._name = type(model).__name__
        self._model = ModelWatch(model, trainable, frozen)
        self._modules = [self._model]
        if isinstance(loss_fn, nn.Module) and not isinstance(loss_fn, torch.jit.ScriptModule):
            self._modules.append(ModelWatch(loss_fn, (), [name for name, _ in loss_fn.named_parameters()]))
        self._loss = LossWatch(loss_fn, model)
        self.memory = SharedTensors(model, self._model) if share else None

    def check(self, training: bool) -> tuple[Hashable, Named]:
        """Returns the key of the graphs to use, and the tensors with other memory; see ``ModelSource.check``."""
        with BORROWED:  # an export in another thread may have set other modes for a while
            key = (*[watch.variant(training) for watch in self._modules], self._loss.variant())
            if training and not self._model.trainable:
                raise nothing_to_train(self._name)
            return key, {} if self.memory is None else self.memory.take_changes()

    @property
    def last_change(self) -> str:
        """What has changed in the model and the loss's modules; see ``ModelSource.last_change``."""
        return "; ".join(filter(None, (watch.last_change for watch in self._modules)))

    @property
    def trainable(self) -> frozenset[str]:
        """Canonical names of the parameters that a training step differentiates now."""
        return self._model.trainable

    @property
    def modes(self) -> Mapping[nn.Module, bool]:
        """Module -> whether it is in training mode in a training step, if that differs from ``train()``."""
        return {part: mode for watch in self._modules for part, mode in (watch.modes or {}).items()}

    def check_exportable(self) -> None:
        """Checks what only an export requires of the model: see ``ModelWatch.check_exportable``."""
        with BORROWED:
            self._model.check_exportable()

    def depends_on_modes(self, modules: Collection[nn.Module]) -> None:
        """Records which modules' modes the graph of the current variant depends on."""
        for watch in self._modules:
            watch.depends_on_modes(modules)


class ModelWatch:
    """Compares a model with its former state, at every step and therefore cheaply.

    A graph is fixed to the state of the model at its capture: the mode of each module, which parameters require grad,
    the settings, and the forward hooks. Settings are attributes of modules (a dropout's ``p``, a norm's ``momentum``)
    that are numbers, booleans, strings, functions, plain tensors, or tuples of these. All of this together is a
    *variant* of the model; each variant has its own graphs. A model with other modules or parameters is not a variant
    but another model.

    An attribute that a module's own ``forward`` assigns (a counter, the last result) is not a setting: it would cause
    an export at every step.

    Args:
        model: The model.
        trainable: Canonical names of the parameters that may be trained.
        frozen: Names of parameters that are never trained, even if they require grad.
        own_modes: Whether a training step runs in the modes that the modules are in, even if all are in evaluation
            mode.

    Attributes:
        modes: Module -> whether it is in training mode in a training step; None if as ``model.train()`` sets it.
        trainable: Canonical names of the parameters that a training step differentiates.
        last_change: What the last call of :meth:`variant` found changed; empty if nothing.
    """

    def __init__(
        self, model: nn.Module, trainable: Collection[str], frozen: Collection[str], own_modes: bool = False
    ) -> None:
        self._model = model
        self._as_they_are = own_modes
        self._may_train = frozenset(trainable)
        self._frozen = frozenset(frozen)
        self._modules = _modules(model)
        self._dicts = [module.__dict__ for _, module in self._modules]
        self._buffers = {name: list(module._buffers) for name, module in self._modules}
        self._canonical = canonical_names(model)
        self._keys = [("training", *_settings_of(module)) for _, module in self._modules]
        # Always two keys or more: with one key, itemgetter returns no tuple.
        self._getters = [itemgetter("training", *keys) for keys in self._keys]
        self._tensors = [
            (values, key)
            for values, keys in zip(self._dicts, self._keys, strict=True)
            for key in keys
            if isinstance(values[key], torch.Tensor)
        ]
        self._numbers = itertools.count()
        self._trained: dict[Any, int] = {}
        self._evaluated: dict[Any, int] = {}
        # The modules whose modes training graphs depend on; None, which stands for all, before the first export.
        self._read: set[nn.Module] | None = None
        self._own_modes: tuple[bool, ...] | None = None
        self.modes: dict[nn.Module, bool] | None = None
        self.trainable: frozenset[str] = frozenset()
        self.last_change = ""
        self._parameters = dict(model.named_parameters())
        self._parts = self._parts_of_now()
        self._states = list(map(_parameter_state, self._parameters.values()))
        self._settings = self._settings_of_now()
        self._number(self._settings)

    def variant(self, training: bool) -> int:
        """Returns the number of the model's current variant.

        Args:
            training: Whether for a training step; evaluation depends only on the settings.

        Raises:
            RuntimeError: If modules or parameters have changed since the trainer was made.
        """
        self.last_change = ""
        parts = self._parts_of_now()
        if len(parts) != len(self._parts) or not all(map(is_, parts, self._parts)):
            self._refuse_other_modules()
            # The same parameters as other objects, for example after load_state_dict(assign=True).
            now = dict(self._model.named_parameters())
            self._parts, self._parameters = parts, {name: now[name] for name in self._parameters}
        states = list(map(_parameter_state, self._parameters.values()))
        settings = self._settings_of_now()
        if states != self._states:
            self._refuse_other_parameters()
        elif _same(settings, self._settings):
            return self._current[training]
        settings = self._comparable(settings)
        with uninterrupted():  # keeps the stored settings and their number consistent
            self._number(settings)
            self._log_changes(settings, states)
            self._settings, self._states = settings, states
        return self._current[training]

    def depends_on_modes(self, modules: Collection[nn.Module]) -> None:
        """Records which modules' modes the graph of the current variant depends on; the others' don't matter."""
        read = {module for _, module in self._modules if module in modules} | (self._read or set())
        if read != self._read:
            self._read = read
            # The old keys hold the modes of other modules: under them, one number could stand for several variants.
            self._trained = {(self._modes_of_now(), *self._key): self._current[True]}

    def check_exportable(self) -> None:
        """Checks what only an export requires: parameters with values, and the same buffers as before.

        Raises:
            RuntimeError: If a parameter is on the meta device, or a module has other buffers.
        """
        gone = [name for name, parameter in self._parameters.items() if parameter.is_meta]
        if gone:
            raise RuntimeError(
                f"the model has changed since the trainer was made: {_listed(gone)} of {type(self._model).__name__} "
                "are on the meta device now, but an export for other sizes, modes or settings needs their values: keep "
                "the model as it was, and move a copy"
            )
        changes = [
            f"module {name!r} now has the buffers {list(module._buffers)}"
            for name, module in self._modules
            if list(module._buffers) != self._buffers[name]
        ]
        self._refuse(changes)

    def _parts_of_now(self) -> list[Any]:
        parts: list[Any] = []
        for values in self._dicts:
            parts += values["_modules"].values()
            parts += values["_parameters"].values()
        return parts

    def _settings_of_now(self) -> list[tuple[Any, ...]]:
        try:
            settings = [getter(values) for getter, values in zip(self._getters, self._dicts, strict=True)]
        except KeyError as error:
            self._refuse([f"a module has lost its attribute {error}"])
            raise
        # Also in-place changes of tensors, and hooks, identified by their ids.
        tensors = self._tensors
        settings.append(tuple(getattr(values.get(key), "_version", None) for values, key in tensors) if tensors else ())
        for values in self._dicts:
            if values["_forward_hooks"] or values["_forward_pre_hooks"]:
                settings.append((*values["_forward_hooks"], *values["_forward_pre_hooks"]))
        return settings

    def _number(self, values: list[tuple[Any, ...]]) -> None:
        """Assigns a number to the current variant."""
        count = len(self._modules)
        training = tuple(of_module[0] for of_module in values[:count])
        settings = (*(of_module[2:] for of_module in values[:count]), *values[count:])
        required = {name for name, parameter in self._parameters.items() if parameter.requires_grad}
        late = [name for name in self._parameters if name in required - self._may_train - self._frozen]
        if late:
            raise RuntimeError(
                f"parameters {_listed(late)} require grad now but did not when the trainer was made, so they have no "
                "optimizer state: make the trainer while they require grad, then freeze them with "
                "requires_grad_(False) until they are to be trained"
            )
        if self._as_they_are:
            self._own_modes = training
        elif all(training):
            self._own_modes = None
        elif any(training):
            if not training[0] and self._own_modes != training:
                _log.warning(
                    "the model is in evaluation mode except for %s, and is trained in these modes: call model.train() "
                    "first if that is not intended",
                    _listed([name for (name, _), mode in zip(self._modules, training, strict=True) if mode]),
                )
            self._own_modes = training
        own = self._own_modes
        modules = [module for _, module in self._modules]
        self.modes = None if own is None else dict(zip(modules, own, strict=True))
        self.trainable = self._may_train & required
        self._key = self.trainable, settings
        self._current = {
            True: self._trained.setdefault((self._modes_of_now(), *self._key), next(self._numbers)),
            False: self._evaluated.setdefault(settings, next(self._numbers)),
        }

    def _modes_of_now(self) -> tuple[bool, ...]:
        modes = self.modes or {}
        counted = self._modules if self._read is None else [entry for entry in self._modules if entry[1] in self._read]
        return tuple(modes.get(module, True) for _, module in counted)

    def _refuse_other_modules(self) -> None:
        before = dict(self._modules)
        now = dict(_modules(self._model))
        changes = [f"module {name!r} was removed" for name in before if name not in now]
        changes += [f"module {name!r} was added" for name in now if name not in before]
        changes += [
            f"module {name!r} was replaced by another {type(now[name]).__name__}"
            for name in now
            if name in before and now[name] is not before[name]
        ]
        if not changes:
            self._refuse_other_parameters()
        self._refuse(changes)

    def _refuse_other_parameters(self) -> None:
        now = dict(self._model.named_parameters())
        canonical = canonical_names(self._model)
        before = dict(zip(self._parameters, self._states, strict=True))
        changes = [f"parameter {name!r} was removed" for name in before if name not in now]
        changes += [f"parameter {name!r} was added" for name in now if name not in before]
        for name in before.keys() & now.keys():
            (_, dtype, shape), (_, new_dtype, new_shape) = before[name], _parameter_state(now[name])
            if dtype != new_dtype:
                changes.append(f"parameter {name!r} had dtype {dtype} and now has {new_dtype}")
            if shape != new_shape:
                changes.append(f"parameter {name!r} had shape {list(shape)} and now has {list(new_shape)}")
        if not changes and {name: canonical[name] for name in now} != {name: self._canonical[name] for name in now}:
            changes = ["parameters are tied differently"]
        self._refuse(changes)

    def _comparable(self, settings: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Returns settings with None for those that were None and are now objects that can't be compared.

        Raises:
            RuntimeError: If any other setting can no longer be compared.
        """
        result, found = list(settings), []
        for index, ((name, _), keys) in enumerate(zip(self._modules, self._keys, strict=True)):
            old, new = self._settings[index], settings[index]
            result[index] = tuple(value if _is_setting(value) else None for value in new)
            found += [
                f"{name}.{key}".removeprefix(".") + f" has become {shown(value)}"
                for key, was, value in zip(keys, old[1:], new[1:], strict=True)
                if was is not None and not _is_setting(value)
            ]
        if found:
            raise RuntimeError(
                f"a setting of the model can no longer be compared: {'; '.join(found[:5])}. A change in it would go "
                "unnoticed: keep it a number, a string, a function, a tensor, or a tuple of these"
            )
        return result

    def _refuse(self, changes: list[str]) -> None:
        if changes:
            raise ModelChangedError(
                f"the model has changed since the trainer was made: {'; '.join(sorted(changes)[:5])}"
                f"{'; ...' if len(changes) > 5 else ''}. The graphs and the optimizer's state belong to the former "
                "model: undo the change, or make a new trainer and load the state that still fits with strict=False"
            )

    def _log_changes(self, settings: list[tuple[Any, ...]], states: list[tuple[Any, ...]]) -> None:
        changes = [
            (name, f"{key}: {shown(old)} -> {shown(new)}")
            for (name, _), keys, before, now in zip(self._modules, self._keys, self._settings, settings, strict=False)
            for key, old, new in zip(keys, before[1:], now[1:], strict=True)
            if old is not new and not _same([(old,)], [(new,)])
        ]
        changes += [
            (name, f"requires_grad: {old[0]} -> {new[0]}")
            for name, old, new in zip(self._parameters, self._states, states, strict=True)
            if old != new
        ]
        where: dict[str, list[str]] = {}
        for name, change in changes:
            where.setdefault(change, []).append(name)
        said = [f"{change} in {_listed(names)}" for change, names in where.items()]
        self.last_change = "; ".join(said[:5]) + ("; ..." if len(said) > 5 else "")
        _log.info("the model has changed: %s", self.last_change)


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the modules of a model by name, without wrappers of compiled modules."""
    return [(name, module) for name, module in model.named_modules() if "training" in module.__dict__]


def _settings_of(module: nn.Module) -> list[str]:
    """Returns the names of a module's attributes that are settings."""
    kept = _assigned_in_forward(type(module).forward)
    return [
        key
        for key, value in vars(module).items()
        if key not in _OWN_OF_MODULE and key not in kept and _is_setting(value)
    ]


@functools.cache
def _assigned_in_forward(forward: Any) -> frozenset[str]:
    """Returns the names of the attributes that a function assigns."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None:
        return frozenset()
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")


def _is_setting(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, (*_PLAIN, torch.Tensor)) or inspect.isroutine(value)


def _same(first: list[tuple[Any, ...]], second: list[tuple[Any, ...]]) -> bool:
    try:
        return first == second
    except (RuntimeError, ValueError):  # a number has become a tensor or an array, whose comparison is ambiguous
        return False


def _listed(names: Collection[str]) -> str:
    quoted = [repr(name) if name else "the model" for name in names]
    return ", ".join(quoted[:5]) + (f" and {len(quoted) - 5} more" if len(quoted) > 5 else "")


class LossWatch:
    """Reads, at every step, the values that a loss function uses without getting them as arguments.

    These are numbers, booleans, strings, tensors, modules, and lists, tuples and dicts of them. They are constants of a
    graph, so each combination needs its own. Values read by functions that the loss function calls are not watched.

    Args:
        loss_fn: The loss function, or None.
        model: The model, whose own parameters and buffers are inputs of its graphs.
    """

    def __init__(self, loss_fn: Callable[..., Any] | None, model: nn.Module) -> None:
        self._readers = list(_readers(loss_fn))
        if isinstance(loss_fn, nn.Module):  # a ModelWatch watches its settings
            self._readers.append((type(loss_fn).__name__, lambda: list(_tensors_of(loss_fn))))
        self._models_own = {id(part) for part in (*model.modules(), *_tensors_of(model))}
        self._settings: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()
        self._contents: dict[int, tuple[weakref.ref[torch.Tensor], int, Hashable]] = {}
        self._values = self._now()
        self._warned: set[str] = set()

    def variant(self) -> tuple[Any, ...]:
        """Returns a comparable key for the values. Warns when a value changes for the first time."""
        now = self._now()
        if now != self._values:
            for (name, _), old, new in zip(self._readers, self._values, now, strict=True):
                if old != new and name not in self._warned:
                    self._warned.add(name)
                    warn(f"loss_fn reads {name!r}, {_change(name, old, new)}")
            self._values = now
        return now

    def _now(self) -> tuple[Any, ...]:
        return tuple(self._seen(read()) for _, read in self._readers) if self._readers else ()

    def _seen(self, value: Any, depth: int = 0) -> Any:
        """Returns a comparable stand-in for a value; None for what is not watched."""
        if isinstance(value, _PLAIN):
            return value
        if id(value) in self._models_own:
            return None
        if isinstance(value, torch.Tensor):
            return self._content(value)
        if isinstance(value, nn.Module):
            return (*map(self._seen, _tensors_of(value)), *map(self._of_module, value.modules()))
        if not isinstance(value, (list, tuple, dict)) or len(value) > _MOST_ENTRIES or depth == _DEEPEST:
            return None
        if isinstance(value, dict):
            value = [part for pair in value.items() for part in pair]
        return tuple(self._seen(part, depth + 1) for part in value)

    def _of_module(self, module: nn.Module) -> tuple[Any, ...]:
        """Returns the mode and settings of one module."""
        if module not in self._settings:
            self._settings[module] = ["training", *_settings_of(module)]
        return tuple(self._seen(vars(module).get(key)) for key in self._settings[module])

    def _content(self, tensor: torch.Tensor) -> Hashable:
        """Returns dtype, shape and hash of a tensor; hashes it again only if it may have changed."""
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            return id(tensor)
        version = -1 if tensor.is_inference() else tensor._version
        known = self._contents.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != version or version < 0:
            value = (tensor.dtype, tensor.shape, hash(content_of(tensor)))
            known = self._contents[id(tensor)] = weakref.ref(tensor), version, value
        return known[2]


def _change(name: str, old: Any, new: Any) -> str:
    if isinstance(new, _PLAIN):
        return (
            f"which has changed from {shown(old)} to {shown(new)}: the model is exported again for each value. To "
            f"avoid that, make it an argument of loss_fn, and set trainer.loss_parameters[{name!r}]"
        )
    return (
        "in which a tensor has changed: the model is exported again for each value. To avoid that, make the tensor an "
        "argument of loss_fn, and pass it with every batch"
    )


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _readers(loss_fn: Any) -> Iterator[_Reader]:
    """Yields the name and getter of each value that may be watched."""
    while isinstance(loss_fn, functools.partial):
        yield "arguments of partial", functools.partial(getattr, loss_fn, "args")
        yield from _entries(loss_fn.keywords)
        loss_fn = loss_fn.func
    if loss_fn is None or isinstance(loss_fn, nn.Module):  # a ModelWatch watches a module's settings
        return
    owner = getattr(loss_fn, "__self__", None)
    if not inspect.isroutine(loss_fn):
        owner, loss_fn = loss_fn, type(loss_fn).__call__
    if owner is not None and not inspect.ismodule(owner) and not isinstance(owner, (type, nn.Module)):
        yield from _entries(getattr(owner, "__dict__", {}))
    function = inspect.unwrap(loss_fn)
    code = getattr(function, "__code__", None)
    if code is None or (getattr(function, "__module__", None) or "").partition(".")[0] == "torch":
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield name, functools.partial(_in_cell, cell)
    yield from _entries(function.__globals__, set(code.co_names))


def _entries(values: Mapping[str, Any], names: Collection[str] | None = None) -> Iterator[_Reader]:
    for name in list(values) if names is None else sorted(values.keys() & names):
        if isinstance(values[name], (*_PLAIN, torch.Tensor, nn.Module, list, tuple, dict)):
            yield name, functools.partial(values.get, name)


def _in_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
