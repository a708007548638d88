"""Collects the state of a trainer into the checkpoint of an export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..core.optimizer_keys import UPDATE_COUNT
from ..optim import lr_scheduler
from ..state.state import Array, State
from ..state.state_dict import random_to_numpy
from ..train.loop import TrainingLoop
from ..train.read_state import TrainerState
from ..train.state import trainer_options
from .optimizer_model import Updated

__all__ = ["running_state", "schedule_of"]


def running_state(
    loop: TrainingLoop,
    updates: Mapping[str, Updated],
    origins: Mapping[str, tuple[str, str | None]],
    gathered: TrainerState,
    divisor: float,
) -> State:
    """Returns the state of a trainer.

    Args:
        loop: The training loop, prepared.
        updates: The updates of the trained parameters.
        origins: Key of a state tensor of the optimizer model -> its parameter and slot; the slot of a count is None.
        gathered: State gathered from all processes, including the gradients of the current window.
        divisor: Divisor of these gradients.
    """
    executor, gradients, window = loop.executor, gathered.gradients, gathered.window
    assert executor is not None and gradients is not None and window is not None
    parameters = {name: _array(value) for name, value in executor.parameters.items()}
    buffers = {name: _array(value) for name, value in executor.buffers.items()}
    floats = {name: value for name, value in buffers.items() if np.issubdtype(value.dtype, np.floating)}
    optimizer = {}
    for key, (name, slot) in origins.items():
        done = updates[name].count
        optimizer[key] = np.array([(done or 0) + 1], np.int64) if slot is None else _array(updates[name].slots[slot])
    return State(
        parameters={**parameters, **floats},
        trainable=list(updates),
        buffers={name: value for name, value in buffers.items() if name not in floats},
        learning_rates=list(loop.config.learning_rates),
        schedule=schedule_of(loop),
        optimizer=optimizer,
        optimization_step=loop.info.optimization_step,
        gradients={name: _array(gradients[name] / divisor) for name in updates if name in gradients},
        micro_batches=window.micro_batches,
        random=_random_state(executor.generator),
        trainer=_trainer(loop, updates, gathered, window.state_dict()),
    )


def _trainer(
    loop: TrainingLoop, updates: Mapping[str, Updated], gathered: TrainerState, window: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Returns what the trainer requires to load the state again; None if it uses a PyTorch optimizer."""
    contents, executor = loop.contents, loop.executor
    assert executor is not None
    if contents.torch_config is not None:
        return None
    idle = {}
    for name, slots in contents.slots.items():
        counts = name in contents.counted and not contents.rule.shares_count
        done = counts and int(loop.optimizer.counts[name])
        # The models have no state for parameters that are no longer updated, so a state other than the initial is lost.
        if name not in updates and not done and not any(value.any() for value in gathered.slots.get(name, {}).values()):
            idle[name] = [*slots, *([UPDATE_COUNT] if counts else [])]
    return {
        "trainer_options": trainer_options(loop),
        "window": {key: window[key] for key in ("reduction", "assigned_size")},
        "transient_buffers": [name for name in contents.non_persistent if name in executor.buffers],
        "idle": {name: keys for name, keys in idle.items() if keys},
    }


def schedule_of(loop: TrainingLoop) -> dict[str, Any] | None:
    """Returns the schedule of the learning rates as plain values.

    Raises:
        ValueError: If it is arbitrary Python code.
    """
    scheduler = loop.rates.scheduler
    if scheduler is None:
        return None
    known = [kind for kind in vars(lr_scheduler).values() if isinstance(kind, type) and hasattr(kind, "schedule")]
    if type(scheduler) in known:
        return dict(scheduler.schedule)  # type: ignore[union-attr]
    name = getattr(scheduler, "__qualname__", type(scheduler).__qualname__)
    raise ValueError(
        f"the schedule {name} is Python code, which artifacts can't store: use a scheduler of ort_trainer.optim "
        "(LinearWarmupLRScheduler, ...), or leave out the option lr_scheduler and set the rate of each update with "
        "Optimizer.set_learning_rate() of ort_trainer.api"
    )


def _random_state(generator: torch.Generator) -> dict[str, Array]:
    """Returns the state of a CPU generator in NumPy's layout; empty for generators of other devices."""
    if generator.device.type != "cpu":
        return {}
    return {"state": random_to_numpy(generator.get_state().numpy())}


def _array(value: torch.Tensor) -> Array:
    return np.array(value.detach().cpu().numpy())
