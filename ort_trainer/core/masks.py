"""Dropout masks, which the trainer and the training API draw alike.

Four elements share a 64-bit number of NumPy's SFC64. An element is kept if its 16 bits, read as a signed number, are
not below a threshold. Each block of a mask has its own stream, seeded by the key of the step, the number of the mask in
the model, and the block's offset, so the bits do not depend on who draws which block.

A mask is packed: a 32-bit word has one byte for an element in each quarter of the tensor. Unpacking takes shifts and
products of whole words, which PyTorch vectorizes; its conversions between bytes and floats are five times slower.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

KEYS = 2**62
"""The exclusive upper bound of step keys."""
_LEVELS = 1 << 16
# Words that one stream draws: enough to make its seeding (ten microseconds) negligible.
_BLOCK = 1 << 16


def words_for(count: int) -> int:
    """Returns the number of words in a mask of ``count`` elements."""
    return -(-count // 4)


def draw_mask(key: int, count: int, number: int, kept: float) -> Array:
    """Returns a packed mask: int32, one word per four elements, with a byte for each that is 1 if it is kept.

    Args:
        key: Key of the step.
        count: Number of elements.
        number: Number of the mask in the model.
        kept: Probability that an element is kept, which is rounded to a multiple of 1 / 65536.
    """
    words, halves = words_for(count), _draw(key, count, number, kept)
    packed = halves[words:]
    packed <<= 8
    packed |= halves[:words]
    return packed


def draw_unpacked(key: int, count: int, number: int, kept: float) -> Array:
    """Returns the mask that :func:`draw_mask` packs, with one byte per element: bool [count]."""
    halves = _draw(key, count, number, kept)
    mask = np.empty(2 * len(halves), np.bool_)
    numbers = mask.view(np.uint8)
    np.copyto(numbers[: len(halves)], halves, casting="unsafe")  # drops the upper half of a word
    halves >>= 16
    np.copyto(numbers[len(halves) :], halves, casting="unsafe")
    return mask[:count]


def _draw(key: int, count: int, number: int, kept: float) -> Array:
    """Returns two words for every word of a mask, int32: two quarters, then the other two in the upper halves."""
    words, lowest = words_for(count), round((1.0 - kept) * _LEVELS) - _LEVELS // 2
    if lowest >= _LEVELS // 2:  # above every 16-bit number
        return np.zeros(2 * words, np.int32)
    drawn = [
        np.random.SFC64(np.random.SeedSequence((key, number, block))).random_raw(min(words - block, _BLOCK))
        for block in range(0, words, _BLOCK)
    ]
    raw = (drawn[0] if len(drawn) == 1 else np.concatenate([*drawn, np.empty(0, np.uint64)])).view(np.int16)
    # The comparison in place leaves two bytes per element.
    return np.greater_equal(raw, lowest, out=raw).view(np.int32)


def unpacked(mask: Array, count: int) -> Array:
    """Returns a packed mask with one byte per element: uint8 [count]."""
    return np.ascontiguousarray(mask.view(np.uint8).reshape(-1, 4).T).reshape(-1)[:count]
