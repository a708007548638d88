"""Settings of the C library for freed memory: returns an export's to the system, and keeps a step's for the next."""

from __future__ import annotations

import ctypes
import functools
import gc
import sys

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 32 * 2**20
_NEVER = 2**31 - 1


@functools.cache
def keep_freed_memory() -> None:
    """Tells the C library to keep freed memory, for the whole process.

    PyTorch does not cache memory on the CPU. glibc would return the memory that a step frees to the system, and the
    next step would request it again, page by page: a tenth of a transformer's step, a quarter of a convolutional
    net's. With this setting the process keeps its peak memory, except blocks above 32 MiB, the largest limit that glibc
    allows. Without glibc it does nothing.
    """
    if sys.platform == "linux":
        option = getattr(ctypes.CDLL(None), "mallopt", None)
        if option is not None:
            option(_MMAP_THRESHOLD, _LARGEST)
            option(_TRIM_THRESHOLD, _NEVER)


def return_freed_memory() -> None:
    """Collects the cycles of the exporter's graphs and tells the C library to return freed pages to the system.

    glibc keeps freed memory for later, so the memory of a finished export would permanently add to training's.
    Without glibc, it only collects the cycles.
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
