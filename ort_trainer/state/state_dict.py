"""The layout of ``ORTTrainer.state_dict()``, which the trainer's own checkpoints hold: nested dicts of plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.errors import warn
from ..core.optimizer_keys import SHARED, STEP, UPDATE_COUNT
from ..core.schedules import learning_rate
from .state import Array, State

__all__ = ["from_state_dict", "random_to_numpy", "random_to_torch", "to_state_dict"]

_WORDS = 624
# PyTorch's layout: the seed, how many numbers are left, whether it is seeded, the position of the next number, the
# words of 64 bits each, and a cached normal number.
_TORCH = np.dtype(
    [("seed", "<u8"), ("left", "<i4"), ("seeded", "<i4"), ("next", "<u8"), ("words", "<u8", _WORDS), ("normal", "V40")]
)


def to_state_dict(found: State) -> dict[str, Any]:
    """Returns a state in the layout of ``ORTTrainer.state_dict()``.

    Args:
        found: The state.
    """
    values = {**found.parameters, **found.buffers}
    said = found.trainer or {}
    transient = {name: values.pop(name) for name in said.get("transient_buffers", ())}
    state: dict[str, Any] = {"model": {"full_precision": values}}
    if transient:
        state["transient_buffers"] = transient
    if said:
        state["trainer_options"] = said["trainer_options"]
    if found.optimizer is None:
        return state
    step = found.optimization_step
    state["optimizer"] = _optimizer(found.optimizer, found.parameters, said.get("idle", {}))
    if found.trainer is None:
        # The file does not record the size of a window, so the trainer starts a new one.
        return state | {
            "train_step_info": {"optimization_step": step, "step": step},
            "window": {"micro_batches": 0},
        }
    size = int(said["trainer_options"]["gradient_accumulation_steps"])
    state["train_step_info"] = {"optimization_step": step, "step": step * size + found.micro_batches}
    state |= _window(found, said["window"], size)
    if found.schedule is not None:
        asked = step if found.micro_batches else max(step - 1, 0)  # a micro-batch requests the next update's rate
        rates = [learning_rate(found.schedule, asked, base) for base in found.learning_rates]
        state["lr_scheduler"] = {"last_lr": rates[-1:] if len(set(rates)) == 1 else rates}  # a single rate is for all
    if "state" in found.random:
        state["random"] = random_to_torch(found.random["state"])
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


def _window(found: State, window: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Returns the gradients of an incomplete window, and the position in it."""
    count = found.micro_batches
    # For a mean, the trainer divides the sum by the number of micro-batches. The checkpoint's gradients are already
    # divided by the size of the window, or are the plain sum if that is 1.
    means = window["reduction"] == "mean"
    factor = size if means else 1
    gradients = {name: value * value.dtype.type(factor) for name, value in found.gradients.items()}
    weight = min(count, 1) if means and size == 1 else count
    return {
        "window": {**window, "micro_batches": count, "weight": float(weight), "unit": 1.0, "scale": 1.0},
        "gradients": gradients,
    }


def from_state_dict(
    state_dict: Mapping[str, Any], user_dict: Mapping[str, Any], like: State, include_optimizer: bool
) -> State:
    """Returns a trainer's state for the models of an export, and warns of what they can't use.

    Args:
        state_dict: The trainer's state.
        user_dict: The user's own values.
        like: A state of the export, which supplies what the trainer's state lacks.
        include_optimizer: Whether to include the optimizer's state.

    Raises:
        ValueError: If a value of the export is missing, or has another shape or dtype.
    """
    weights = state_dict.get("model", {}).get("full_precision", {}) | state_dict.get("transient_buffers", {})
    optimizer = _optimizer_of(state_dict, like) if include_optimizer and "optimizer" in state_dict else None
    if state_dict.get("gradients"):
        warn("gradients of an incomplete accumulation window are left out: the window starts over")
    properties = {name: value for name, value in user_dict.items() if _is_property(value)}
    if len(properties) < len(user_dict):
        warn(f"user values that are neither numbers nor strings are left out: {[*user_dict.keys() - properties]}")
    return dataclasses.replace(
        like.without_optimizer(),
        parameters={name: _fitting(name, weights, value) for name, value in like.parameters.items()},
        buffers={name: _fitting(name, weights, value) for name, value in like.buffers.items()},
        optimizer=optimizer,
        optimization_step=(
            0 if optimizer is None else state_dict.get("train_step_info", {}).get("optimization_step", 0)
        ),
        random=_random_of(state_dict) if "random" in state_dict else like.random,
        properties=properties,
        nominal=False,
    )


def _is_property(value: Any) -> bool:
    return isinstance(value, (int, float, str)) and not isinstance(value, bool)


def _fitting(name: str, weights: Mapping[str, Any], like: Array) -> Array:
    if name not in weights:
        raise ValueError(f"{name!r} is missing, but the checkpoint given with --like has it")
    value = np.asarray(weights[name])
    if value.shape != like.shape or value.dtype != like.dtype:
        raise ValueError(
            f"{name!r} has shape {list(value.shape)} and dtype {value.dtype}, but {list(like.shape)} and {like.dtype} "
            "in the checkpoint given with --like"
        )
    return value


def _optimizer_of(state: Mapping[str, Any], like: State) -> dict[str, Array] | None:
    """Returns the optimizer's state by the keys of an export; None, with a warning, if the optimizer differs."""
    kept: Mapping[str, Any] = state["optimizer"]
    counts = {int(own[UPDATE_COUNT][0]): own[UPDATE_COUNT] for own in kept.values() if UPDATE_COUNT in own}
    found, missing = {}, []
    for key, expected in (like.optimizer or {}).items():
        name, _, slot = key.rpartition(".")
        value = kept.get(name or SHARED, {}).get(slot)
        if value is None and key == UPDATE_COUNT and len(counts) == 1:
            (value,) = counts.values()
        if value is None or value.shape != expected.shape:
            missing.append(key)
        else:
            found[key] = value
    if missing or like.optimizer is None:
        what = f"it has no {missing[0]!r}" if missing else "the one given with --like has none"
        warn(f"the optimizer's state is left out, so training starts with a new one: {what}")
        return None
    return found


def _random_of(state: Mapping[str, Any]) -> dict[str, Array]:
    import torch

    generator = torch.Generator()
    generator.set_state(torch.from_numpy(state["random"].copy()))  # raises if it is invalid
    return {"state": random_to_numpy(generator.get_state().numpy())}


def random_to_numpy(state: Array) -> Array:
    """Returns the words and the position in NumPy's layout, uint32 [625], from the bytes of PyTorch's generator."""
    (found,) = state.view(_TORCH)
    return np.array([*found["words"], _WORDS if found["left"] == 1 else found["next"]], np.uint32)


def random_to_torch(state: Array) -> Array:
    """Returns the bytes for PyTorch's generator, from the words and the position."""
    words, position = state[:-1], int(state[-1])
    found = np.zeros(1, _TORCH)
    found["left"], found["seeded"], found["next"], found["words"] = _WORDS + 1 - position, 1, position, words
    return found.view(np.uint8)
