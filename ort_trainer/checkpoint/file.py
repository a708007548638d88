"""Reads and writes checkpoint files. This is the one place that imports safetensors.

A file is written beside its target, synced and renamed, so that there is the old file or the new one, whole, whatever
happens. Nothing in a file is ever executed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import torch
from safetensors.torch import save, save_file

from ..atomic import atomic_path
from ..errors import CheckpointError
from .legacy import aggregate_legacy_files, is_legacy_file, load_legacy_file
from .manifest import decode, encode

__all__ = ["PathOrFile", "load_checkpoint_file", "save_checkpoint_file"]

PathOrFile = str | os.PathLike[str] | BinaryIO
_FORMAT = "ort_trainer checkpoint"
_VERSION = 1
_PICKLES = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")  # torch.save: a zip file, or before PyTorch 1.6 a bare pickle


def save_checkpoint_file(
    file: PathOrFile, state: Mapping[str, Any], user_dict: Mapping[str, Any], overwrite: bool = False
) -> None:
    """Writes a checkpoint.

    Args:
        file: A path, or an open binary file.
        state: The trainer's state dict.
        user_dict: The user's own values: JSON values, tensors and arrays.
        overwrite: Whether a file that is there already may be replaced.

    Raises:
        FileExistsError: If the path exists and ``overwrite`` is False.
        TypeError: If a value can't be stored.
    """
    if not isinstance(user_dict, Mapping):
        raise TypeError(f"user_dict must be a dict, but a {type(user_dict).__name__} was given")
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[int, str] = {}
    manifest = {
        "format": _FORMAT,
        "version": _VERSION,
        "state": encode(state, "state", tensors, seen),
        "user": encode(user_dict, "user", tensors, seen),
    }
    tensors = _without_shared_memory(tensors)
    metadata = {"manifest": json.dumps(manifest)}
    if not isinstance(file, (str, os.PathLike)):
        if not hasattr(file, "write"):
            raise TypeError(f"path must be a path or a binary file, but a {type(file).__name__} was given")
        file.write(save(tensors, metadata))
        return
    target = Path(file)
    if target.exists() and not overwrite:
        raise FileExistsError(f"{str(target)!r} exists already: choose another path, or pass overwrite=True")
    with atomic_path(target) as temporary:
        save_file(tensors, temporary, metadata)


def _without_shared_memory(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """safetensors refuses tensors that share memory, as views of one tensor of the user's would."""
    storages: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if address in storages else tensor
        storages.add(address)
    return result


def load_checkpoint_file(file: PathOrFile, *more: PathOrFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a checkpoint: one of ours, or an HDF5 file of the legacy ``ORTTrainer``, recognized by its first bytes.

    Args:
        file: A path, or an open binary file.
        *more: The files of the other ranks, where it is one of a legacy run with ZeRO.

    Returns:
        The trainer's state dict and the user's dict.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is damaged or no checkpoint.
    """
    if more:
        return aggregate_legacy_files([file, *more]), {}
    if isinstance(file, (str, os.PathLike)):
        if not Path(file).is_file():
            raise FileNotFoundError(f"there is no checkpoint {str(file)!r}")
        return _load(Path(file), repr(str(file)))
    if not hasattr(file, "read"):
        raise TypeError(f"path must be a path or a binary file, but a {type(file).__name__} was given")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkpoint"
        copy.write_bytes(file.read())
        return _load(copy, "the given file")


def _load(path: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if is_legacy_file(path):
        return load_legacy_file(path, name), {}
    with path.open("rb") as opened:
        if opened.read(4) in _PICKLES:
            raise CheckpointError(
                f"{name} was written by torch.save. Such files are pickles, which could execute anything, so they are "
                "not read here: where you trust it, give what torch.load(path, weights_only=True) returns to "
                "load_state_dict; docs/migration.md shows how"
            )
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            manifest = json.loads(metadata.get("manifest", "null"))
            if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
                raise CheckpointError(f"{name} is a safetensors file, but no checkpoint of ort_trainer")
            if manifest.get("version") != _VERSION:
                raise CheckpointError(
                    f"{name} has the checkpoint version {manifest.get('version')!r}; this ort_trainer reads {_VERSION}"
                )
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no dict
    except (safetensors.SafetensorError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{name} is damaged or no checkpoint of ort_trainer: {error}") from error
    state, user = (decode(manifest.get(key), tensors) for key in ("state", "user"))
    if not isinstance(state, dict) or not isinstance(user, dict):
        raise CheckpointError(f"{name} is damaged: its manifest has no state or no user dict")
    return state, user
