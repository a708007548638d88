"""The checkpoint of an export: a safetensors file, which holds all state that the models need to train on."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import load, save

from ..atomic import atomic_path
from ..errors import CheckpointError, shown
from ..foreign import refuse_upstream_checkpoint

__all__ = ["Checkpoint", "Value", "from_bytes", "read_checkpoint", "to_bytes", "write_checkpoint"]

_KEY = "ort_trainer.checkpoint"
_VERSION = 1
_TENSORS = ("parameters", "buffers", "optimizer", "gradients", "random")

Array = np.ndarray[Any, Any]
Value = int | float | str
"""What a property may be."""


@dataclass
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        export: What the artifacts of one export have in common.
        parameters: Name -> value: parameters, trained or not, and floating-point buffers (running statistics).
        trainable: Names of those that are trained, in the order of the parameters.
        buffers: Name -> value of all other buffers.
        learning_rates: Of each parameter group, and last of all other parameters; what a schedule starts from.
        schedule: For :func:`ort_trainer.schedules.learning_rate`; None for constant rates.
        optimizer: Key of ``OptimizerModel.state`` -> value; None in a file without the optimizer's state, with which
            training starts afresh.
        optimization_step: Updates done.
        gradients: Name -> the sum of the gradients since the last reset; empty right after one.
        random: ``state``: the 624 words of the Mersenne Twister and the position in them, uint32 [625], of which
            PyTorch's and NumPy's generators draw the same numbers. Empty for a new one.
        properties: The user's own values.
        nominal: Whether the parameters have shapes and dtypes, but no values yet: then they are zeros.
    """

    export: str
    parameters: dict[str, Array]
    trainable: list[str]
    buffers: dict[str, Array] = field(default_factory=dict)
    learning_rates: list[float] = field(default_factory=lambda: [1e-3])
    schedule: dict[str, Any] | None = None
    optimizer: dict[str, Array] | None = None
    optimization_step: int = 0
    gradients: dict[str, Array] = field(default_factory=dict)
    random: dict[str, Array] = field(default_factory=dict)
    properties: dict[str, Value] = field(default_factory=dict)
    nominal: bool = False


def to_bytes(checkpoint: Checkpoint) -> bytes:
    """Returns what a file holds."""
    groups = {group: getattr(checkpoint, group) or {} for group in _TENSORS}
    others = {f.name: getattr(checkpoint, f.name) for f in dataclasses.fields(checkpoint) if f.name not in _TENSORS}
    if checkpoint.nominal:
        others["shapes"] = {name: [str(value.dtype), list(value.shape)] for name, value in groups["parameters"].items()}
        groups["parameters"] = {}
    # safetensors sorts by dtype and name, but the order of the parameters is that of a flat buffer of them.
    others["order"] = {group: list(values) for group, values in groups.items()}
    others["has_optimizer"] = checkpoint.optimizer is not None
    tensors = {
        f"{group}:{name}": np.asarray(value, order="C")
        for group, values in groups.items()
        for name, value in values.items()
    }
    return save(tensors, {_KEY: json.dumps({"version": _VERSION, **others})})


def from_bytes(data: bytes, name: str = "the given bytes") -> Checkpoint:
    """Returns the checkpoint in the bytes of a file.

    Args:
        data: The bytes.
        name: What messages call them.

    Raises:
        CheckpointError: If they are damaged or no checkpoint of an export; of one of onnxruntime-training it says how
            to convert it.
    """
    refuse_upstream_checkpoint(
        data[:8],
        name,
        "convert it with ort_trainer.artifacts.convert_checkpoint(source, target, like=...), or by "
        "'python -m ort_trainer.artifacts.convert SOURCE TARGET --like CHECKPOINT'",
    )
    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size]) if 0 < size <= len(data) - 8 else {}
        text = header.get("__metadata__", {}).get(_KEY)
        if text is None:
            raise CheckpointError(f"{name} is damaged, or no checkpoint of ort_trainer.api")
        found: dict[str, Any] = json.loads(text)
        if found.pop("version") != _VERSION:
            raise CheckpointError(f"{name} has another version than {_VERSION}, which this ort_trainer reads")
        tensors = load(data)
        groups: dict[str, Any] = {
            group: {key: tensors[f"{group}:{key}"] for key in keys} for group, keys in found.pop("order").items()
        }
        if not found.pop("has_optimizer"):
            groups["optimizer"] = None
        if found["nominal"]:
            groups["parameters"] = {key: np.zeros(shape, dtype) for key, (dtype, shape) in found.pop("shapes").items()}
        return Checkpoint(**found, **groups)
    except CheckpointError:
        raise
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{name} is damaged, or no checkpoint of ort_trainer.api: {error}") from error


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Returns the checkpoint in a file.

    Raises:
        TypeError: If the path is none.
        FileNotFoundError: If there is no such file.
        CheckpointError: If it is damaged or no checkpoint of an export.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"the checkpoint must be given as a path, but {shown(path)} was given")
    from pathlib import Path  # which ONNX Runtime does without, and takes a fiftieth of its time

    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no checkpoint {os.fspath(path)!r}")
    return from_bytes(Path(path).read_bytes(), repr(os.fspath(path)))


def write_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Writes a file, atomically; one that is there is replaced.

    Raises:
        FileNotFoundError: If the folder does not exist.
    """
    from pathlib import Path

    with atomic_path(Path(path)) as temporary:
        temporary.write_bytes(to_bytes(checkpoint))
