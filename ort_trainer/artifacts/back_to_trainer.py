"""A checkpoint of an export as the state of the trainer; it needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..api.checkpoint_file import Array, Checkpoint
from ..schedules import learning_rate

__all__ = ["state_dict_of"]

_COUNT, _STEP, _SHARED = "Update_Count", "Step", "shared_optimizer_state"
# PyTorch's Mersenne Twister as bytes: seed, how many numbers are left, whether it is seeded, the next one's position,
# and the words, 64 bits each; behind them a normal number that it has kept.
_GENERATOR = np.dtype([("seed", "<u8"), ("left", "<i4"), ("seeded", "<i4"), ("next", "<u8"), ("words", "<u8", 624)])
_BYTES = 5056


def state_dict_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns a checkpoint of an export in the layout of ``ORTTrainer.state_dict()``.

    Args:
        checkpoint: Of an export, or of onnxruntime-training.
    """
    values = {**checkpoint.parameters, **checkpoint.buffers}
    said = checkpoint.trainer or {}
    transient = {name: values.pop(name) for name in said.get("transient_buffers", ())}
    state: dict[str, Any] = {"model": {"full_precision": values}}
    if checkpoint.optimizer is None:
        return state | ({"transient_buffers": transient} if transient else {})
    step = checkpoint.optimization_step
    state["optimizer"] = _optimizer(checkpoint.optimizer, checkpoint.parameters, said.get("idle", {}))
    if checkpoint.trainer is None:
        # Whatever the size of a window is: the file does not say what its gradients are of.
        return state | {
            "train_step_info": {"optimization_step": step, "step": step},
            "window": {"micro_batches": 0},
        }
    size = int(said["trainer_options"]["gradient_accumulation_steps"])
    state["trainer_options"] = said["trainer_options"]
    state["train_step_info"] = {"optimization_step": step, "step": step * size + checkpoint.micro_batches}
    state |= _window(checkpoint, said["window"], size)
    if transient:
        state["transient_buffers"] = transient
    if checkpoint.schedule is not None:
        asked = step if checkpoint.micro_batches else max(step - 1, 0)  # each micro-batch asks for the coming rate
        rates = [learning_rate(checkpoint.schedule, asked, base) for base in checkpoint.learning_rates]
        state["lr_scheduler"] = {"last_lr": rates[-1:] if len(set(rates)) == 1 else rates}  # one stands for all
    if "state" in checkpoint.random:
        state["random"] = _generator(checkpoint.random["state"])
    return state


def _optimizer(
    given: Mapping[str, Array], parameters: Mapping[str, Array], idle: Mapping[str, list[str]]
) -> dict[str, dict[str, Array]]:
    """Returns what the optimizer keeps, by parameter.

    Args:
        given: By the keys of the optimizer model.
        parameters: Name -> value.
        idle: Parameters that the models do not update -> what the trainer keeps of them, which is as at the beginning.
    """
    state: dict[str, dict[str, Array]] = {}
    shared = {slot: given[slot] for slot in (_COUNT, _STEP) if slot in given}
    for key, value in given.items():
        name, _, slot = key.rpartition(".")
        if slot == _STEP:  # of a parameter that was updated less often than others, of which the trainer counts one
            shared[_STEP] = max(value, shared.get(_STEP, value))
        elif name:
            state.setdefault(name, {})[slot] = value
    if _COUNT in shared:
        state = {name: {**slots, **shared} for name, slots in state.items()}
    for name, slots in idle.items():
        first = {slot: np.zeros_like(parameters[name]) for slot in slots}
        state[name] = {**first, _COUNT: np.ones(1, np.int64)} if _COUNT in slots else first
    if _STEP in shared:
        state[_SHARED] = {_STEP: shared[_STEP]}
    return state


def _window(checkpoint: Checkpoint, window: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Returns the gradients of a window that is under way, and where in it they were taken."""
    count = checkpoint.micro_batches
    # For a mean the trainer divides by the number; here each is divided by the size, and with a size of 1 added up.
    means = window["reduction"] == "mean"
    factor = size if means else 1
    gradients = {name: value * value.dtype.type(factor) for name, value in checkpoint.gradients.items()}
    weight = min(count, 1) if means and size == 1 else count
    return {
        "window": {**window, "micro_batches": count, "weight": float(weight), "unit": 1.0, "scale": 1.0},
        "gradients": gradients,
    }


def _generator(state: Array) -> Array:
    """Returns the state of NumPy's Mersenne Twister as PyTorch has it."""
    words, position = state[:-1], int(state[-1])
    found = np.zeros(_BYTES, np.uint8)
    head = found[: _GENERATOR.itemsize].view(_GENERATOR)
    head["left"], head["seeded"], head["next"], head["words"] = len(words) + 1 - position, 1, position, words
    return found
