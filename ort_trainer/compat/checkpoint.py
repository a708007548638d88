"""``onnxruntime.training.checkpoint``: the experimental functions, and the aggregation of legacy files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ort_trainer import ORTTrainer

from ..state import load_checkpoint_file
from .training_session.flat_state import flat_state_dict, load_flat_state_dict

__all__ = [
    "aggregate_checkpoints",
    "experimental_load_checkpoint",
    "experimental_load_state_dict",
    "experimental_save_checkpoint",
    "experimental_state_dict",
]

Folder = str | os.PathLike[str]


def aggregate_checkpoints(paths: Sequence[Folder], pytorch_format: bool = True) -> dict[str, Any]:
    """Combines the legacy HDF5 files of a ZeRO run.

    Args:
        paths: The files of all ranks, in any order.
        pytorch_format: True for only the weights, name -> tensor; False for the nested state dict.

    Returns:
        A state dict for ``load_state_dict`` of ``ORTTrainer``, or of a PyTorch model.

    Raises:
        CheckpointError: If a file is not a checkpoint, a rank is missing, the parts do not match, or the run used
            Megatron.
    """
    if isinstance(paths, (str, os.PathLike)) or not paths:
        raise TypeError(f"paths must be a list of at least one path, but {paths!r} was given")
    state, _ = load_checkpoint_file(*paths)
    if not pytorch_format:
        return state
    weights = state["model"]["full_precision"]
    return {name: torch.from_numpy(np.array(value)) for name, value in weights.items()}


def experimental_state_dict(ort_trainer: ORTTrainer, include_optimizer_state: bool = True) -> dict[str, torch.Tensor]:
    """Returns weights, buffers and optimizer state as one flat dict of tensors.

    Args:
        ort_trainer: The trainer.
        include_optimizer_state: Whether to include ``Moment_1_<weight>`` and the like.
    """
    _deprecated("experimental_state_dict", "ORTTrainer.state_dict")
    return flat_state_dict(ort_trainer, include_optimizer_state)


def experimental_load_state_dict(ort_trainer: ORTTrainer, state_dict: Mapping[str, Any], strict: bool = False) -> None:
    """Restores what :func:`experimental_state_dict` returned.

    Args:
        ort_trainer: The trainer.
        state_dict: The flat dict.
        strict: Whether names must match exactly.
    """
    _deprecated("experimental_load_state_dict", "ORTTrainer.load_state_dict")
    load_flat_state_dict(ort_trainer, state_dict, strict)


def experimental_save_checkpoint(
    ort_trainer: ORTTrainer,
    checkpoint_dir: Folder,
    checkpoint_prefix: str = "ORT_checkpoint",
    checkpoint_state_dict: Mapping[str, Any] | None = None,
    include_optimizer_state: bool = True,
) -> None:
    """Writes ``<checkpoint_prefix>.ort.pt`` into a folder; replaces an existing file, with a warning.

    Despite its name the file is not a pickle: it has the format of ``ORTTrainer.save_checkpoint``.

    Args:
        ort_trainer: The trainer.
        checkpoint_dir: The folder; it must exist.
        checkpoint_prefix: The beginning of the file's name.
        checkpoint_state_dict: Your own values, which loading returns. It is not changed.
        include_optimizer_state: Whether to write moments, too.
    """
    _deprecated("experimental_save_checkpoint", "ORTTrainer.save_checkpoint")
    path = checkpoint_file(checkpoint_dir, checkpoint_prefix, overwriting=True)
    ort_trainer.save_checkpoint(path, checkpoint_state_dict, include_optimizer_state, overwrite=True)


def experimental_load_checkpoint(
    ort_trainer: ORTTrainer, checkpoint_dir: Folder, checkpoint_prefix: str = "ORT_checkpoint", strict: bool = False
) -> dict[str, Any]:
    """Restores what :func:`experimental_save_checkpoint` wrote.

    Args:
        ort_trainer: The trainer.
        checkpoint_dir: The folder.
        checkpoint_prefix: The beginning of the file's name.
        strict: Whether names must match exactly.

    Returns:
        Your own values.

    Raises:
        FileNotFoundError: If the file does not exist.
        CheckpointError: If it is damaged, or a pickle that the legacy functions wrote.
    """
    _deprecated("experimental_load_checkpoint", "ORTTrainer.load_checkpoint")
    return ort_trainer.load_checkpoint(checkpoint_file(checkpoint_dir, checkpoint_prefix), strict=strict)


def checkpoint_file(folder: Folder, prefix: str, overwriting: bool = False) -> Path:
    """Returns the file of a checkpoint; warns if one that exists is to be overwritten."""
    path = Path(folder) / f"{prefix}.ort.pt"
    if overwriting and path.exists():
        warnings.warn(f"{path} already exists, overwriting.", UserWarning, stacklevel=3)
    return path


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(f"{name}() is only for old scripts: use {instead}()", DeprecationWarning, stacklevel=3)
