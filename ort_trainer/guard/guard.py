"""The guard of a PyTorch model's graphs: do they still mean what model and loss mean?

A graph is fixed to what the model was at its capture, so a :class:`ModelWatch` compares its structure, and
:class:`~.reads.Reads` what the model and the loss function read outside tensors.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Hashable, Mapping, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import nn

from ..capture.borrow import BORROWED
from ..capture.step_module import canonical_names
from ..core.errors import warn
from ..core.interrupts import uninterrupted
from ..outside.carried import CarriedState
from ..outside.changes import BACKWARD_HOOKS, GLOBAL_HOOKS, HOOKS
from ..outside.notes import Notes
from ..outside.places import GONE, Place
from .condition import Condition
from .memory import Named
from .reads import Reads, Root, listed
from .shared_tensors import SharedTensors

_log = logging.getLogger(__name__)
_parameter_state = attrgetter("requires_grad", "dtype", "shape")
_buffer_state = attrgetter("dtype", "shape")
_requires_grad = attrgetter("requires_grad")
_requires_grad_and_hooks = attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_mode = itemgetter("training")


class ModelChangedError(RuntimeError):
    """A model has other modules or parameters than before."""


class Guard:
    """Watches what graphs of a model depend on: its modules, what they and the loss read outside, and their memory.

    Args:
        model: The model.
        loss_fn: The loss function, or None.
        trainable: Canonical names of the parameters that may be trained.
        frozen: Names of parameters that are never trained, even if they require grad.
        share: Whether the trainer works on the model's own tensors.

    Attributes:
        memory: The model's own tensors, if the trainer works on them.
        carried: The state that graphs leave outside tensors and read again.
        notes: Those of the last export, for :meth:`leave`; None if its runs leave nothing outside.
        compared: What the first training graph computes and depends on, for processes that train together to compare.
            These are texts: ``conditions`` on sizes and values, ``operators`` by name, and ``values`` outside tensors
            by place. It is empty where processes may differ by purpose.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Any, trainable: Collection[str], frozen: Collection[str], share: bool
    ) -> None:
        self._name = type(model).__name__
        self._model = ModelWatch(model, trainable, frozen)
        self._modules = [self._model]
        if isinstance(loss_fn, nn.Module) and not isinstance(loss_fn, torch.jit.ScriptModule):
            of_model = set(map(id, model.parameters()))
            # Those of the loss alone that require grad already are refused when the signature is checked.
            known = [name for name, p in loss_fn.named_parameters() if id(p) in of_model or p.requires_grad]
            self._modules.append(ModelWatch(loss_fn, (), known, of_loss=True))
        self._root = Root(model, loss_fn)
        self._reads = Reads(self._root)
        self.carried = CarriedState(self._root)
        self.notes: Notes | None = None
        self.compared: dict[str, Any] = {}
        self.memory = SharedTensors(model, self._model) if share else None

    def check(self, training: bool) -> tuple[Hashable, Named]:
        """Asks before a step whether the graphs still mean what the model means.

        Args:
            training: Whether before a training step.

        Returns:
            A key for everything in the model and loss that graphs depend on, which changes with them; and the tensors
            whose memory has changed, by canonical name, usually none.

        Raises:
            RuntimeError: If the model has changed into another one, or has nothing to train.
        """
        with BORROWED:  # an export in another thread may have set other modes for a while
            structure = training, *[watch.variant(training) for watch in self._modules]
            variant = self._reads.variant(structure)
            if training and not self._model.trainable:
                raise RuntimeError(
                    f"{self._name} has no parameter to train: all have requires_grad=False or are in "
                    "utils.frozen_weights. eval_step still works"
                )
            changed = {} if self.memory is None else self.memory.take_changes()
            return variant, {**changed, **self._reads.carried()} if self._reads.carries else changed

    def noted(self, notes: Notes, training: bool) -> None:
        """Takes the notes of an export that was made in the present state."""
        self._reads.add(notes)
        self.carried.note(notes)
        self.notes = notes if notes.leftovers.writes else None
        if training and notes.outline and not self.compared:
            operators = dict(notes.outline)
            conditions = operators.pop("")
            values = self._reads.shown(notes)
            self.compared = {"conditions": conditions, "operators": operators, "values": values}

    def leave(self, notes: Notes, tensors: Sequence[torch.Tensor]) -> None:
        """Leaves outside, in attributes, containers or variables, what a training step of the model leaves there.

        Args:
            notes: The notes of the graph that has run.
            tensors: Its outputs ``Step.left``.
        """
        with BORROWED:
            notes.leftovers.leave(self._root, tensors)

    @property
    def numbers(self) -> Collection[Place]:
        """Places of numbers that have changed, for which graphs should have inputs."""
        return self._reads.numbers

    @property
    def tables(self) -> Mapping[Place, Any]:
        """Places of tables that depend on sizes alone, and what was there before the first run."""
        return self._reads.tables

    @property
    def last_change(self) -> str:
        """What has changed in model and loss since the call of :meth:`check` before the last; empty if unknown."""
        return "; ".join(filter(None, (*(watch.last_change for watch in self._modules), *self._reads.changes[:5])))

    @property
    def trainable(self) -> frozenset[str]:
        """Canonical names of the parameters that a training step differentiates now."""
        return self._model.trainable

    @property
    def modes(self) -> Mapping[nn.Module, bool]:
        """Modules that keep modes of their own; see ``ExportedStep.modes``."""
        shared = set(self._root.model.modules())
        of_loss = (watch.modes or {} for watch in self._modules[1:])
        others = {part: mode for modes in of_loss for part, mode in modes.items() if part not in shared}
        return {**others, **(self._model.modes or {})}

    def check_exportable(self) -> None:
        """Checks what only an export requires of the model: see ``ModelWatch.check_exportable``."""
        with BORROWED:
            self._model.check_exportable()

    def take_exchanged_modules(self) -> None:
        """Takes the modules that a run for an export has put in the place of others."""
        self._model.take_exchanged_modules()

    def depends_on_modes(self, modules: Collection[nn.Module], training: bool) -> None:
        """Records which modules' modes a new graph of the current variant depends on."""
        for watch in self._modules if training else self._modules[1:]:
            watch.depends_on_modes(modules)


class ModelWatch:
    """Compares the structure of a model with its former one, before every step, and so must be fast.

    A graph is fixed to the mode of each module, to which parameters require grad, to the shapes and dtypes of buffers,
    and to the forward hooks. All of this together is a *variant* of the model. A model with other modules or parameters
    is not a variant but another model.

    Args:
        model: The model.
        trainable: Canonical names of the parameters that may be trained.
        frozen: Names of parameters that are never trained, even if they require grad.
        for_calls: Whether graphs are for calls of the model in a loop of PyTorch: they run in the modes that the
            modules are in, even if all are in evaluation mode, and autograd runs the hooks of parameters.
        of_loss: Whether the model is a loss, which always runs in the modes that its modules are in.

    Attributes:
        may_train: The argument ``trainable``.
        modes: Module -> whether it is in training mode in a training step; None if as ``model.train()`` sets it.
        trainable: Canonical names of the parameters that a training step differentiates.
        last_change: What the last call of :meth:`variant` found changed; empty if nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        trainable: Collection[str],
        frozen: Collection[str],
        for_calls: bool = False,
        of_loss: bool = False,
    ) -> None:
        self._model = model
        self._for_calls, self._of_loss = for_calls, of_loss
        self._asked = _requires_grad if for_calls else _requires_grad_and_hooks
        self.may_train = frozenset(trainable)
        self._frozen = frozenset(frozen)
        self._canonical = canonical_names(model)
        self._numbers = itertools.count()
        # What training and evaluation graphs depend on -> the number of the variant.
        self._trained: dict[Any, int] = {}
        self._evaluated: dict[Any, int] = {}
        # The modules whose modes training graphs depend on; None, which stands for all, before the first export.
        self._read: set[nn.Module] | None = None
        self._own_modes: tuple[bool, ...] | None = None  # of a training step, if not all modules are in training mode
        self.modes: dict[nn.Module, bool] | None = None
        self._ignores_modes = self._has_warned = False
        self._current: dict[bool, int] = {}
        self.trainable: frozenset[str] = frozenset()
        self.last_change = ""
        self._parameters = dict(model.named_parameters())
        self._take_modules()

    def _take_modules(self) -> None:
        self._modules = _modules(self._model)
        self._dicts = [module.__dict__ for _, module in self._modules]
        self._hooks = [values[kind] for values in (*self._dicts, GLOBAL_HOOKS) for kind in (*HOOKS, *BACKWARD_HOOKS)]
        self._buffers = {name: list(module._buffers) for name, module in self._modules}
        self._parts = self._parts_of_now()
        self._states = list(map(_parameter_state, self._parameters.values()))
        self._settings = self._settings_of_now()
        self._number(self._settings)
        self._compile()

    def take_exchanged_modules(self) -> None:
        """Takes the modules that the first run of the current variant has put in the place of others."""
        current = self._current
        self._take_modules()
        self._trained = {(self._modes_of_now(), *self._key): current[True]}
        self._evaluated = {self._key[1]: current[False]}
        self._current = current

    def variant(self, training: bool) -> int:
        """Returns the number of the model's current variant.

        Args:
            training: Whether for a training step; evaluation depends on the modes of a loss alone.

        Raises:
            RuntimeError: If modules or parameters have changed since the trainer was made.
        """
        self.last_change = ""
        try:
            same = self._holds() and list(map(_mode, self._dicts)) == self._settings[0]
        except GONE:
            same = False
        if not same or list(map(self._asked, self._parameters.values())) != self._of_parameters:
            self._look()
        if training and self._ignores_modes:
            self._warn_of_modes()
        return self._current[training or self._of_loss]

    def _look(self) -> None:
        """Compares everything; numbers the variant if something has changed."""
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
        if states != self._states or settings != self._settings:
            with uninterrupted():  # keeps the stored settings and their number consistent
                self._number(settings)
                self._log_changes(states, settings[0])
                self._settings, self._states = settings, states
        self._compile()

    def _compile(self) -> None:
        """Compiles the check that modules, parameters, buffers and hooks are what they are now.

        Modes and ``requires_grad`` are compared separately, because some loops change them all the time.
        """
        condition = Condition()
        self._of_parameters = list(map(self._asked, self._parameters.values()))
        for values in self._dicts:
            for kind in ("_modules", "_parameters", "_buffers"):
                condition.has_entries(values[kind])
        for hooks in self._hooks:
            condition.has_entries(hooks)
        for tensor in (*self._parameters.values(), *self._model.buffers()):
            name = condition.name(tensor)
            condition.add(f"{name}.dtype is {condition.name(tensor.dtype)}")
            condition.add(f"{name}.shape == {condition.name(tensor.shape)}")
        self._holds = condition.function()

    def depends_on_modes(self, modules: Collection[nn.Module]) -> None:
        """Records which modules' modes the graph of the current variant depends on; the others' don't matter."""
        read = {module for _, module in self._modules if module in modules} | (self._read or set())
        if read != self._read:
            self._read = read
            # The old keys hold the modes of other modules: under them, one number could stand for several variants.
            self._trained = {(self._modes_of_now(), *self._key): self._current[True]}
        self._note_ignored_modes(self._settings[0])
        if self._ignores_modes:
            self._warn_of_modes()

    def _note_ignored_modes(self, modes: Sequence[bool]) -> None:
        """Notes whether a training step runs in other modes than the model's, and is known to depend on them."""
        keeps = self._for_calls or self._of_loss or self._has_warned or any(modes)
        self._ignores_modes = not keeps and bool(self._read)

    def _warn_of_modes(self) -> None:
        self._ignores_modes, self._has_warned = False, True
        warn(
            f"all modules of {type(self._model).__name__} are in evaluation mode, and are trained in "
            f"{'the modes of the last training step' if self._own_modes else 'training mode'}, with dropout and "
            "statistics of batches: call model.train() before, or, to train in evaluation mode, eval() on each of "
            "model.children()"
        )

    def check_exportable(self) -> None:
        """Checks what only an export requires: parameters with values, and the same buffers as before.

        Raises:
            RuntimeError: If a parameter is on the meta device, or a module has other buffers.
        """
        gone = [name for name, parameter in self._parameters.items() if parameter.is_meta]
        if gone:
            raise RuntimeError(
                f"the model has changed since the trainer was made: {listed(gone)} of {type(self._model).__name__} "
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
        """Returns all submodules, parameters and buffers, for a comparison by identity."""
        parts: list[Any] = []
        for values in self._dicts:
            parts += values["_modules"].values()
            parts += values["_parameters"].values()
            parts += values["_buffers"].values()
        return parts

    def _settings_of_now(self) -> tuple[list[bool], list[Any], list[tuple[Any, ...]]]:
        """Returns the modes, what graphs depend on in buffers, and the hooks, identified by their ids."""
        hooks = [*self._hooks]
        if not self._for_calls:
            of_parameters = map(self._asked, self._parameters.values())
            hooks += [registered or {} for _, *kinds in of_parameters for registered in kinds]
        hooks = [tuple((key, id(hook)) for key, hook in registered.items()) for registered in hooks if registered]
        return list(map(_mode, self._dicts)), list(map(_buffer_state, self._model.buffers())), hooks

    def _number(self, values: tuple[list[bool], list[Any], list[tuple[Any, ...]]]) -> None:
        """Assigns a number to the current variant, from what :meth:`_settings_of_now` has returned."""
        modes, buffers, hooks = values
        training, settings = tuple(modes), (tuple(buffers), tuple(hooks))
        required = {name for name, parameter in self._parameters.items() if parameter.requires_grad}
        late = [name for name in self._parameters if name in required - self.may_train - self._frozen]
        if late and self._of_loss:
            raise RuntimeError(
                f"parameters {listed(late)} of loss_fn require grad now, but only the model is trained: make the loss "
                "a part of the model, and a new trainer, or set their requires_grad to False"
            )
        if late:
            raise RuntimeError(
                f"parameters {listed(late)} require grad now but did not when the trainer was made, so they have no "
                "optimizer state: make the trainer while they require grad, then freeze them with "
                "requires_grad_(False) until they are to be trained"
            )
        self._note_ignored_modes(modes)
        if self._for_calls or self._of_loss:
            self._own_modes = training
        elif all(training):
            self._own_modes = None
        elif any(training):  # all in evaluation mode, as after model.eval(), changes nothing in training steps
            if not training[0] and self._own_modes != training:
                _log.warning(
                    "the model is in evaluation mode except for %s, and is trained in these modes: call model.train() "
                    "first if that is not intended",
                    listed([name for (name, _), mode in zip(self._modules, training, strict=True) if mode]),
                )
            self._own_modes = training
        modules = [module for _, module in self._modules]
        self.modes = None if self._own_modes is None else dict(zip(modules, self._own_modes, strict=True))
        self.trainable = self.may_train & required
        self._key = self.trainable, settings
        self._current = {
            True: self._trained.setdefault((self._modes_of_now(), *self._key), next(self._numbers)),
            False: self._evaluated.setdefault(settings, next(self._numbers)),
        }

    def _modes_of_now(self) -> tuple[bool, ...]:
        """Returns the modes, in a training step, of the modules whose modes the graphs depend on."""
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

    def _refuse(self, changes: list[str]) -> None:
        if changes:
            raise ModelChangedError(
                f"the model has changed since the trainer was made: {'; '.join(sorted(changes)[:5])}"
                f"{'; ...' if len(changes) > 5 else ''}. The graphs and the optimizer's state belong to the former "
                "model: undo the change, or make a new trainer and load the state that still fits with strict=False"
            )

    def _log_changes(self, states: list[tuple[Any, ...]], modes: list[bool]) -> None:
        where: dict[str, list[str]] = {}
        changes = [
            ("training", [name for name, _ in self._modules], self._settings[0], modes),
            ("requires_grad", list(self._parameters), [s[0] for s in self._states], [s[0] for s in states]),
        ]
        for what, names, before, now in changes:
            for name, old, new in zip(names, before, now, strict=True):
                if old != new:
                    where.setdefault(f"{what}: {old} -> {new}", []).append(name)
        self.last_change = "; ".join(f"{change} in {listed(names)}" for change, names in where.items())
        _log.info("the model has changed: %s", self.last_change or "its modes, buffers or hooks")


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the modules of a model by name, without wrappers of compiled modules."""
    return [(name, module) for name, module in model.named_modules() if "training" in module.__dict__]


def nothing_to_train(name: str) -> RuntimeError:
    """Returns the error for a training step of a model without trained parameters."""
    return RuntimeError(
        f"{name} has no parameter to train: all have requires_grad=False or are in utils.frozen_weights. eval_step "
        "still works"
    )
