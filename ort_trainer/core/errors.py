"""The package's own exceptions, and how messages show values."""

from __future__ import annotations

import os
import reprlib
import sys
import warnings
from pathlib import Path
from typing import Any

PACKAGE = str(Path(__file__).parents[1]) + os.sep


class ExportError(RuntimeError):
    """The model could not become a graph for training or evaluation, or that graph a file."""


class IdleOptionError(ExportError):
    """An option needs a part that the model lacks.

    Args:
        option: The dotted path of the option.
        reason: What the model lacks, and what to do.
    """

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(option, reason)
        self.option = option

    def __str__(self) -> str:
        return ": ".join(self.args)


class CheckpointError(ValueError):
    """A checkpoint file is damaged, is not a checkpoint of this package, or does not fit the trainer."""


class DistributedError(RuntimeError):
    """The processes that train one model disagree, or one of them is missing."""


class ValueBranchError(RuntimeError):
    """A batch takes another branch of the model than the batch that its graph was exported for."""


class VerificationError(RuntimeError):
    """A step's results differ from PyTorch's; the step was not taken. See the option ``debug.verify_every``."""


class MissingStateWarning(UserWarning):
    """A state dict lacks a part, and the trainer keeps its own."""


class _Short(reprlib.Repr):
    """Representations for messages: long ones are truncated; tensors and arrays show shape and dtype only."""

    def __init__(self) -> None:
        super().__init__()
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 8
        self.maxstring = self.maxother = self.maxlong = 200

    def repr1(self, x: Any, level: int) -> str:
        if hasattr(x, "dtype") and getattr(x, "ndim", None) and not isinstance(x, type):
            return f"{type(x).__name__}(shape={list(x.shape)}, dtype={x.dtype})"
        return super().repr1(x, level)


_SHORT = _Short()


def shown(value: Any) -> str:
    """Returns any value as text for a message: one line of limited length."""
    return " ".join(_SHORT.repr(value).split())


def instead(kind: type) -> str:
    """Returns advice for a class that was given instead of an object."""
    return f"pass an object, {kind.__name__}(...)"


def check_count(name: str, value: Any, minimum: int = 1, optional: bool = False) -> None:
    """Checks a number that the user has given.

    Raises:
        TypeError: If it is not an int, or None, if ``optional``.
        ValueError: If it is below the minimum.
    """
    if value is None and optional:
        return
    none = ", or None" if optional else ""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int{none}, but {shown(value)} ({type(value).__name__}) was given")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}{none}, but {value} was given")


def check_file(path: str | os.PathLike[str], what: str) -> None:
    """Checks that a path leads to a file: reading a pipe or a device may never end.

    Args:
        path: The path.
        what: The kind of file that it should be, for messages.

    Raises:
        FileNotFoundError: If there is no such file, or it is something else.
    """
    if not Path(path).is_file():
        other = ": that is a folder, a pipe or a device, so copy it to a file" if Path(path).exists() else ""
        raise FileNotFoundError(f"there is no {what} {os.fspath(path)!r}{other}")


def was_given(value: Any) -> str:
    """Returns the end of a message about a wrong argument: what was given, and advice if it is a class."""
    return (
        f"the class {value.__name__} was given: {instead(value)}"
        if isinstance(value, type)
        else f"{shown(value)} was given"
    )


def warn(message: str, kind: type[UserWarning] = UserWarning, others: tuple[str, ...] = ()) -> None:
    """Issues a warning that points at the calling line outside this package.

    Args:
        message: The warning.
        kind: Its class.
        others: Folders that the line is not in, either.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith((PACKAGE, *others)):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, kind, stacklevel=level)
