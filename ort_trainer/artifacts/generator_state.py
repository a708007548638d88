"""The Mersenne Twister as NumPy has it, which a checkpoint of an export holds, and as PyTorch has it."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["to_numpy", "to_torch"]

Array = np.ndarray[Any, Any]

_WORDS = 624
# PyTorch's: seed, how many numbers are left, whether it is seeded, the next one's position, the words, 64 bits each,
# and a normal number that it has kept.
_TORCH = np.dtype(
    [("seed", "<u8"), ("left", "<i4"), ("seeded", "<i4"), ("next", "<u8"), ("words", "<u8", _WORDS), ("normal", "V40")]
)


def to_numpy(state: Array) -> Array:
    """Returns the words and the position in them, uint32 [625], of the bytes that PyTorch's generator gives."""
    (found,) = state.view(_TORCH)
    return np.array([*found["words"], _WORDS if found["left"] == 1 else found["next"]], np.uint32)


def to_torch(state: Array) -> Array:
    """Returns the bytes for PyTorch's generator of what :func:`to_numpy` gives."""
    words, position = state[:-1], int(state[-1])
    found = np.zeros(1, _TORCH)
    found["left"], found["seeded"], found["next"], found["words"] = _WORDS + 1 - position, 1, position, words
    return found.view(np.uint8)
