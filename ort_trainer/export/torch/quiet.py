"""Mutes messages of the exporter's libraries that do not concern the user."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

__all__ = ["quiet"]

# They log every step, print whole graphs when an export fails, and warn about irrelevant packages.
_LOGGERS = ("torch", "torch.export", "torch.fx", "torch.onnx", "torch._functorch", "onnxscript", "onnx_ir")
_WARNINGS = (
    # Modules such as LSTM keep lists of their weights, which an export reassigns.
    "The tensor attributes? .*_flat_weights.* (was|were) assigned during export",
    ".*isinstance\\(treespec, LeafSpec\\).*",
    # The conversion raises its own error afterwards.
    "Converting a tensor with requires_grad=True to a scalar.*",
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Mutes the libraries while the block runs; errors still raise."""
    loggers = [(logging.getLogger(name), logging.getLogger(name).level) for name in _LOGGERS]
    try:
        for logger, _ in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            for message in _WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for logger, level in loggers:
            logger.setLevel(level)
