"""Mutes what the exporter's libraries say about things that are no concern of the user's."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

__all__ = ["quiet"]

# They log every step, print whole graphs where an export fails, and warn about packages that play no part here.
_LOGGERS = ("torch", "torch.export", "torch.fx", "torch.onnx", "torch._functorch", "onnxscript", "onnx_ir")
_WARNINGS = (
    # Modules such as LSTM keep lists of their weights, which an export reassigns.
    "The tensor attributes? .*_flat_weights.* (was|were) assigned during export",
    ".*isinstance\\(treespec, LeafSpec\\).*",
    # Whatever was converted is a separate error afterwards.
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
