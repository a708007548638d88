"""Converts between checkpoints of onnxruntime-training's training API and of ``ort_trainer.api``."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np

from ..core.errors import CheckpointError
from ..core.optimizer_keys import UPDATE_COUNT
from ..state.state import Array, State
from .checkpoint import UNLOADABLE, OptimizerGroup, UpstreamCheckpoint, UpstreamParameter

GROUP = "group0"
"""The only parameter group of upstream's optimizers."""

# Upstream's names of Adam's moments -> ours. SGD stores momentum0 too, but does not use it.
_MOMENTS = {"momentum0": "Moment_1", "momentum1": "Moment_2"}


def to_upstream(checkpoint: State, trained: Collection[str] | None = None) -> tuple[UpstreamCheckpoint, list[str]]:
    """Converts a checkpoint to onnxruntime-training's.

    Args:
        checkpoint: Our checkpoint.
        trained: Names of the parameters that have gradients; None for all trainable ones. The runtime expects moments
            for exactly the parameters that it trains.

    Returns:
        Upstream's checkpoint, and a description of everything that it can't store, for a warning.

    Raises:
        ValueError: If onnxruntime-training lacks the optimizer.
    """
    trained_names = checkpoint.trainable if trained is None else trained
    upstream = UpstreamCheckpoint(nominal=checkpoint.nominal, properties=dict(checkpoint.properties))
    left_out = []
    for name, value in {**checkpoint.parameters, **checkpoint.buffers}.items():
        if value.dtype == UNLOADABLE:
            left_out.append(f"{name!r} of dtype {value.dtype}")
        else:
            upstream.parameters[name] = UpstreamParameter(value, name in trained_names)
    if checkpoint.optimizer is not None and not checkpoint.nominal:
        upstream.groups[GROUP] = _group(checkpoint, [name for name in checkpoint.parameters if name in trained_names])
        if len(set(checkpoint.learning_rates)) > 1:
            left_out.append(f"learning rates of groups {checkpoint.learning_rates[:-1]}")
    others = {
        "the learning-rate schedule": checkpoint.schedule is not None,
        "gradients since the last reset": bool(checkpoint.gradients),
        "the state of the random numbers": checkpoint.random is not None,
    }
    return upstream, [*left_out, *(what for what, is_there in others.items() if is_there)]


def _group(checkpoint: State, trained_names: Collection[str]) -> OptimizerGroup:
    """Returns the optimizer's state of some parameters as upstream's group.

    Raises:
        ValueError: If it is neither Adam's nor SGD's, or the parameters have different update counts.
    """
    state = dict(checkpoint.optimizer or {})
    group = OptimizerGroup(checkpoint.optimization_step or 0, checkpoint.learning_rates[-1])
    counts = {int(state.pop(key)[0]) for key in [*state] if _slot(key) == UPDATE_COUNT}
    if len(counts) > 1:
        raise ValueError(
            f"the parameters have different update counts ({sorted(counts)}, plus 1), but onnxruntime-training keeps "
            "one count for all: convert a checkpoint without optimizer state"
        )
    if counts:
        group.step = counts.pop() - 1  # our count is that of the next update
    adam = any(key.endswith(".Moment_2") for key in state)
    for name in trained_names:
        zeros = np.zeros_like(checkpoint.parameters[name])
        group.moments[name] = (
            {theirs: state.pop(f"{name}.{ours}", zeros) for theirs, ours in _MOMENTS.items()}
            if adam
            else {"momentum0": zeros}
        )
    # What is left belongs to parameters that never have a gradient, or to another optimizer.
    others = [key for key in state if not (adam and _slot(key) in _MOMENTS.values())]
    if others:
        raise ValueError(
            f"the optimizer's state has {others[0]!r}, but onnxruntime-training supports only Adam and SGD without "
            "momentum: convert a checkpoint without optimizer state"
        )
    return group


def _slot(key: str) -> str:
    """Returns the last part of the key of an optimizer tensor, such as ``Moment_1``."""
    return key.rpartition(".")[2]


def from_upstream(checkpoint: UpstreamCheckpoint, like: State | None = None) -> State:
    """Converts a checkpoint of onnxruntime-training to ours.

    Args:
        checkpoint: Upstream's checkpoint.
        like: The checkpoint of the export whose models will use the result; None if it is not for any models.

    Raises:
        CheckpointError: If its moments don't match its parameters.
        ValueError: If it does not fit ``like``.
    """
    parameters = {name: parameter.data for name, parameter in checkpoint.parameters.items()}
    trainable = [name for name, parameter in checkpoint.parameters.items() if parameter.requires_grad]
    buffers = {name: value for name, value in parameters.items() if value.dtype.kind in "biu"}
    state = State(
        parameters={name: value for name, value in parameters.items() if name not in buffers},
        trainable=trainable,
        buffers=buffers,
        properties=dict(checkpoint.properties),
        nominal=checkpoint.nominal,
    )
    _check_moments(checkpoint)
    group = checkpoint.groups.get(GROUP)
    if group is not None:
        state.optimization_step, state.learning_rates = group.step, [group.initial_lr]
        state.optimizer = _optimizer(group)
    return state if like is None else _fitted(state, like)


def _check_moments(checkpoint: UpstreamCheckpoint) -> None:
    """Raises a CheckpointError if the state fits no optimizer of onnxruntime-training."""
    what = "the checkpoint of onnxruntime-training"
    others = sorted(checkpoint.groups.keys() - {GROUP})
    if others:
        raise CheckpointError(
            f"{what} has the unknown optimizer groups {others}; only {GROUP!r} is supported: convert it without "
            "optimizer state"
        )
    moments = checkpoint.groups[GROUP].moments if checkpoint.groups else {}
    kinds = {tuple(sorted(tensors)) for tensors in moments.values()}
    if kinds - {tuple(_MOMENTS)} and kinds != {tuple(_MOMENTS)[:1]}:
        raise CheckpointError(
            f"{what} has the moments {sorted(kinds)}, but expected are {list(_MOMENTS)} for Adam or "
            f"{list(_MOMENTS)[:1]} for SGD: convert it without optimizer state"
        )
    for name, tensors in moments.items():
        parameter = checkpoint.parameters.get(name)
        if parameter is None or any(value.shape != parameter.data.shape for value in tensors.values()):
            raise CheckpointError(
                f"{what} has moments of {name!r}, but no parameter of that name and shape: convert it without "
                "optimizer state"
            )


def _optimizer(group: OptimizerGroup) -> dict[str, Array]:
    """Returns the optimizer's state with our keys; empty for SGD, whose moments are unused."""
    state: dict[str, Array] = {}
    for name, moments in group.moments.items():
        if set(moments) == set(_MOMENTS):
            state |= {f"{name}.{_MOMENTS[theirs]}": value for theirs, value in moments.items()}
    return {**state, UPDATE_COUNT: np.array([group.step + 1], np.int64)} if state else state


def _fitted(loaded: State, like: State) -> State:
    """Returns a loaded checkpoint in the order of ``like``, completed with what only ``like`` has.

    Upstream's format stores no export, schedule or options, and no tensors of type float16.
    """
    like_tensors = {**like.parameters, **like.buffers}
    unloadable = {name: value for name, value in like_tensors.items() if value.dtype == UNLOADABLE}
    values = {**unloadable, **loaded.parameters, **loaded.buffers}
    _check_like("parameters and buffers", values, like_tensors, loaded.nominal)
    optimizer = None if like.optimizer is None else loaded.optimizer
    if optimizer is not None and like.optimizer is not None:
        # Upstream has one update count. Ours has one per parameter, or a shared one if all counts are equal.
        count = optimizer.pop(UPDATE_COUNT, None)
        optimizer |= {key: count for key in like.optimizer if _slot(key) == UPDATE_COUNT and count is not None}
        _check_like("optimizer state", optimizer, like.optimizer)
        optimizer = {key: optimizer[key] for key in like.optimizer}
    return dataclasses.replace(
        loaded,
        export=like.export,
        parameters={name: like.parameters[name] if loaded.nominal else values[name] for name in like.parameters},
        trainable=list(like.trainable),
        buffers={name: values[name] for name in like.buffers},
        learning_rates=like.learning_rates,
        schedule=like.schedule,
        optimizer=optimizer,
        transient=like.transient,
        idle=like.idle,
        window=like.window,
        trainer_options=like.trainer_options,
    )


def _check_like(what: str, tensors: Mapping[str, Array], like: Mapping[str, Array], names_only: bool = False) -> None:
    missing, unknown = like.keys() - tensors.keys(), tensors.keys() - like.keys()
    if missing or unknown:
        raise ValueError(
            f"the checkpoint of onnxruntime-training does not fit the one given as 'like': among its {what}, "
            f"{sorted(missing)} are missing and {sorted(unknown)} are unknown"
        )
    for name, value in like.items():
        if not names_only and (tensors[name].shape, tensors[name].dtype) != (value.shape, value.dtype):
            raise ValueError(
                f"{name!r} has shape {list(tensors[name].shape)} and dtype {tensors[name].dtype} in the checkpoint of "
                f"onnxruntime-training, but {list(value.shape)} and {value.dtype} in the one given as 'like'"
            )
