"""What training keeps, as plain values: each file format is read into a :class:`State`, and written from one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]
Value = int | float | str
"""The types of a property."""


def widened(array: Array, copy: bool = False) -> Array:
    """Returns an array in a dtype of NumPy, float32 instead of bfloat16; copies it only for that, or with ``copy``."""
    dtype = np.dtype(np.float32) if array.dtype.name == "bfloat16" else array.dtype
    return array.astype(dtype, order="C" if copy else "K", copy=copy)


class HasState(Protocol):
    """An object whose state is part of checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state."""
        ...


@dataclass
class State:
    """All state of a training run; an entry that is unknown, or that a format lacks, has its default.

    A device trains with the models of an export. Its state differs from a trainer's where both are mentioned below;
    :mod:`ort_trainer.state.devices` converts between them.

    Attributes:
        parameters: Name -> value: parameters, trained or not, and floating-point buffers (running statistics).
        trainable: Names of the trained parameters, in the order of the parameters.
        buffers: Name -> value of all other buffers.
        names: Name in ``model.state_dict()`` -> name above, as a tied tensor has several; None if each has one.
        transient: The same for buffers that ``model.state_dict()`` leaves out.
        optimizer: ``<parameter>.<slot>`` -> value, or ``<slot>`` for one that all parameters share; None for a state
            without the optimizer's, from which the optimizer starts fresh. Update counts are those done plus 1.
        idle: On a device: parameters that its models don't update -> the slots that a trainer keeps for them, which
            have their initial values and are not in ``optimizer``.
        outside: A trainer's: what its model keeps outside tensors from step to step, such as a hidden state in a tuple:
            path -> ``value``, JSON values; ``tensors``, the arrays in it; and ``dtypes``, their names in PyTorch.
        step: Number of training steps of a trainer.
        optimization_step: Number of updates done.
        gradients: Name -> the sum of the gradients since the last reset; empty right after a reset. A trainer's are
            still to be divided as the window says; on a device, each micro-batch has added its share of the mean.
        micro_batches: Number of training steps accumulated in the gradients.
        window: What else ``AccumulationWindow.state_dict()`` has: on a device, ``reduction`` and ``assigned_size``.
        random: A trainer's: the bytes of PyTorch's generator. A device's: the 624 words of the Mersenne Twister and
            the position in them, uint32 [625]; PyTorch's and NumPy's generators draw the same numbers from it.
        random_states: A trainer's: the generators of all processes, by rank, if there are several.
        learning_rates: A device's base rates: one for each parameter group, then one for all other parameters.
        schedule: A device's, for :func:`ort_trainer.core.schedules.learning_rate`; None for constant rates.
        objects: ``loss_scaler``, ``lr_scheduler`` or ``torch_optimizer`` -> ``state_dict()`` of the trainer's.
        trainer_options: Describes the trainer that the state belongs to, or was converted from.
        frozen: Names of the parameters that a trainer's state dict leaves out, as they are not trained.
        frozen_digest: A digest of them; empty if none is left out.
        properties: The user's own values.
        export: Identifies the export whose models use it; the same in all its artifacts. Empty if none do.
        nominal: Whether the parameters have shapes and dtypes, but no values yet; they are zeros then.
    """

    parameters: dict[str, Array] = field(default_factory=dict)
    trainable: list[str] = field(default_factory=list)
    buffers: dict[str, Array] = field(default_factory=dict)
    names: Mapping[str, str] | None = None
    transient: Mapping[str, str] = field(default_factory=dict)
    optimizer: dict[str, Array] | None = None
    idle: dict[str, list[str]] = field(default_factory=dict)
    outside: dict[str, dict[str, Any]] = field(default_factory=dict)
    step: int | None = None
    optimization_step: int | None = 0
    gradients: dict[str, Array] = field(default_factory=dict)
    micro_batches: int = 0
    window: dict[str, Any] | None = None
    random: Array | None = None
    random_states: Sequence[Array] = ()
    learning_rates: list[float] = field(default_factory=lambda: [1e-3])
    schedule: dict[str, Any] | None = None
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    trainer_options: dict[str, Any] | None = None
    frozen: Collection[str] = ()
    frozen_digest: str = ""
    properties: dict[str, Value] = field(default_factory=dict)
    export: str = ""
    nominal: bool = False

    def without_optimizer(self) -> State:
        """Returns a copy that restarts training from the same weights."""
        return dataclasses.replace(self, optimizer=None, optimization_step=0, gradients={}, micro_batches=0)

    def by_parameter(self) -> dict[str, dict[str, Array]]:
        """Returns the optimizer's state: parameter -> slot -> value; the parameter '' has what all share."""
        slots_by_parameter: dict[str, dict[str, Array]] = {}
        for key, value in (self.optimizer or {}).items():
            name, _, slot = key.rpartition(".")
            slots_by_parameter.setdefault(name, {})[slot] = value
        return slots_by_parameter
