"""What a checkpoint says of itself, without its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint import read_parts
from ..errors import CheckpointError

__all__ = ["RUN", "SavedCheckpoint", "best_of", "described", "is_foreign", "version"]

RUN = "run"
"""The part of a file that :class:`SavedCheckpoint` is read from."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of a directory.

    Attributes:
        path: The file.
        step: The trainer's steps so far.
        number: Its place in the order in which they were saved in the directory, from 1.
        metrics: What :meth:`CheckpointManager.save` was given.
    """

    path: Path
    step: int
    number: int
    metrics: Mapping[str, float] = field(default_factory=dict)


def best_of(found: Sequence[SavedCheckpoint], keep_best: tuple[str, str] | None) -> SavedCheckpoint | None:
    """Returns the first with the best value of a metric; one that has none, or not a number, is never the best."""
    if keep_best is None:
        return None
    name, mode = keep_best
    sign = -1 if mode == "max" else 1
    able = [entry for entry in found if not math.isnan(entry.metrics.get(name, math.nan))]
    return min(able, key=lambda entry: sign * entry.metrics[name], default=None)


def version(path: Path) -> tuple[int, int, int]:
    """Returns what changes when a file is replaced; the times of some file systems are too coarse to say it."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def is_foreign(path: Path) -> bool:
    """Returns whether a file is a checkpoint that was not saved by a manager."""
    try:
        return read_parts(path, RUN) == [{}]
    except (CheckpointError, OSError):
        return False


def described(path: Path) -> SavedCheckpoint | None:
    """Returns what a file says; None if it is damaged or was not saved by a manager."""
    try:
        (run,) = read_parts(path, RUN)
        if not run:
            return None
        metrics = {str(name): float(value) for name, value in run["metrics"].items()}
        return SavedCheckpoint(path, int(run["step"]), int(run["number"]), metrics)
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError):
        return None
