"""The random bits of dropout masks, shared by the trainer and the training API.

Four elements share a 64-bit number of NumPy's SFC64. An element is kept if its 16 bits, read as a signed number, are
not below a threshold. Each block of a mask has its own stream, seeded by the key of the step, the number of the mask in
the model, and the block's offset, so the bits do not depend on who draws which block.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["KEYS", "NEVER", "draw_words", "threshold", "words_for"]

KEYS = 2**62
"""The exclusive upper bound of step keys."""
_LEVELS = 1 << 16
NEVER = _LEVELS // 2
"""A threshold above every 16-bit number."""
# Words that one stream draws: enough to make its seeding (ten microseconds) negligible.
_BLOCK = 1 << 16


def words_for(count: int) -> int:
    """Returns the number of words in a mask of ``count`` elements."""
    return -(-count // 4)


def draw_words(key: int, number: int, words: int) -> np.ndarray[Any, Any]:
    """Returns the random numbers of a mask: new, uint64 [words].

    Args:
        key: Key of the step.
        number: Number of the mask in the model.
        words: From :func:`words_for`.
    """
    drawn = [
        np.random.SFC64(np.random.SeedSequence((key, number, block))).random_raw(min(words - block, _BLOCK))
        for block in range(0, words, _BLOCK)
    ]
    return drawn[0] if len(drawn) == 1 else np.concatenate([*drawn, np.empty(0, np.uint64)])


def threshold(kept: float) -> int:
    """Returns the smallest signed 16-bit number that keeps an element; at least :data:`NEVER` if none does.

    Args:
        kept: Probability that an element is kept, which is rounded to a multiple of 1 / 65536.
    """
    return round((1.0 - kept) * _LEVELS) - _LEVELS // 2
