"""The errors that are neither a plain bad value (``ValueError``), bad type (``TypeError``) nor bad moment."""

from __future__ import annotations

__all__ = ["CheckpointError", "ExportError"]


class ExportError(RuntimeError):
    """The model could not be turned into an ONNX training or evaluation graph."""


class CheckpointError(ValueError):
    """A checkpoint file is damaged, is no checkpoint of this package, or does not fit the trainer."""
