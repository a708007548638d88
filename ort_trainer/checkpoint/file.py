"""Reads and writes checkpoint files. This is the one place that imports safetensors.

A file is written beside its target, synced and renamed, so that there is the old file or the new one, whole, whatever
happens. Nothing in a file is ever executed.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import safetensors
import torch
from safetensors.torch import save, save_file

from ..atomic import atomic_path
from ..errors import CheckpointError
from ..foreign import refuse_upstream_checkpoint
from .legacy import aggregate_legacy_files, is_legacy_file, load_legacy_file
from .manifest import decode, encode

__all__ = ["PathOrFile", "load_checkpoint_file", "read_user_dict", "save_checkpoint_file"]

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
    with _on_disk(file) as (path, name):
        if is_legacy_file(path):
            return load_legacy_file(path, name), {}
        state, user = _load(path, name, "state", "user")
        return state, user


def read_user_dict(path: PathOrFile) -> dict[str, Any]:
    """Returns the user's dict of a checkpoint, without a trainer; of the tensors only those in it are read.

    Args:
        path: The checkpoint, as a path or an open binary file.

    Returns:
        What ``save_checkpoint`` was given as ``user_dict``.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If the file is damaged or no checkpoint; or one of the legacy ``ORTTrainer``, in which the
            user's dict is a pickle.

    Example:
        >>> trainer.save_checkpoint("run.ortckpt", {"epoch": 3})
        >>> ort_trainer.read_user_dict("run.ortckpt")
        {'epoch': 3}
    """
    with _on_disk(path) as (found, name):
        if is_legacy_file(found):
            raise CheckpointError(
                f"{name} is a checkpoint of the legacy ORTTrainer, in which the user's dict is a pickle, which could "
                "execute anything: read it in the old environment, and store it as JSON"
            )
        return _load(found, name, "user")[0]


@contextlib.contextmanager
def _on_disk(file: PathOrFile) -> Iterator[tuple[Path, str]]:
    """Gives the path of a file and its name for errors; an open one is copied to a temporary file."""
    if isinstance(file, (str, os.PathLike)):
        if not Path(file).is_file():
            raise FileNotFoundError(f"there is no checkpoint {str(file)!r}")
        yield Path(file), repr(str(file))
        return
    if not hasattr(file, "read"):
        raise TypeError(f"path must be a path or a binary file, but a {type(file).__name__} was given")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkpoint"
        copy.write_bytes(file.read())
        yield copy, "the given file"


class _Tensors(Mapping[str, torch.Tensor]):
    """The tensors of an open file, each read when it is asked for."""

    def __init__(self, opened: Any) -> None:
        self._opened, self._names = opened, frozenset(opened.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return cast(torch.Tensor, self._opened.get_tensor(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _load(path: Path, name: str, *parts: str) -> list[dict[str, Any]]:
    """Returns parts of a checkpoint of ours: ``state``, ``user``."""
    with path.open("rb") as opened:
        head = opened.read(8)
        refuse_upstream_checkpoint(
            head,
            name,
            "give ort_trainer.artifacts.trainer_state_dict(path) to load_state_dict(..., strict=False); "
            "docs/upstream_runtimes.md shows how",
        )
        if head[:4] in _PICKLES:
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
            tensors = _Tensors(opened)
            found = [decode(manifest.get(part), tensors) for part in parts]
    except (safetensors.SafetensorError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{name} is damaged or no checkpoint of ort_trainer: {error}") from error
    if not all(isinstance(part, dict) for part in found):
        raise CheckpointError(f"{name} is damaged: its manifest has no state or no user dict")
    return found
