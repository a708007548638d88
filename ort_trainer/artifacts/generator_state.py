"""Converts the state of the Mersenne Twister between NumPy's layout, used in exported checkpoints, and PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["to_numpy", "to_torch"]

Array = np.ndarray[Any, Any]

_WORDS = 624
# PyTorch's layout: the seed, how many numbers are left, whether it is seeded, the position of the next number, the
# words of 64 bits each, and a cached normal number.
_TORCH = np.dtype(
    [("seed", "<u8"), ("left", "<i4"), ("seeded", "<i4"), ("next", "<u8"), ("words", "<u8", _WORDS), ("normal", "V40")]
)


def to_numpy(state: Array) -> Array:
    """Returns the words and the position in them, uint32 [625], from the bytes of PyTorch's generator."""
    (found,) = state.view(_TORCH)
    return np.array([*found["words"], _WORDS if found["left"] == 1 else found["next"]], np.uint32)


def to_torch(state: Array) -> Array:
    """Returns the bytes for PyTorch's generator, from the words and the position."""
    words, position = state[:-1], int(state[-1])
    found = np.zeros(1, _TORCH)
    found["left"], found["seeded"], found["next"], found["words"] = _WORDS + 1 - position, 1, position, words
    return found.view(np.uint8)
