"""What training keeps, as plain values: each file format is read into a :class:`State`, and written from one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Array", "State", "Value"]

Array = np.ndarray[Any, Any]
Value = int | float | str
"""The types of a property."""


@dataclass
class State:
    """All state of a training run; a format that lacks an entry leaves its default.

    Attributes:
        parameters: Name -> value: parameters, trained or not, and floating-point buffers (running statistics).
        trainable: Names of the trained parameters, in the order of the parameters.
        buffers: Name -> value of all other buffers.
        optimizer: ``<parameter>.<slot>`` -> value, or ``<slot>`` for one that all parameters share; None for a state
            without the optimizer's, from which the optimizer starts fresh. Update counts are those done plus 1.
        optimization_step: Number of updates done.
        learning_rates: The base rates: one for each parameter group, then one for all other parameters.
        schedule: For :func:`ort_trainer.core.schedules.learning_rate`; None for constant rates.
        gradients: Name -> the sum of the gradients since the last reset; empty right after a reset.
        micro_batches: Number of training steps accumulated in the gradients.
        random: ``state``: the 624 words of the Mersenne Twister and the position in them, uint32 [625]. PyTorch's and
            NumPy's generators draw the same numbers from it. Empty for a new generator.
        properties: The user's own values.
        export: Identifies the export whose models use it; the same in all its artifacts. Empty if none do.
        nominal: Whether the parameters have shapes and dtypes, but no values yet; they are zeros then.
        trainer: What an ``ORTTrainer`` requires in its own state; None if unknown.
    """

    parameters: dict[str, Array]
    trainable: list[str]
    buffers: dict[str, Array] = field(default_factory=dict)
    optimizer: dict[str, Array] | None = None
    optimization_step: int = 0
    learning_rates: list[float] = field(default_factory=lambda: [1e-3])
    schedule: dict[str, Any] | None = None
    gradients: dict[str, Array] = field(default_factory=dict)
    micro_batches: int = 0
    random: dict[str, Array] = field(default_factory=dict)
    properties: dict[str, Value] = field(default_factory=dict)
    export: str = ""
    nominal: bool = False
    trainer: dict[str, Any] | None = None

    def without_optimizer(self) -> State:
        """Returns a copy that restarts training from the same weights."""
        return dataclasses.replace(self, optimizer=None, optimization_step=0, gradients={}, micro_batches=0)
