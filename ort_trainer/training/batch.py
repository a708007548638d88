"""Turns the arguments of a step into tensors by name, and checks them before anything is counted or changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import shown
from ..options import InputDescription, ModelDescription

__all__ = ["Batch", "check_batch", "read_batch", "to_tensor", "unpack"]

Batch = dict[str, torch.Tensor]


def read_batch(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], optional: Sequence[str] = ()
) -> Batch:
    """Assigns the arguments of ``train_step`` or ``eval_step`` to the described inputs.

    Args:
        names: The inputs, in the order of the description.
        args: Positional arguments in that order; or one dict, list or tuple that holds the batch.
        kwargs: Keyword arguments by input name, for the inputs that no positional argument gives.
        optional: Inputs that may be left out.

    Returns:
        Name -> contiguous, detached tensor, in the order of the description.

    Raises:
        TypeError: If an argument is missing, unknown, given twice, or no tensor.
    """
    args, kwargs = unpack(args, kwargs)
    if len(args) > len(names):
        raise TypeError(f"{len(args)} inputs were given, but the model description has {len(names)}: {list(names)}")
    given = dict(zip(names, args, strict=False))
    if kwargs:
        unknown = [name for name in kwargs if name not in names]
        if unknown:
            raise TypeError(f"unknown inputs {unknown}: the model description has {list(names)}")
        twice = [name for name in kwargs if name in given]
        if twice:
            raise TypeError(f"inputs {twice} were given both by position and by name")
        given.update(kwargs)
    if len(given) < len(names):
        missing = [name for name in names if name not in given and name not in optional]
        if missing:
            raise TypeError(f"inputs {missing} are missing: the model description has {list(names)}")
    return {name: to_tensor(name, given[name]) for name in names if name in given}


def unpack(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Returns arguments by position and by name where one dict, list or tuple may hold the whole batch."""
    if len(args) == 1 and not kwargs:
        (whole,) = args
        if isinstance(whole, Mapping):
            return [], whole
        if isinstance(whole, (list, tuple)):
            return whole, kwargs
    return args, kwargs


def to_tensor(name: str, value: Any) -> torch.Tensor:
    """Returns an input as a contiguous, detached tensor.

    Raises:
        TypeError: If it is neither a dense tensor nor a numpy array.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        # PyTorch can't represent negative strides or foreign byte orders, and must not write to a read-only array.
        array = np.ascontiguousarray(value, dtype=np.asarray(value).dtype.newbyteorder("="))
        value = torch.from_numpy(array if array.flags.writeable else array.copy()).reshape(np.shape(value))
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"input {name!r} must be a torch.Tensor or a numpy array, but a {type(value).__name__} was given: "
            f"{shown(value)}"
        )
    if value.layout != torch.strided:
        raise TypeError(f"input {name!r} must be a dense tensor, but its layout is {value.layout}: call to_dense()")
    return value.detach().contiguous()


def check_batch(
    description: ModelDescription,
    batch: Batch,
    device: torch.device,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Checks a batch against the description.

    Args:
        description: The model description.
        batch: The inputs by name.
        device: Where the tensors must be.
        dtypes: The dtypes that the exported graph takes; None before there is one.

    Raises:
        TypeError: If a tensor has a wrong dtype.
        ValueError: If a tensor has a wrong shape, is empty, or is on another device; or if two inputs give one
            symbolic dimension two sizes.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for entry in description.inputs:
        if entry.name in batch:
            _check(entry, batch[entry.name], device, (dtypes or {}).get(entry.name), sizes)


def _check(
    entry: InputDescription,
    value: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype | None,
    sizes: dict[str, tuple[int, str]],
) -> None:
    shape = list(value.shape)
    described = list(entry.shape)
    if len(shape) != len(described):
        raise ValueError(
            f"input {entry.name!r} has {len(shape)} dimensions, shape {shape}, but the model description says "
            f"{len(described)}: {described}"
        )
    for axis, (size, expected) in enumerate(zip(shape, described, strict=True)):
        if size == 0:
            raise ValueError(f"input {entry.name!r} is empty: its shape is {shape}. Skip empty batches")
        if isinstance(expected, int):
            if size != expected:
                raise ValueError(
                    f"input {entry.name!r} has size {size} in dimension {axis}, but the model description says "
                    f"{expected}: {described}. Give the dimension a name there if it may change"
                )
            continue
        known, where = sizes.setdefault(expected, (size, entry.name))
        if known != size:
            raise ValueError(
                f"Mismatch in dynamic shape {expected}: it is {known} in input {where!r} and {size} in input "
                f"{entry.name!r}, whose shape is {shape}"
            )
    if dtype is not None and value.dtype != dtype:
        raise TypeError(
            f"input {entry.name!r} has dtype {value.dtype}, but training began with {dtype}: use .to({dtype})"
        )
    if value.device != device:
        raise ValueError(
            f"input {entry.name!r} is on {value.device}, but training runs on {device}: move it with .to('{device}')"
        )
