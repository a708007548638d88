"""Measures the memory of a process while an action is repeated."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["growth"]


def resident() -> int:
    """Returns this process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(action: Callable[[int], object], count: int) -> tuple[float, list[int]]:
    """Repeats an action, and returns by how many bytes the process grows each time.

    Only the second half counts: in the first half, the caches of PyTorch, ONNX Runtime and the C library fill up,
    whereas a leak grows in both.

    Args:
        action: The action; its argument is the number of the repetition.
        count: Number of repetitions.

    Returns:
        The bytes per repetition, and the sizes in MB after each tenth.
    """
    sizes = []
    for number in range(count):
        action(number)
        if (number + 1) % (count // 10) == 0:
            sizes.append(resident())
    return (sizes[-1] - sizes[4]) / (count / 2), [size >> 20 for size in sizes]
