"""Imports of ONNX Runtime without their side effects on the process."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

__all__ = ["process_undisturbed"]


@contextlib.contextmanager
def process_undisturbed() -> Iterator[None]:
    """Restores what imports of ONNX Runtime's training packages change: they log, and append to ``sys.path``.

    The first logged record gives the root logger a handler, after which the user's ``logging.basicConfig`` would do
    nothing.
    """
    root = logging.getLogger()
    level, handlers, path = root.level, list(root.handlers), list(sys.path)
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in set(root.handlers) - set(handlers):
            root.removeHandler(handler)
        sys.path[:] = path
