"""Gives memory back that an export needed for a moment."""

from __future__ import annotations

import ctypes
import gc
import sys

__all__ = ["return_freed_memory"]


def return_freed_memory() -> None:
    """Collects the cycles of the exporter's graphs and asks the C library to return the freed pages.

    glibc keeps what was freed for later, so that the memory of a finished export would count on top of training's
    for good. Elsewhere than on Linux with glibc only the collection happens.
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
