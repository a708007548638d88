"""The random bits of dropout masks: what the trainer and the training API draw alike, whoever draws which part.

Four elements share a 64-bit number of NumPy's SFC64. An element is kept where its 16 bits, read as a signed number, are
not below a threshold. Each mask has streams of its own, which follow from the key of the step, the number of the mask
in the model, and the block of the mask.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["KEYS", "NEVER", "draw_words", "threshold", "words_for"]

KEYS = 2**62
"""Keys of a step are below it."""
_LEVELS = 1 << 16
NEVER = _LEVELS // 2
"""The threshold that 16 bits can't reach."""
# Words of a mask that one stream draws: enough of them for its seeding (ten microseconds) not to count.
_BLOCK = 1 << 16


def words_for(count: int) -> int:
    """Returns how many words the mask of so many elements has."""
    return -(-count // 4)


def draw_words(key: int, number: int, words: int) -> np.ndarray[Any, Any]:
    """Returns the random numbers of a mask: new, uint64 [words].

    Args:
        key: Of the step.
        number: Of the mask in the model.
        words: From :func:`words_for`.
    """
    drawn = [
        np.random.SFC64(np.random.SeedSequence((key, number, block))).random_raw(min(words - block, _BLOCK))
        for block in range(0, words, _BLOCK)
    ]
    return drawn[0] if len(drawn) == 1 else np.concatenate([*drawn, np.empty(0, np.uint64)])


def threshold(kept: float) -> int:
    """Returns the signed 16-bit number from which on an element is kept; :data:`NEVER` and more where none is.

    Args:
        kept: Probability that an element is kept; it is rounded to a multiple of 1 / 65536.
    """
    return round((1.0 - kept) * _LEVELS) - _LEVELS // 2
