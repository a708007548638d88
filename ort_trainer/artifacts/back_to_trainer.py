"""Converts the checkpoint of an export to the trainer's state, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..api.checkpoint_file import Array, Checkpoint
from ..core.optimizer_keys import SHARED, STEP, UPDATE_COUNT
from ..core.schedules import learning_rate
from .generator_state import to_torch

__all__ = ["state_dict_of"]


def state_dict_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns a checkpoint of an export in the layout of ``ORTTrainer.state_dict()``.

    Args:
        checkpoint: The checkpoint of an export, or one converted from onnxruntime-training.
    """
    values = {**checkpoint.parameters, **checkpoint.buffers}
    said = checkpoint.trainer or {}
    transient = {name: values.pop(name) for name in said.get("transient_buffers", ())}
    state: dict[str, Any] = {"model": {"full_precision": values}}
    if transient:
        state["transient_buffers"] = transient
    if said:
        state["trainer_options"] = said["trainer_options"]
    if checkpoint.optimizer is None:
        return state
    step = checkpoint.optimization_step
    state["optimizer"] = _optimizer(checkpoint.optimizer, checkpoint.parameters, said.get("idle", {}))
    if checkpoint.trainer is None:
        # The file does not record the size of a window, so the trainer starts a new one.
        return state | {
            "train_step_info": {"optimization_step": step, "step": step},
            "window": {"micro_batches": 0},
        }
    size = int(said["trainer_options"]["gradient_accumulation_steps"])
    state["train_step_info"] = {"optimization_step": step, "step": step * size + checkpoint.micro_batches}
    state |= _window(checkpoint, said["window"], size)
    if checkpoint.schedule is not None:
        asked = step if checkpoint.micro_batches else max(step - 1, 0)  # a micro-batch requests the next update's rate
        rates = [learning_rate(checkpoint.schedule, asked, base) for base in checkpoint.learning_rates]
        state["lr_scheduler"] = {"last_lr": rates[-1:] if len(set(rates)) == 1 else rates}  # a single rate is for all
    if "state" in checkpoint.random:
        state["random"] = to_torch(checkpoint.random["state"])
    return state


def _optimizer(
    given: Mapping[str, Array], parameters: Mapping[str, Array], idle: Mapping[str, list[str]]
) -> dict[str, dict[str, Array]]:
    """Returns the optimizer's state by parameter.

    Args:
        given: State tensors by the keys of the optimizer model.
        parameters: Name -> value.
        idle: Parameters that the models do not update -> slots that the trainer keeps for them, at initial values.
    """
    state: dict[str, dict[str, Array]] = {}
    shared = {slot: given[slot] for slot in (UPDATE_COUNT, STEP) if slot in given}
    for key, value in given.items():
        name, _, slot = key.rpartition(".")
        if slot == STEP:  # parameters have different counts, but the trainer keeps only one: the largest
            shared[STEP] = max(value, shared.get(STEP, value))
        elif name:
            state.setdefault(name, {})[slot] = value
    if UPDATE_COUNT in shared:
        state = {name: {**slots, **shared} for name, slots in state.items()}
    for name, slots in idle.items():
        first = {slot: np.zeros_like(parameters[name]) for slot in slots}
        state[name] = {**first, UPDATE_COUNT: np.ones(1, np.int64)} if UPDATE_COUNT in slots else first
    if STEP in shared:
        state[SHARED] = {STEP: shared[STEP]}
    return state


def _window(checkpoint: Checkpoint, window: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Returns the gradients of an incomplete window, and the position in it."""
    count = checkpoint.micro_batches
    # For a mean, the trainer divides the sum by the number of micro-batches. The checkpoint's gradients are already
    # divided by the size of the window, or are the plain sum if that is 1.
    means = window["reduction"] == "mean"
    factor = size if means else 1
    gradients = {name: value * value.dtype.type(factor) for name, value in checkpoint.gradients.items()}
    weight = min(count, 1) if means and size == 1 else count
    return {
        "window": {**window, "micro_batches": count, "weight": float(weight), "unit": 1.0, "scale": 1.0},
        "gradients": gradients,
    }
