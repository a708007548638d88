"""Converts states between a trainer and a device, which trains with the models of an export."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.errors import warn
from ..core.optimizer_keys import SHARED, STEP, UPDATE_COUNT
from ..core.schedules import learning_rate
from .state import Array, State, widened

_WORDS = 624
# PyTorch's layout: the seed, how many numbers are left, whether it is seeded, the position of the next number, the
# words of 64 bits each, and a cached normal number.
_TORCH = np.dtype(
    [("seed", "<u8"), ("left", "<i4"), ("seeded", "<i4"), ("next", "<u8"), ("words", "<u8", _WORDS), ("normal", "V40")]
)


def for_device(state: State, optimizer: dict[str, Array], trainable: Sequence[str]) -> State:
    """Returns a trainer's state for the models of an export.

    Args:
        state: The state, with the learning rates and their schedule.
        optimizer: The optimizer's state by the keys of the optimizer model.
        trainable: Names of the parameters that the models train.
    """
    assert state.window is not None and state.trainer_options is not None
    window, count, idle = state.window, state.micro_batches, {}
    divisor = window["scale"]
    if window["reduction"] == "mean":
        # Each micro-batch adds its share of the mean, so the sum over a full window is the mean.
        size = state.trainer_options["gradient_accumulation_steps"]
        divisor = divisor * (window["weight"] / window["unit"]) / max(1, count) * size
    for name, slots in state.by_parameter().items():
        # The models keep no state of parameters that they don't update, so any but the initial state is lost.
        if name and name not in trainable and all(_is_initial(slot, value) for slot, value in slots.items()):
            idle[name] = list(slots)
    random = None
    if state.random is not None and state.random.nbytes == _TORCH.itemsize:  # no other device has this generator
        random = random_to_numpy(state.random)
    device_state = State(
        parameters=state.parameters,
        trainable=list(trainable),
        buffers=state.buffers,
        optimizer=optimizer,
        optimization_step=state.optimization_step,
        gradients={
            name: state.gradients[name] / state.gradients[name].dtype.type(divisor)
            for name in trainable
            if name in state.gradients
        },
        micro_batches=count,
        random=random,
        learning_rates=state.learning_rates,
        schedule=state.schedule,
    )
    if "torch_optimizer" in state.objects:  # the trainer can't take the optimizer's state back
        return device_state
    values = {**state.parameters, **state.buffers}
    return dataclasses.replace(
        device_state,
        transient={name: name for name in state.transient if name in values},
        idle=idle,
        window={key: window[key] for key in ("reduction", "assigned_size")},
        trainer_options=state.trainer_options,
    )


def _is_initial(slot: str, value: Array) -> bool:
    """Returns whether a slot has the value that it has before the first update."""
    return int(value[0]) == 1 if slot == UPDATE_COUNT else not value.any()


def for_trainer(state: State) -> State:
    """Returns a device's state for a trainer; without the optimizer's, only the weights."""
    if state.optimizer is None:
        return dataclasses.replace(state, window=None, random=None)
    step, count = state.optimization_step or 0, state.micro_batches
    state = dataclasses.replace(state, optimizer=_optimizer(state), step=step)
    if state.trainer_options is None or state.window is None:
        # The file does not record the size of a window, so the trainer starts a new one.
        return dataclasses.replace(state, micro_batches=0, window={}, random=None)
    size, means = int(state.trainer_options["gradient_accumulation_steps"]), state.window["reduction"] == "mean"
    # For a mean, the trainer divides the sum by the number of micro-batches. The checkpoint's gradients are already
    # divided by the size of the window, or are the plain sum if that is 1.
    factor = size if means else 1
    weight = min(count, 1) if means and size == 1 else count
    objects = {}
    if state.schedule is not None:
        asked = step if count else max(step - 1, 0)  # a micro-batch requests the next update's rate
        rates = [learning_rate(state.schedule, asked, base) for base in state.learning_rates]
        objects["lr_scheduler"] = {"last_lr": rates[-1:] if len(set(rates)) == 1 else rates}  # a single rate is for all
    return dataclasses.replace(
        state,
        step=step * size + count,
        gradients={name: value * value.dtype.type(factor) for name, value in state.gradients.items()},
        window={**state.window, "weight": float(weight), "unit": 1.0, "scale": 1.0},
        random=None if state.random is None else random_to_torch(state.random),
        objects=objects,
    )


def _optimizer(state: State) -> dict[str, Array]:
    """Returns the optimizer's state as a trainer keeps it: each parameter has a count, or all share one."""
    optimizer: dict[str, Array] = {}
    counts: list[Array] = []
    by_parameter = state.by_parameter()
    shared = by_parameter.pop("", {})
    for name, slots in by_parameter.items():
        counts += [slots.pop(STEP)] if STEP in slots else []
        optimizer |= {f"{name}.{slot}": value for slot, value in slots.items()}
        if UPDATE_COUNT in shared:
            optimizer[f"{name}.{UPDATE_COUNT}"] = shared[UPDATE_COUNT]
    for name, kept in state.idle.items():
        for slot in kept:
            initial = np.ones(1, np.int64) if slot == UPDATE_COUNT else np.zeros_like(state.parameters[name])
            optimizer[f"{name}.{slot}"] = initial
    counts += [shared[STEP]] if STEP in shared else []
    if counts:  # parameters may have different counts, but the trainer keeps only one: the largest
        optimizer[STEP] = max(counts)
    return optimizer


def from_state_dict(
    state_dict: Mapping[str, Any], user_dict: Mapping[str, Any], like: State, include_optimizer: bool
) -> State:
    """Returns a trainer's state for the models of an export; warns of values that they can't use.

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
    """Returns the trainer's value of a name, which must have the shape and dtype of the export's."""
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
    counts = {int(slots[UPDATE_COUNT][0]): slots[UPDATE_COUNT] for slots in kept.values() if UPDATE_COUNT in slots}
    optimizer, missing = {}, []
    for key, expected in (like.optimizer or {}).items():
        name, _, slot = key.rpartition(".")
        value = kept.get(name or SHARED, {}).get(slot)
        if value is None and key == UPDATE_COUNT and len(counts) == 1:
            (value,) = counts.values()
        if value is None or value.shape != expected.shape:
            missing.append(key)
        else:
            optimizer[key] = widened(value)
    if missing or like.optimizer is None:
        what = f"it has no {missing[0]!r}" if missing else "the one given with --like has none"
        warn(f"the optimizer's state is left out, so training starts with a new one: {what}")
        return None
    return optimizer


def _random_of(state: Mapping[str, Any]) -> Array:
    """Returns the state of a trainer's generator in NumPy's layout."""
    import torch

    generator = torch.Generator()
    generator.set_state(torch.from_numpy(state["random"].copy()))  # raises if it is invalid
    return random_to_numpy(generator.get_state().numpy())


def random_to_numpy(state: Array) -> Array:
    """Returns the words and the position in NumPy's layout, uint32 [625], from the bytes of PyTorch's generator."""
    (generator,) = state.view(_TORCH)
    return np.array([*generator["words"], _WORDS if generator["left"] == 1 else generator["next"]], np.uint32)


def random_to_torch(state: Array) -> Array:
    """Returns the bytes for PyTorch's generator, from the words and the position."""
    words, position = state[:-1], int(state[-1])
    generator = np.zeros(1, _TORCH)
    generator["left"], generator["seeded"] = _WORDS + 1 - position, 1
    generator["next"], generator["words"] = position, words
    return generator.view(np.uint8)
