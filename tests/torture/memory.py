"""How much memory a process has, while something is done again and again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["growth"]


def resident() -> int:
    """Returns the bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(action: Callable[[int], object], count: int) -> tuple[float, list[int]]:
    """Does something ``count`` times, and returns by how many bytes each time makes the process larger.

    The first half is left out: caches of PyTorch, ONNX Runtime and the C library fill up then. What is kept at every
    time grows in the second half as in the first; so the growth from the middle to the end counts.

    Args:
        action: What is done; it is given the number of the time.
        count: How often.

    Returns:
        The bytes, and the sizes in MB after each tenth.
    """
    sizes = []
    for number in range(count):
        action(number)
        if (number + 1) % (count // 10) == 0:
            sizes.append(resident())
    return (sizes[-1] - sizes[4]) / (count / 2), [size >> 20 for size in sizes]
