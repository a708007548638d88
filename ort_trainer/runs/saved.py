"""The description of a saved checkpoint, read without its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..core.errors import CheckpointError
from ..state import read_parts

__all__ = ["RUN", "SavedCheckpoint", "best_of", "described", "is_foreign", "version"]

RUN = "run"
"""The part of a file that :class:`SavedCheckpoint` is read from."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of a directory.

    Attributes:
        path: The file.
        step: The trainer's step count when it was saved.
        number: Its position in the order of saving in the directory, from 1.
        metrics: The metrics passed to :meth:`CheckpointManager.save`.
    """

    path: Path
    step: int
    number: int
    metrics: Mapping[str, float] = field(default_factory=dict)


def best_of(found: Sequence[SavedCheckpoint], keep_best: tuple[str, str] | None) -> SavedCheckpoint | None:
    """Returns the first checkpoint with the best value of a metric; ignores checkpoints where it is missing or NaN."""
    if keep_best is None:
        return None
    name, mode = keep_best
    sign = -1 if mode == "max" else 1
    able = [entry for entry in found if not math.isnan(entry.metrics.get(name, math.nan))]
    return min(able, key=lambda entry: sign * entry.metrics[name], default=None)


def version(path: Path) -> tuple[int, int, int]:
    """Returns a key that changes when a file is replaced; times alone are too coarse on some file systems."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def is_foreign(path: Path) -> bool:
    """Returns whether a file is a checkpoint that was not saved by a manager."""
    try:
        return read_parts(path, RUN) == [{}]
    except (CheckpointError, OSError):
        return False


def described(path: Path) -> SavedCheckpoint | None:
    """Returns a file's description; None if it is damaged or was not saved by a manager."""
    try:
        (run,) = read_parts(path, RUN)
        if not run:
            return None
        metrics = {str(name): float(value) for name, value in run["metrics"].items()}
        return SavedCheckpoint(path, int(run["step"]), int(run["number"]), metrics)
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError):
        return None
