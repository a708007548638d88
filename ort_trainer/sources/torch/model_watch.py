"""Notices what has changed in a model since its graphs were exported."""

from __future__ import annotations

import dis
import functools
import inspect
import logging
from collections.abc import Collection
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import nn

from ...errors import shown
from ...interrupts import uninterrupted
from .step_module import canonical_names

__all__ = ["ModelWatch", "settings_of"]

_log = logging.getLogger(__name__)
_OWN_OF_MODULE = frozenset(nn.Module().__dict__)
_PLAIN = (bool, int, float, str)
_parameter_state = attrgetter("requires_grad", "dtype", "shape")


class ModelWatch:
    """Compares a model with what it was: at every step, so cheaply.

    A graph holds for good what the model was when it was captured: the mode of each module, which parameters require
    grad, and the settings, which are the numbers, truth values, strings, functions, plain tensors, and tuples of these
    among the attributes of its modules (a dropout's ``p``, a norm's ``momentum``), and the forward hooks. All of this
    together is a *variant* of the model; each has its own graphs. Other modules or parameters are no variant but
    another model.

    What a module's own ``forward`` assigns (a counter, the last result) is no setting: it would ask for an export at
    every step.

    Args:
        model: The model.
        trainable: Canonical names of the parameters that may be trained.
        frozen: Names of parameters that are not trained whatever they require.

    Attributes:
        modes: Module -> whether it is in training mode in a training step; None for what ``model.train()`` makes.
        trainable: Canonical names of the parameters that a training step differentiates.
    """

    def __init__(self, model: nn.Module, trainable: Collection[str], frozen: Collection[str]) -> None:
        self._model = model
        self._may_train = frozenset(trainable)
        self._frozen = frozenset(frozen)
        self._modules = _modules(model)
        self._dicts = [module.__dict__ for _, module in self._modules]
        self._buffers = {name: list(module._buffers) for name, module in self._modules}
        self._canonical = canonical_names(model)
        self._keys = [("training", *settings_of(module)) for _, module in self._modules]
        # A second key, as of one alone itemgetter gives no tuple.
        self._getters = [itemgetter("training", *keys) for keys in self._keys]
        self._tensors = [
            (values, key)
            for values, keys in zip(self._dicts, self._keys, strict=True)
            for key in keys
            if isinstance(values[key], torch.Tensor)
        ]
        self._variants: dict[Any, int] = {}
        self._own_modes: tuple[bool, ...] | None = None
        self.modes: dict[nn.Module, bool] | None = None
        self.trainable: frozenset[str] = frozenset()
        self._parameters = dict(model.named_parameters())
        self._parts = self._parts_of_now()
        self._states = list(map(_parameter_state, self._parameters.values()))
        self._settings = self._settings_of_now()
        self._number(self._settings)

    def variant(self, training: bool) -> int:
        """Returns a number for what the model is now; the same for the same.

        Args:
            training: Whether for a training step; evaluation depends on the settings alone.

        Raises:
            RuntimeError: If modules or parameters are not those that the trainer was made with.
        """
        parts = self._parts_of_now()
        if len(parts) != len(self._parts) or not all(map(is_, parts, self._parts)):
            self._refuse_other_modules()
            # Other objects for the same parameters, as load_state_dict(assign=True) leaves them.
            now = dict(self._model.named_parameters())
            self._parts, self._parameters = parts, {name: now[name] for name in self._parameters}
        states = list(map(_parameter_state, self._parameters.values()))
        settings = self._settings_of_now()
        if states != self._states:
            self._refuse_other_parameters()
        elif _same(settings, self._settings):
            return self._current[training]
        settings = self._comparable(settings)
        with uninterrupted():  # so that what is remembered and its number belong together
            self._number(settings)
            self._log_changes(settings, states)
            self._settings, self._states = settings, states
        return self._current[training]

    def check_exportable(self) -> None:
        """Checks what matters for an export alone: that parameters have values, and buffers are those that they were.

        Raises:
            RuntimeError: If that is not so.
        """
        gone = [name for name, parameter in self._parameters.items() if parameter.is_meta]
        if gone:
            raise RuntimeError(
                f"the model has changed since the trainer was made: {_listed(gone)} of {type(self._model).__name__} "
                "are on the meta device now, and an export for other sizes, modes or settings needs the model: keep "
                "it as it was, and move a copy"
            )
        changes = [
            f"module {name!r} has other buffers, {list(module._buffers)}"
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
        # What else counts: changes in place, and hooks, which are known by their numbers.
        settings.append(tuple(getattr(values.get(key), "_version", None) for values, key in self._tensors))
        for values in self._dicts:
            if values["_forward_hooks"] or values["_forward_pre_hooks"]:
                settings.append((*values["_forward_hooks"], *values["_forward_pre_hooks"]))
        return settings

    def _number(self, values: list[tuple[Any, ...]]) -> None:
        """Gives what the model is now a number."""
        count = len(self._modules)
        training = tuple(of_module[0] for of_module in values[:count])
        settings = (*(of_module[2:] for of_module in values[:count]), *values[count:])
        required = {name for name, parameter in self._parameters.items() if parameter.requires_grad}
        late = [name for name in self._parameters if name in required - self._may_train - self._frozen]
        if late:
            raise RuntimeError(
                f"parameters {_listed(late)} require grad now, and did not when the trainer was made, so they have no "
                "optimizer state: make the trainer while they require grad, and freeze them afterwards with "
                "requires_grad_(False) until their time comes"
            )
        if all(training):
            self._own_modes = None
        elif any(training):
            if not training[0] and self._own_modes != training:
                _log.warning(
                    "the model is in evaluation mode but for %s, and is trained as it is: call model.train() first if "
                    "that is not meant",
                    _listed([name for (name, _), mode in zip(self._modules, training, strict=True) if mode]),
                )
            self._own_modes = training
        own = self._own_modes
        modules = [module for _, module in self._modules]
        self.modes = None if own is None else dict(zip(modules, own, strict=True))
        self.trainable = self._may_train & required
        trained = (own, self.trainable, settings)
        self._current = {
            True: self._variants.setdefault(trained, len(self._variants)),
            False: self._variants.setdefault(settings, len(self._variants)),
        }

    def _refuse_other_modules(self) -> None:
        before = dict(self._modules)
        now = dict(_modules(self._model))
        changes = [f"module {name!r} is gone" for name in before if name not in now]
        changes += [f"module {name!r} is new" for name in now if name not in before]
        changes += [
            f"module {name!r} is another {type(now[name]).__name__}"
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
        changes = [f"parameter {name!r} is gone" for name in before if name not in now]
        changes += [f"parameter {name!r} is new" for name in now if name not in before]
        for name in before.keys() & now.keys():
            (_, dtype, shape), (_, new_dtype, new_shape) = before[name], _parameter_state(now[name])
            if dtype != new_dtype:
                changes.append(f"parameter {name!r} had dtype {dtype} and has {new_dtype}")
            if shape != new_shape:
                changes.append(f"parameter {name!r} had shape {list(shape)} and has {list(new_shape)}")
        if not changes and {name: canonical[name] for name in now} != {name: self._canonical[name] for name in now}:
            changes = ["other parameters are tied"]
        self._refuse(changes)

    def _comparable(self, settings: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Returns settings with None for what was None and has become an object, which is not looked into.

        Raises:
            RuntimeError: If another one has become such an object.
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
                f"a setting of the model is nothing any more that can be compared: {'; '.join(found[:5])}. A change in "
                "it would not be seen: keep it a number, a string, a function, a tensor, or a tuple of these"
            )
        return result

    def _refuse(self, changes: list[str]) -> None:
        if changes:
            raise RuntimeError(
                f"the model has changed since the trainer was made: {'; '.join(sorted(changes)[:5])}"
                f"{'; ...' if len(changes) > 5 else ''}. Its graphs and the optimizer's state are those of the former "
                "one: undo the change, or make a new trainer and load the state that still fits with strict=False"
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
        _log.info("the model has changed: %s%s", "; ".join(said[:5]), "; ..." if len(said) > 5 else "")


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the modules of a model by name, without those that only stand before another, as compiled ones do."""
    return [(name, module) for name, module in model.named_modules() if "training" in module.__dict__]


def settings_of(module: nn.Module) -> list[str]:
    """Returns the names of the attributes that are settings."""
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
    except (RuntimeError, ValueError):  # a number has become a tensor or an array, which has no one truth value
        return False


def _listed(names: Collection[str]) -> str:
    quoted = [repr(name) if name else "the model" for name in names]
    return ", ".join(quoted[:5]) + (f" and {len(quoted) - 5} more" if len(quoted) > 5 else "")
