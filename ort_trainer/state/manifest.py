"""The manifest: nested dicts as JSON, with references to the tensors of a checkpoint file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..core.errors import CheckpointError

__all__ = ["decode", "encode", "referenced"]

_TENSOR = "$tensor"
_ARRAY = "$array"
_DICT = "$dict"


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor], seen: dict[int, str]) -> Any:
    """Returns a value as JSON, with its tensors moved into ``tensors``.

    Args:
        value: Dicts with str keys, lists and tuples, numbers, strings, bools, None, tensors and arrays.
        path: Path of the value, for names and errors.
        tensors: Receives the tensors by new names.
        seen: id of a tensor -> its name, so that a tensor in several places is stored once.

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
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{path} has the key {key!r} of type {type(key).__name__}: keys must be str")
        entries = {key: encode(entry, f"{path}/{key}", tensors, seen) for key, entry in value.items()}
        return {_DICT: entries} if any(key.startswith("$") for key in entries) else entries
    if isinstance(value, (list, tuple)):
        return [encode(entry, f"{path}/{index}", tensors, seen) for index, entry in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"{path} is a {type(value).__name__}, which a checkpoint can't hold: it can hold dicts with str keys, lists, "
        "numbers, strings, bools, None, tensors and numpy arrays"
    )


def _plain(value: torch.Tensor | np.ndarray[Any, Any], path: str) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
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
            return tensors[inner] if key == _TENSOR else tensors[inner].numpy()
        if key == _DICT and isinstance(inner, dict):
            value = inner
    return {key: decode(entry, tensors) for key, entry in value.items()}
