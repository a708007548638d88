"""What becomes of memory that is freed: an export's goes back to the system, a step's is kept for the next one."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys

__all__ = ["keep_freed_memory", "return_freed_memory"]

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 32 * 2**20
_NEVER = 2**31 - 1


@functools.cache
def keep_freed_memory() -> None:
    """Asks the C library to keep what is freed, for the whole process.

    PyTorch has no memory of its own on the CPU. What a step frees, glibc would give back to the system, and the next
    step would ask for it again, page by page: a tenth of a transformer's step, a quarter of that of a convolutional
    net. The process keeps what it needed most at one time; blocks above 32 MiB, the largest limit that glibc allows, do
    go back. Elsewhere than on Linux with glibc nothing happens.
    """
    if sys.platform == "linux":
        option = getattr(ctypes.CDLL(None), "mallopt", None)
        if option is not None:
            option(_MMAP_THRESHOLD, _LARGEST)
            option(_TRIM_THRESHOLD, _NEVER)


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
