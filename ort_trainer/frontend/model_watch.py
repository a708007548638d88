"""Notices what has changed in a model since its graphs were exported."""

from __future__ import annotations

import logging
from collections.abc import Collection
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import nn

from ..errors import shown
from .step_module import canonical_names

__all__ = ["ModelWatch"]

_log = logging.getLogger(__name__)
_OWN_OF_MODULE = frozenset(nn.Module().__dict__)
_PLAIN = (bool, int, float, str)
_parameter_state = attrgetter("requires_grad", "dtype", "shape")


class ModelWatch:
    """Compares a model with what it was: at every step, so cheaply.

    A graph holds for good what the model was when it was captured: the mode of each module, which parameters require
    grad, and the settings, which are the numbers, truth values and strings among the attributes of its modules (a
    dropout's ``p``, a norm's ``momentum``). All of this together is a *variant* of the model; each has graphs of its
    own. Other modules or parameters are no variant but another model.

    An int of a module that is not PyTorch's is no setting: it may be a counter, and would ask for an export at every
    step. A change of one is warned about.

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
        self._modules = list(model.named_modules())
        self._dicts = [module.__dict__ for _, module in self._modules]
        self._buffers = {name: list(module._buffers) for name, module in self._modules}
        self._canonical = canonical_names(model)
        self._keys = [("training", *_settings(module)) for _, module in self._modules]
        # A second key, as of one alone itemgetter gives no tuple.
        self._getters = [itemgetter("training", *keys) for keys in self._keys]
        counters = [(name, module, _counters(module)) for name, module in self._modules]
        self._counters = {(name, key): (vars(m), vars(m)[key]) for name, m, keys in counters for key in keys}
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
        self._refuse_other_types(settings)
        self._number(settings)
        self._log_changes(settings, states)
        self._settings, self._states = settings, states
        return self._current[training]

    def check_exportable(self) -> None:
        """Checks what matters for an export alone: that parameters still have values; and warns about changed ints.

        Raises:
            RuntimeError: If they have none.
        """
        gone = [name for name, parameter in self._parameters.items() if parameter.is_meta]
        if gone:
            raise RuntimeError(
                f"the model has changed since the trainer was made: {_listed(gone)} of {type(self._model).__name__} "
                "are on the meta device now, and an export for other sizes, modes or settings needs the model: keep "
                "it as it was, and move a copy"
            )
        self._warn_about_counters()

    def _warn_about_counters(self) -> None:
        for (name, key), (values, before) in list(self._counters.items()):
            now = values.get(key)
            if now is not before and now != before:
                _log.warning(
                    "attribute %r was %s when the trainer was made and is %s now, which its graphs do not see: if "
                    "forward() depends on it, make it a float or a registered buffer",
                    f"{name}.{key}".removeprefix("."), before, now,
                )  # fmt: skip
                del self._counters[name, key]

    def _parts_of_now(self) -> list[Any]:
        parts: list[Any] = []
        for values in self._dicts:
            parts += values["_modules"].values()
            parts += values["_parameters"].values()
            parts += values["_buffers"]
        return parts

    def _settings_of_now(self) -> list[tuple[Any, ...]]:
        try:
            return [getter(values) for getter, values in zip(self._getters, self._dicts, strict=True)]
        except KeyError as error:
            self._refuse([f"a module has lost its attribute {error}"])
            raise

    def _number(self, values: list[tuple[Any, ...]]) -> None:
        """Gives what the model is now a number."""
        training = tuple(of_module[0] for of_module in values)
        settings = tuple(of_module[2:] for of_module in values)
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
        now = dict(self._model.named_modules())
        changes = [f"module {name!r} is gone" for name in before if name not in now]
        changes += [f"module {name!r} is new" for name in now if name not in before]
        changes += [
            f"module {name!r} is another {type(now[name]).__name__}"
            for name in now
            if name in before and now[name] is not before[name]
        ]
        if not changes:
            self._refuse_other_parameters()
            changes = [
                f"module {name!r} has other buffers, {list(module._buffers)}"
                for name, module in now.items()
                if list(module._buffers) != self._buffers[name]
            ]
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

    def _refuse_other_types(self, settings: list[tuple[Any, ...]]) -> None:
        found = [
            f"{name}.{key}".removeprefix(".") + f" has become {shown(value)}"
            for (name, _), keys, values in zip(self._modules, self._keys, settings, strict=True)
            for key, value in zip(keys, values[1:], strict=True)
            if value is not None and not isinstance(value, _PLAIN)
        ]
        if found:
            raise RuntimeError(
                f"a setting of the model is no number, truth value or string any more: {'; '.join(found[:5])}. Its "
                "graphs could not see it change: keep it one, or make a registered buffer of it before the trainer"
            )

    def _refuse(self, changes: list[str]) -> None:
        if changes:
            raise RuntimeError(
                f"the model has changed since the trainer was made: {'; '.join(sorted(changes)[:5])}"
                f"{'; ...' if len(changes) > 5 else ''}. Its graphs and the optimizer's state are those of the former "
                "one: undo the change, or make a new trainer and load the state that still fits with strict=False"
            )

    def _log_changes(self, settings: list[tuple[Any, ...]], states: list[tuple[Any, ...]]) -> None:
        changes = [
            f"{name}.{key}".removeprefix(".") + f": {old} -> {new}"
            for (name, _), keys, before, now in zip(self._modules, self._keys, self._settings, settings, strict=True)
            for key, old, new in zip(keys, before[1:], now[1:], strict=True)
            if type(old) is not type(new) or old != new
        ]
        changes += [
            f"{name}.requires_grad: {old[0]} -> {new[0]}"
            for name, old, new in zip(self._parameters, self._states, states, strict=True)
            if old != new
        ]
        _log.info("the model has changed: %s%s", "; ".join(changes[:5]), "; ..." if len(changes) > 5 else "")


def _counters(module: nn.Module) -> list[str]:
    """Returns the names of the ints that are no settings."""
    settings = {*_settings(module), *_OWN_OF_MODULE}
    return [key for key, value in vars(module).items() if type(value) is int and key not in settings]


def _settings(module: nn.Module) -> list[str]:
    """Returns the names of the attributes that are settings."""
    torchs = type(module).__module__.startswith("torch.nn.")
    return [
        key
        for key, value in vars(module).items()
        if key not in _OWN_OF_MODULE and isinstance(value, _PLAIN) and (torchs or type(value) is not int)
    ]


def _same(first: list[tuple[Any, ...]], second: list[tuple[Any, ...]]) -> bool:
    try:
        return first == second
    except (RuntimeError, ValueError):  # a number has become a tensor or an array, which has no one truth value
        return False


def _listed(names: Collection[str]) -> str:
    quoted = [repr(name) for name in names]
    return ", ".join(quoted[:5]) + (f" and {len(quoted) - 5} more" if len(quoted) > 5 else "")
