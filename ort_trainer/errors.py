"""The errors that are neither a plain bad value (``ValueError``), bad type (``TypeError``) nor bad moment."""

from __future__ import annotations

import reprlib
import sys
import warnings
from typing import Any

__all__ = ["CheckpointError", "DistributedError", "ExportError", "IdleOptionError", "shown", "warn"]

_PACKAGE = __file__.removesuffix("errors.py")


class ExportError(RuntimeError):
    """The model could not be turned into an ONNX training or evaluation graph."""


class IdleOptionError(ExportError):
    """An option asks for a part that the model does not have; the message begins with the option and a colon."""


class CheckpointError(ValueError):
    """A checkpoint file is damaged, is no checkpoint of this package, or does not fit the trainer."""


class DistributedError(RuntimeError):
    """The processes that train one model do not do the same, or one of them is missing."""


class _Short(reprlib.Repr):
    """Representations for messages: long ones are cut, and of tensors and arrays only what they are is said."""

    def __init__(self) -> None:
        super().__init__()
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = 8
        self.maxstring = self.maxother = self.maxlong = 200

    def repr1(self, x: Any, level: int) -> str:
        if hasattr(x, "dtype") and getattr(x, "ndim", None):
            return f"{type(x).__name__}(shape={list(x.shape)}, dtype={x.dtype})"
        return super().repr1(x, level)


_SHORT = _Short()


def shown(value: Any) -> str:
    """Returns a user's value as a message shows it: in one line, not too long, whatever it is."""
    return " ".join(_SHORT.repr(value).split())


def warn(message: str) -> None:
    """Gives a ``UserWarning`` at the line outside this package that led to it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
