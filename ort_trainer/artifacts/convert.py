"""Converts checkpoints between onnxruntime-training's own training API and ours, for programs and the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..api.checkpoint_file import Checkpoint, read_checkpoint, without_optimizer, write_checkpoint
from ..errors import shown, warn
from ..foreign import is_upstream_checkpoint
from .back_to_trainer import state_dict_of
from .upstream.checkpoint import read_upstream_checkpoint
from .upstream.conversion import from_upstream, to_upstream
from .upstream.write_checkpoint import write_upstream_checkpoint

__all__ = ["convert_checkpoint", "trainer_state_dict", "write_as_upstream"]

PathLike = str | os.PathLike[str]


def convert_checkpoint(
    source: PathLike, target: PathLike, like: PathLike | None = None, *, include_optimizer_state: bool = True
) -> None:
    """Converts a checkpoint of onnxruntime-training's training API to one of ``ort_trainer.api``, or back.

    Which way follows from the source. Parameters, properties and the state of Adam and SGD are converted; onnxruntime-
    training has no place for a learning-rate schedule, for the state of random numbers and for gradients between two
    updates.

    Args:
        source: The checkpoint.
        target: The file to write; it is replaced if it exists.
        like: Where the source is onnxruntime-training's: the ``checkpoint`` of the export with whose models the new one
            is to be used. Without it the result fits no models, but :func:`trainer_state_dict` reads it.
        include_optimizer_state: Whether to convert the state of the optimizer.

    Raises:
        FileNotFoundError: If there is no such file, or the folder of the target does not exist.
        CheckpointError: If a file is damaged or no checkpoint.
        ValueError: If the source does not fit ``like``, or is of an optimizer that onnxruntime-training does not have.
        TypeError: If a path is none, or ``include_optimizer_state`` no bool.

    Example:
        >>> convert_checkpoint("upstream/checkpoint", "ours/trained", like="ours/checkpoint")
    """
    if not isinstance(target, (str, os.PathLike)):
        raise TypeError(f"target must be a path, but {shown(target)} was given")
    if not isinstance(include_optimizer_state, bool):
        raise TypeError(f"include_optimizer_state must be a bool, but {shown(include_optimizer_state)} was given")
    if _is_upstream(source):
        upstream = read_upstream_checkpoint(source)
        if not include_optimizer_state:
            upstream.groups = {}
        write_checkpoint(target, from_upstream(upstream, None if like is None else read_checkpoint(like)))
        return
    if like is not None:
        raise ValueError(
            f"{os.fspath(source)!r} is a checkpoint of ort_trainer, which is converted as it is: 'like' is for "
            "checkpoints of onnxruntime-training"
        )
    checkpoint = read_checkpoint(source)
    write_as_upstream(target, checkpoint if include_optimizer_state else without_optimizer(checkpoint))


def write_as_upstream(target: PathLike, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint of ours as onnxruntime-training has it, with a warning of what it can't hold.

    Raises:
        ValueError: If it is of an optimizer that onnxruntime-training does not have.
    """
    found, left_out = to_upstream(checkpoint)
    if left_out:
        warn(f"onnxruntime-training has no place for {', '.join(left_out)}: left out of {os.fspath(target)!r}")
    write_upstream_checkpoint(target, found)


def trainer_state_dict(source: PathLike) -> dict[str, Any]:
    """Returns a checkpoint of onnxruntime-training, or of ``ort_trainer.api``, for ``ORTTrainer.load_state_dict``.

    Names match where the artifacts came from the same model. A checkpoint of ``ort_trainer.api`` says which optimizer
    it is of, so that it is loaded as it is, and training goes on where it was; the learning rates are the trainer's
    own. Three kinds do not say it, and need ``strict=False``: those of onnxruntime-training, those of exports of an
    earlier ort_trainer, and those of a trainer with an optimizer of ``torch.optim``, which keeps the moments that it
    has. Of all three, gradients since the last reset are left out, with a warning.

    Args:
        source: The checkpoint.

    Raises:
        FileNotFoundError: If there is no such file.
        CheckpointError: If it is damaged or no checkpoint.
        ValueError: If it is nominal, and has no values.

    Example:
        >>> trainer.load_state_dict(trainer_state_dict("artifacts/trained"))
    """
    checkpoint: Checkpoint = (
        from_upstream(read_upstream_checkpoint(source)) if _is_upstream(source) else read_checkpoint(source)
    )
    if checkpoint.nominal:
        raise ValueError(f"{os.fspath(source)!r} is a nominal checkpoint, which has names of parameters and no values")
    if checkpoint.gradients and checkpoint.trainer is None:
        warn(
            f"gradients since the last reset are left out of {os.fspath(source)!r}: a trainer's accumulation window "
            "begins anew"
        )
    return state_dict_of(checkpoint)


def _is_upstream(source: PathLike) -> bool:
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"source must be a path, but {shown(source)} was given")
    if not Path(source).is_file():
        raise FileNotFoundError(f"there is no checkpoint {os.fspath(source)!r}")
    with Path(source).open("rb") as file:
        return is_upstream_checkpoint(file.read(8))
