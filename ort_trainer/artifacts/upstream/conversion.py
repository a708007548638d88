"""Checkpoints of onnxruntime-training's training API as ours, and ours as theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np

from ...api.checkpoint_file import Checkpoint
from ...errors import CheckpointError
from ...optimizer_keys import UPDATE_COUNT
from .checkpoint import UNLOADABLE, Array, OptimizerGroup, UpstreamCheckpoint, UpstreamParameter

__all__ = ["from_upstream", "to_upstream"]

GROUP = "group0"
"""The one group that upstream's optimizers know."""

# Their names of Adam's moments, and ours. With momentum0 alone it is SGD, which uses none of it.
_MOMENTS = {"momentum0": "Moment_1", "momentum1": "Moment_2"}


def to_upstream(checkpoint: Checkpoint, trained: Collection[str] | None = None) -> tuple[UpstreamCheckpoint, list[str]]:
    """Returns a checkpoint as onnxruntime-training has it.

    Args:
        checkpoint: Ours.
        trained: Names of the parameters that have gradients, where these are fewer than the trainable ones: the runtime
            wants moments of every parameter that it trains.

    Returns:
        Theirs, and what it can't hold, in words, for a warning.

    Raises:
        ValueError: If it is the state of an optimizer that onnxruntime-training does not have.
    """
    wanted = checkpoint.trainable if trained is None else trained
    found = UpstreamCheckpoint(nominal=checkpoint.nominal, properties=dict(checkpoint.properties))
    left_out = []
    for name, value in {**checkpoint.parameters, **checkpoint.buffers}.items():
        if value.dtype == UNLOADABLE:
            left_out.append(f"{name!r} of dtype {value.dtype}")
        else:
            found.parameters[name] = UpstreamParameter(value, name in wanted)
    if checkpoint.optimizer is not None and not checkpoint.nominal:
        found.groups[GROUP] = _group(checkpoint, [name for name in checkpoint.parameters if name in wanted])
        if len(set(checkpoint.learning_rates)) > 1:
            left_out.append(f"learning rates of groups {checkpoint.learning_rates[:-1]}")
    others = {
        "the learning-rate schedule": checkpoint.schedule,
        "gradients since the last reset": checkpoint.gradients,
        "the state of the random numbers": checkpoint.random,
    }
    return found, [*left_out, *(what for what, value in others.items() if value)]


def _group(checkpoint: Checkpoint, wanted: Collection[str]) -> OptimizerGroup:
    given = dict(checkpoint.optimizer or {})
    group = OptimizerGroup(checkpoint.optimization_step, checkpoint.learning_rates[-1])
    counts = {int(given.pop(key)[0]) for key in [*given] if _slot(key) == UPDATE_COUNT}
    if len(counts) > 1:
        raise ValueError(
            f"the parameters were updated different numbers of times ({sorted(counts)}, plus 1), and "
            "onnxruntime-training counts updates once for all: convert a checkpoint without optimizer state"
        )
    if counts:
        group.step = counts.pop() - 1
    adam = any(key.endswith(".Moment_2") for key in given)
    for name in wanted:
        zeros = np.zeros_like(checkpoint.parameters[name])
        group.moments[name] = (
            {theirs: given.pop(f"{name}.{ours}", zeros) for theirs, ours in _MOMENTS.items()}
            if adam
            else {"momentum0": zeros}
        )
    # What is left belongs to parameters that never have a gradient, or to another optimizer.
    strange = [key for key in given if not (adam and _slot(key) in _MOMENTS.values())]
    if strange:
        raise ValueError(
            f"the optimizer keeps {strange[0]!r}, which no optimizer of onnxruntime-training does, it has Adam and SGD "
            "without momentum: convert a checkpoint without optimizer state"
        )
    return group


def _slot(key: str) -> str:
    return key.rpartition(".")[2]


def from_upstream(checkpoint: UpstreamCheckpoint, like: Checkpoint | None = None) -> Checkpoint:
    """Returns a checkpoint of onnxruntime-training as ours.

    Args:
        checkpoint: Theirs.
        like: The checkpoint of the export with whose models it is to be used; None if it is for no models.

    Raises:
        CheckpointError: If its moments are not those of its parameters.
        ValueError: If it does not fit ``like``.
    """
    parameters = {name: parameter.data for name, parameter in checkpoint.parameters.items()}
    trainable = [name for name, parameter in checkpoint.parameters.items() if parameter.requires_grad]
    buffers = {name: value for name, value in parameters.items() if value.dtype.kind in "biu"}
    found = Checkpoint(
        export="",
        parameters={name: value for name, value in parameters.items() if name not in buffers},
        trainable=trainable,
        buffers=buffers,
        properties=dict(checkpoint.properties),
        nominal=checkpoint.nominal,
    )
    _check_moments(checkpoint)
    group = checkpoint.groups.get(GROUP)
    if group is not None:
        found.optimization_step, found.learning_rates = group.step, [group.initial_lr]
        found.optimizer = _optimizer(group)
    return found if like is None else _fitted(found, like)


def _check_moments(checkpoint: UpstreamCheckpoint) -> None:
    """Raises the error for an optimizer's state that no optimizer of onnxruntime-training keeps."""
    what = "the checkpoint of onnxruntime-training"
    others = sorted(checkpoint.groups.keys() - {GROUP})
    if others:
        raise CheckpointError(
            f"{what} has the groups {others} of an optimizer, and {GROUP!r} is the only one that is known: convert it "
            "without optimizer state"
        )
    moments = checkpoint.groups[GROUP].moments if checkpoint.groups else {}
    kinds = {tuple(sorted(own)) for own in moments.values()}
    if kinds - {tuple(_MOMENTS)} and kinds != {tuple(_MOMENTS)[:1]}:
        raise CheckpointError(
            f"{what} has the moments {sorted(kinds)}, and each parameter has {list(_MOMENTS)} with Adam and "
            f"{list(_MOMENTS)[:1]} with SGD: convert it without optimizer state"
        )
    for name, own in moments.items():
        parameter = checkpoint.parameters.get(name)
        if parameter is None or any(value.shape != parameter.data.shape for value in own.values()):
            raise CheckpointError(
                f"{what} has moments of {name!r}, which is none of its parameters, or has another shape: convert it "
                "without optimizer state"
            )


def _optimizer(group: OptimizerGroup) -> dict[str, Array]:
    state: dict[str, Array] = {}
    for name, moments in group.moments.items():
        if set(moments) == set(_MOMENTS):
            state |= {f"{name}.{_MOMENTS[theirs]}": value for theirs, value in moments.items()}
    return {**state, UPDATE_COUNT: np.array([group.step + 1], np.int64)} if state else state


def _fitted(found: Checkpoint, like: Checkpoint) -> Checkpoint:
    """Returns a checkpoint in the order of another one, with its export and what upstream has no place for."""
    wanted = {**like.parameters, **like.buffers}
    unloadable = {name: value for name, value in wanted.items() if value.dtype == UNLOADABLE}
    values = {**unloadable, **found.parameters, **found.buffers}
    _check_like("parameters and buffers", values, wanted, found.nominal)
    optimizer = None if like.optimizer is None else found.optimizer
    if optimizer is not None and like.optimizer is not None:
        # Parameters share a count here where they have had as many updates.
        count = optimizer.pop(UPDATE_COUNT, None)
        optimizer |= {key: count for key in like.optimizer if _slot(key) == UPDATE_COUNT and count is not None}
        _check_like("optimizer state", optimizer, like.optimizer)
        optimizer = {key: optimizer[key] for key in like.optimizer}
    return dataclasses.replace(
        found,
        export=like.export,
        parameters={name: like.parameters[name] if found.nominal else values[name] for name in like.parameters},
        trainable=list(like.trainable),
        buffers={name: values[name] for name in like.buffers},
        learning_rates=like.learning_rates,
        schedule=like.schedule,
        optimizer=optimizer,
        trainer=like.trainer,
    )


def _check_like(what: str, found: Mapping[str, Array], like: Mapping[str, Array], names_only: bool = False) -> None:
    missing, strange = like.keys() - found.keys(), found.keys() - like.keys()
    if missing or strange:
        raise ValueError(
            f"the checkpoint of onnxruntime-training does not fit the one given as 'like': of its {what} "
            f"{sorted(missing)} are missing, and {sorted(strange)} are unknown"
        )
    for name, value in like.items():
        if not names_only and (found[name].shape, found[name].dtype) != (value.shape, value.dtype):
            raise ValueError(
                f"{name!r} has shape {list(found[name].shape)} and dtype {found[name].dtype} in the checkpoint of "
                f"onnxruntime-training, and {list(value.shape)} and {value.dtype} in the one given as 'like'"
            )
