"""Reads and writes checkpoint files.

A file is written beside its target, synced and renamed, so the old or the new file is always there, complete.
Everything in it has a checksum, which is verified before anything is restored. Nothing in a file is ever executed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from ..core.atomic import atomic_path
from ..core.errors import CheckpointError, check_file
from ..core.foreign import refuse_upstream_checkpoint
from ..core.pages import page
from ..core.sealed import DTYPES, VERSION, Array, Entry, Stored, check_version, read_header, read_tensors, write
from .bfloat16 import array_of, tensor_of
from .legacy import aggregate_legacy_files, is_legacy_file, load_legacy_file

PathOrFile = str | os.PathLike[str] | BinaryIO
_FORMAT = "ort_trainer checkpoint"
_PICKLES = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")  # torch.save: a zip file, or before PyTorch 1.6 a bare pickle
# In the manifest, the nested dicts as JSON, a dict of one of these keys stands for a tensor, an array, or a dict whose
# own keys begin with $.
_TENSOR = "$tensor"
_ARRAY = "$array"
_DICT = "$dict"
# In the user's dict, also for a dict with other keys, or for a value of one of these types.
_PAIRS = "$pairs"
_BYTES = "$bytes"
_COLLECTIONS: dict[str, type] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
_WITH_TYPES = 3  # the version of a file that has any of these; earlier versions of this package refuse it


def save_checkpoint_file(
    file: PathOrFile,
    state: Mapping[str, Any],
    user_dict: Mapping[str, Any],
    overwrite: bool = False,
    parts: Mapping[str, Mapping[str, Any]] | None = None,
    like: Path | None = None,
) -> None:
    """Writes a checkpoint.

    Args:
        file: A path, or an open binary file.
        state: The trainer's state dict.
        user_dict: The user's own values: dicts, lists, tuples, sets, numbers, strings, bytes, bools, None, tensors and
            arrays.
        overwrite: Whether to replace an existing file.
        parts: More dicts of this package's own, by name; :func:`read_parts` returns them.
        like: A file whose mode and owner a new file gets.

    Raises:
        FileExistsError: If the path exists and ``overwrite`` is False.
        TypeError: If a value can't be stored.
    """
    if not isinstance(user_dict, Mapping):
        raise TypeError(f"user_dict must be a dict, but a {type(user_dict).__name__} was given")
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[int, str] = {}
    kinds: set[str] = set()
    manifest = {
        "format": _FORMAT,
        "version": VERSION,
        "state": encode(state, "state", tensors, seen),
        "user": encode(user_dict, "user", tensors, seen, kinds),
        **{name: encode(part, name, tensors, seen) for name, part in (parts or {}).items()},
    }
    if kinds:
        manifest["version"] = _WITH_TYPES
    metadata = {"manifest": json.dumps(manifest)}
    stored = {name: as_stored(tensor) for name, tensor in tensors.items()}
    if not isinstance(file, (str, os.PathLike)):
        if not hasattr(file, "write"):
            raise TypeError(f"path must be a path or a binary file, but a {type(file).__name__} was given")
        whole = io.BytesIO()  # because write() seeks, which the given file may not support
        write(whole, stored, metadata)
        file.write(whole.getbuffer())
        return
    target = Path(file)
    if target.exists() and not overwrite:
        raise FileExistsError(f"{str(target)!r} already exists: choose another path, or pass overwrite=True")
    with atomic_path(target, like) as temporary, temporary.open("wb") as opened:
        write(opened, stored, metadata)


def as_stored(tensor: torch.Tensor) -> Stored:
    """Returns a tensor in the form for writing."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    # An empty tensor may have any strides, so it can't be viewed.
    flat = tensor.reshape(-1) if tensor.numel() else torch.empty(0, dtype=tensor.dtype)
    return dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy()


def as_tensor(entry: Entry, data: Array) -> torch.Tensor:
    """Returns the tensor with the given bytes."""
    dtype = getattr(torch, DTYPES[entry.dtype])
    return (
        torch.from_numpy(data).view(dtype).reshape(entry.shape) if data.size else torch.empty(entry.shape, dtype=dtype)
    )


def load_checkpoint_file(file: PathOrFile, *more: PathOrFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a checkpoint of this package, or an HDF5 file of the legacy ``ORTTrainer``, recognized by its first bytes.

    Args:
        file: A path, or an open binary file.
        *more: The files of the other ranks, for a legacy run with ZeRO.

    Returns:
        The trainer's state dict and the user's dict.

    Raises:
        FileNotFoundError: If the file does not exist.
        CheckpointError: If the file is damaged or not a checkpoint.
    """
    if more:
        return aggregate_legacy_files([file, *more]), {}
    with _on_disk(file) as (path, name):
        if is_legacy_file(path):
            return load_legacy_file(path, name), {}
        state, user = _load(path, name, "state", "user")
        return state, user


def read_user_dict(path: PathOrFile) -> dict[str, Any]:
    """Returns the user's dict of a checkpoint, without a trainer; reads only the tensors in the dict.

    Args:
        path: The checkpoint, as a path or an open binary file.

    Returns:
        The ``user_dict`` that was given to ``save_checkpoint``.

    Raises:
        FileNotFoundError: If the file does not exist.
        CheckpointError: If the file is damaged or not a checkpoint; or if it comes from the legacy ``ORTTrainer``,
            whose user's dict is a pickle.

    Example:
        >>> trainer.save_checkpoint("run.ortckpt", {"epoch": 3})
        >>> ort_trainer.read_user_dict("run.ortckpt")
        {'epoch': 3}
    """
    with _on_disk(path) as (local_path, name):
        if is_legacy_file(local_path):
            raise CheckpointError(
                f"{name} is a checkpoint of the legacy ORTTrainer, whose user's dict is a pickle, which could execute "
                "anything: read it in the old environment, and store it as JSON"
            )
        return _load(local_path, name, "user")[0]


def read_parts(path: PathOrFile, *names: str) -> list[dict[str, Any]]:
    """Returns ``parts`` that were given to :func:`save_checkpoint_file`; reads only the tensors in them.

    Args:
        path: The checkpoint, as a path or an open binary file.
        *names: The names of the parts.

    Returns:
        The parts; an empty dict for a part that the file lacks.

    Raises:
        FileNotFoundError: If the file does not exist.
        CheckpointError: If the file is damaged or not a checkpoint of ours.
    """
    with _on_disk(path) as (local_path, name):
        return _load(local_path, name, *names, default={})


@contextlib.contextmanager
def _on_disk(file: PathOrFile) -> Iterator[tuple[Path, str]]:
    """Yields the path of a file and its name for errors; copies an open file to a temporary one."""
    if isinstance(file, (str, os.PathLike)):
        check_file(file, "checkpoint")
        yield Path(file), repr(str(file))
        return
    if not hasattr(file, "read"):
        raise TypeError(f"path must be a path or a binary file, but a {type(file).__name__} was given")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkpoint"
        copy.write_bytes(file.read())
        yield copy, "the given file"


def _load(path: Path, name: str, *parts: str, default: Any = None) -> list[dict[str, Any]]:
    """Returns parts of a checkpoint of ours (``state``, ``user``, ...), or ``default`` for a missing part."""
    with path.open("rb") as opened:
        head = opened.read(8)
        refuse_upstream_checkpoint(
            head,
            name,
            "give ort_trainer.artifacts.trainer_state_dict(path) to load_state_dict(..., strict=False); "
            f"{page('on_device.md#converting-checkpoints-of-onnxruntime-training')} shows how",
        )
        if head[:4] in _PICKLES:
            raise CheckpointError(
                f"{name} was written by torch.save. Such files are pickles, which could execute anything, so they are "
                "not read here: if you trust the file, pass the result of torch.load(path, weights_only=True) to "
                f"load_state_dict; {page('migration.md')} shows how"
            )
        return _read(opened, name, parts, default)


def _read(file: BinaryIO, name: str, parts: Sequence[str], default: Any) -> list[dict[str, Any]]:
    header = read_header(file, name)
    try:
        manifest = json.loads(header.metadata.get("manifest", "null"))
        if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
            raise CheckpointError(
                f"{name} is a safetensors file, but not a checkpoint of ort_trainer. To load a checkpoint of "
                "ort_trainer.api, use load_state_dict(ort_trainer.artifacts.trainer_state_dict(path)); 'ort-trainer "
                "convert SOURCE TARGET --to trainer' converts it, or a file of weights alone"
            )
        check_version(manifest.get("version"), header, name, _WITH_TYPES)
        kept = [manifest.get(part, default) for part in parts]
        wanted = referenced(kept)
        read = read_tensors(file, header, name, [key for key in header.tensors if key in wanted])
        tensors = {key: as_tensor(header.tensors[key], data) for key, data in read.items()}
        decoded = [decode(part, tensors) for part in kept]
    except CheckpointError:
        raise
    except (ValueError, RecursionError, TypeError) as error:
        raise CheckpointError(f"{name} is damaged or not a checkpoint of ort_trainer: {error}") from error
    if not all(isinstance(part, dict) for part in decoded):
        raise CheckpointError(f"{name} is damaged: its manifest lacks the state or the user dict")
    return decoded


def encode(
    value: Any, path: str, tensors: dict[str, torch.Tensor], seen: dict[int, str], kinds: set[str] | None = None
) -> Any:
    """Returns a value as JSON, with its tensors moved into ``tensors``.

    Args:
        value: Dicts with str keys, lists and tuples, numbers, strings, bools, None, tensors and arrays.
        path: Path of the value, for names and errors.
        tensors: Receives the tensors by new names.
        seen: id of a tensor -> its name, so that a tensor in several places is stored once.
        kinds: If passed, the value may also contain dicts with other keys, sets and bytes, and tuples stay tuples;
            receives the keys that mark those types.

    Raises:
        TypeError: If the value contains anything else; the message has its path.
    """
    if isinstance(value, (torch.Tensor, np.ndarray)):
        kind = _TENSOR if isinstance(value, torch.Tensor) else _ARRAY
        if id(value) not in seen:
            name = path
            while name in tensors:  # a key that contains a slash can lead to the same path
                name += "'"
            seen[id(value)] = name
            tensors[name] = _plain(value, path)
        return {kind: seen[id(value)]}
    if isinstance(value, Mapping):
        other = [key for key in value if not isinstance(key, str)]
        if other and kinds is None:
            raise TypeError(f"{path} has the key {other[0]!r} of type {type(other[0]).__name__}: keys must be str")
        if other:
            pairs = [encode(pair, f"{path}/{pair[0]}", tensors, seen, kinds) for pair in map(list, value.items())]
            return _of_kind(_PAIRS, pairs, kinds)
        entries = {key: encode(entry, f"{path}/{key}", tensors, seen, kinds) for key, entry in value.items()}
        return {_DICT: entries} if any(key.startswith("$") for key in entries) else entries
    if isinstance(value, (list, tuple)) or (kinds is not None and isinstance(value, (set, frozenset))):
        parts = [encode(entry, f"{path}/{index}", tensors, seen, kinds) for index, entry in enumerate(value)]
        kind = next((kind for kind, collection in _COLLECTIONS.items() if isinstance(value, collection)), "")
        return _of_kind(kind, parts, kinds)
    if kinds is not None and isinstance(value, bytes):
        return _of_kind(_BYTES, value.hex(), kinds)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    other_types = "dicts with str keys, lists, " if kinds is None else "dicts, lists, tuples, sets, bytes, "
    raise TypeError(
        f"{path} is a {type(value).__name__}, which a checkpoint can't hold: it can hold {other_types}numbers, "
        "strings, bools, None, tensors and numpy arrays"
    )


def _of_kind(kind: str, parts: Any, kinds: set[str] | None) -> Any:
    """Marks an encoded value with the key of its type, if types are to be kept; plain lists have no key."""
    if not kind or kinds is None:
        return parts
    kinds.add(kind)
    return {kind: parts}


def _plain(value: torch.Tensor | np.ndarray[Any, Any], path: str) -> torch.Tensor:
    """Returns a tensor or array as a contiguous tensor on the CPU."""
    if isinstance(value, np.ndarray):
        try:
            return tensor_of(np.ascontiguousarray(value).reshape(value.shape))
        except TypeError as error:
            raise TypeError(f"{path} is an array of dtype {value.dtype}, which a checkpoint can't hold") from error
    if value.layout != torch.strided:
        raise TypeError(f"{path} is a {value.layout} tensor, which a checkpoint can't hold: call to_dense()")
    return value.detach().cpu().resolve_conj().resolve_neg().contiguous()


def referenced(value: Any) -> set[str]:
    """Returns the names of the tensors that :func:`decode` needs for a value."""
    if isinstance(value, list):
        return {name for entry in value for name in referenced(entry)}
    if not isinstance(value, dict):
        return set()
    return {
        name
        for key, entry in value.items()
        for name in ([entry] if key in (_TENSOR, _ARRAY) and isinstance(entry, str) else referenced(entry))
    }


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Reverses :func:`encode`.

    Raises:
        CheckpointError: If the manifest names a tensor that the file lacks.
    """
    if isinstance(value, list):
        return [decode(entry, tensors) for entry in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key in (_TENSOR, _ARRAY):
            if not isinstance(inner, str) or inner not in tensors:
                raise CheckpointError(
                    f"the checkpoint is damaged: its manifest names the tensor {inner!r}, which is missing"
                )
            return tensors[inner] if key == _TENSOR else array_of(tensors[inner])
        if key in _COLLECTIONS and isinstance(inner, list):
            return _COLLECTIONS[key](decode(inner, tensors))
        if key == _PAIRS and isinstance(inner, list):
            return dict(decode(inner, tensors))
        if key == _BYTES and isinstance(inner, str):
            return bytes.fromhex(inner)
        if key == _DICT and isinstance(inner, dict):
            value = inner
    return {key: decode(entry, tensors) for key, entry in value.items()}
