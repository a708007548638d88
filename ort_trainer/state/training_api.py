"""The checkpoint of the training API: a safetensors file with all state that an export's models need to continue."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Collection
from typing import Any, BinaryIO

import numpy as np

from ..core.atomic import atomic_path
from ..core.errors import CheckpointError, check_file, shown
from ..core.foreign import refuse_upstream_checkpoint
from ..core.schedules import KINDS, learning_rate
from ..core.sealed import DTYPES, Stored, check_version, read_header, read_tensors, write
from .state import Array, State

VERSION = 3
"""Version of the file. Version 2 lacks ``micro_batches`` and ``trainer``; version 1 also lacks checksums."""

_KEY = "ort_trainer.checkpoint"
_RANDOM_WORDS = 625
_MOST = 1 << 62  # limit of counts, which have 64 bits
_TENSORS = ("parameters", "buffers", "optimizer", "gradients")
_OTHERS = (
    *("export", "trainable", "learning_rates", "schedule", "optimization_step", "properties", "nominal"),
    "micro_batches",
)


def to_bytes(state: State) -> bytes:
    """Returns a checkpoint as the bytes of a file."""
    whole = io.BytesIO()
    _write(whole, state)
    return whole.getvalue()


def _write(file: BinaryIO, state: State) -> None:
    groups = {group: getattr(state, group) or {} for group in _TENSORS}
    groups["random"] = {} if state.random is None else {"state": state.random}
    others = {name: getattr(state, name) for name in _OTHERS}
    others["trainer"] = None
    if state.trainer_options is not None:
        others["trainer"] = {
            "trainer_options": state.trainer_options,
            "window": state.window,
            "transient_buffers": list(state.transient),
            "idle": state.idle,
        }
    if state.nominal:
        others["shapes"] = {name: [str(value.dtype), list(value.shape)] for name, value in groups["parameters"].items()}
        groups["parameters"] = {}
    # safetensors sorts by dtype and name; a flat buffer needs the parameters in their own order.
    others["order"] = {group: list(values) for group, values in groups.items()}
    others["has_optimizer"] = state.optimizer is not None
    tensors = {
        f"{group}:{name}": as_stored(np.asarray(value, order="C"))
        for group, values in groups.items()
        for name, value in values.items()
    }
    write(file, tensors, {_KEY: json.dumps({"version": VERSION, **others})})


def as_stored(value: Array) -> Stored:
    """Returns an array as ``sealed.write`` takes it."""
    return value.dtype.name, value.shape, value.reshape(-1).view(np.uint8)


def from_bytes(data: bytes, name: str = "the given bytes") -> State:
    """Returns the checkpoint in the bytes of a file.

    Args:
        data: The bytes.
        name: Name of the checkpoint in error messages.

    Raises:
        CheckpointError: If they are damaged or not the checkpoint of an export. For one of onnxruntime-training, the
            message says how to convert it.
    """
    return _read(io.BytesIO(data), name)


def _read(file: BinaryIO, name: str) -> State:
    refuse_upstream_checkpoint(
        file.read(8),
        name,
        "convert it with ort_trainer.artifacts.convert_checkpoint(source, target, like=...), or by "
        "'ort-trainer convert SOURCE TARGET --like CHECKPOINT'",
    )
    header = read_header(file, name)
    try:
        text = header.metadata.get(_KEY)
        if text is None:
            raise CheckpointError(
                f"{name} is not an ort_trainer.api checkpoint. If it is an ORTTrainer checkpoint or holds weights "
                "alone, convert it with 'ort-trainer convert SOURCE TARGET --to api --like CHECKPOINT'"
            )
        entries: dict[str, Any] = json.loads(text)
        check_version(entries.pop("version"), header, name, VERSION)
        tensors = {
            key: data.view(DTYPES[header.tensors[key].dtype]).reshape(header.tensors[key].shape)
            for key, data in read_tensors(file, header, name, header.tensors).items()
        }
        groups: dict[str, Any] = {
            group: {key: tensors[f"{group}:{key}"] for key in keys} for group, keys in entries.pop("order").items()
        }
        if not entries.pop("has_optimizer"):
            groups["optimizer"] = None
        if entries["nominal"]:
            groups["parameters"] = {key: _blank(*value) for key, value in entries.pop("shapes").items()}
        random, trainer = groups.pop("random", {}).get("state"), entries.pop("trainer", None)
        unknown = groups.keys() - {*_TENSORS} | entries.keys() - {*_OTHERS}
        if unknown:
            raise ValueError(f"unknown entries {sorted(unknown)}")
        required = {"export": entries.pop("export"), "trainable": entries.pop("trainable")}
        state = State(groups.pop("parameters"), random=random, **required, **entries, **groups)
        _check(state, trainer)
        if trainer is not None:
            state.trainer_options, state.window = trainer["trainer_options"], trainer["window"]
            state.transient = {name: name for name in trainer["transient_buffers"]}
            state.idle = trainer["idle"]
        return state
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError, ArithmeticError) as error:
        raise CheckpointError(f"{name} is damaged or not an ort_trainer.api checkpoint: {error}") from error


def _blank(dtype: Any, shape: Any) -> Array:
    """Returns the zeros of a nominal checkpoint, which take no memory until written to."""
    if dtype not in DTYPES.values() or not isinstance(shape, list):
        raise ValueError(f"a parameter has the invalid dtype {shown(dtype)} or shape {shown(shape)}")
    return np.zeros(shape, dtype)


def _check(state: State, trainer: Any) -> None:
    """Raises a ValueError if a value is invalid."""
    rates, schedule, random, updates = state.learning_rates, state.schedule, state.random, state.optimization_step
    valid = {
        "export": isinstance(state.export, str),
        "trainable": _are_names(state.trainable),
        "learning_rates": isinstance(rates, list) and bool(rates) and all(map(_is_rate, rates)),
        "schedule": schedule is None or (isinstance(schedule, dict) and schedule.get("kind") in KINDS),
        "optimization_step": type(updates) is int and updates >= 0,
        "properties": isinstance(state.properties, dict)
        and all(isinstance(value, (int, float, str)) for value in state.properties.values()),
        "micro_batches": type(state.micro_batches) is int
        and bool(state.gradients and trainer) <= state.micro_batches < _MOST,
        "trainer": trainer is None or _is_of_trainer(trainer, state),
        "nominal": isinstance(state.nominal, bool),
        "random": random is None
        or (random.shape == (_RANDOM_WORDS,) and random.dtype == np.uint32 and random[-1] < _RANDOM_WORDS),
    }
    invalid = [name for name, is_valid in valid.items() if not is_valid]
    if invalid:
        raise ValueError(f"invalid {', '.join(invalid)}")
    if schedule is not None and updates is not None:
        for rate in rates:
            for step in {updates, max(updates - 1, 0)}:  # the next update and the last; invalid numbers raise
                learning_rate(schedule, step, rate)


def _is_of_trainer(trainer: dict[str, Any], state: State) -> bool:
    """Returns whether a checkpoint's description of the trainer that it comes from is valid."""
    size, names = trainer["trainer_options"]["gradient_accumulation_steps"], state.parameters
    return (
        type(size) is int
        and 0 < size < _MOST
        and trainer["window"].keys() == {"reduction", "assigned_size"}
        and _are_names(trainer["transient_buffers"], {*names, *state.buffers})
        and _are_names(list(trainer["idle"]), names)
        and all(_are_names(slots) for slots in trainer["idle"].values())
    )


def _are_names(value: Any, allowed: Collection[str] | None = None) -> bool:
    """Returns whether a value is a list of distinct strings, all of them known."""
    return (
        isinstance(value, list)
        and all(isinstance(name, str) and (allowed is None or name in allowed) for name in value)
        and len(set(value)) == len(value)
    )


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def read_checkpoint(path: str | os.PathLike[str]) -> State:
    """Returns the checkpoint in a file.

    Raises:
        TypeError: If ``path`` is not a path.
        FileNotFoundError: If the file does not exist.
        CheckpointError: If it is damaged or not the checkpoint of an export.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"the checkpoint must be given as a path, but {shown(path)} was given")
    from pathlib import Path  # not imported by ONNX Runtime, and a fiftieth of its import time

    check_file(path, "checkpoint")
    with Path(path).open("rb") as file:
        return _read(file, repr(os.fspath(path)))


def write_checkpoint(path: str | os.PathLike[str], state: State) -> None:
    """Writes a file atomically, and replaces an existing one.

    Raises:
        FileNotFoundError: If the folder does not exist.
    """
    from pathlib import Path

    with atomic_path(Path(path)) as temporary, temporary.open("wb") as file:
        _write(file, state)
