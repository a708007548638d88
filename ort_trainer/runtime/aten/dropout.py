"""Dropout by 16-bit random numbers: masks that are drawn where they are needed, one byte an element.

PyTorch's own ``bernoulli_`` draws one number after the other, on one thread: 6 to 16 ns an element. Here four elements
share a 64-bit number of NumPy's SFC64, and an element is kept where its 16 bits are not below p * 65536 (so p is
rounded to a multiple of 1 / 65536, by at most 0.000008). Each mask has streams of its own, which follow from the key of
the step, the number of the dropout in the model, and the block of the mask: whoever draws which block, and in whatever
order, the numbers are the same. (Drawn on two threads at once they cost more than on one, where PyTorch's own threads
compute.)

A mask is packed: a word of 32 bits has one byte for an element in each quarter of the tensor, so that taking it apart
is shifts and products of whole words, which PyTorch does with vector instructions; its conversions between bytes and
floats are five times slower.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch

from ...masks import NEVER, draw_words, threshold, words_for

__all__ = ["apply_mask", "draw_mask", "unpack_mask", "unpacked", "words_for"]

# What moves the lowest bit of a byte to the top of its word: a row for each quarter of the tensor.
_SHIFTS = torch.tensor([[31], [23], [15], [7]], dtype=torch.int32)


def draw_mask(key: torch.Tensor, count: int, number: int, kept: float) -> torch.Tensor:
    """Returns a packed mask: int32, a word for four elements, with a byte that is 1 where an element is kept.

    Args:
        key: Of the step, a whole number.
        count: Elements.
        number: Of the dropout in the model.
        kept: Probability that an element is kept.
    """
    words, lowest = words_for(count), threshold(kept)
    if lowest >= NEVER or not words:  # PyTorch can't view an empty array of NumPy as smaller numbers
        return torch.zeros(words, dtype=torch.int32)
    # From 64-bit numbers to words: comparing in place keeps two bytes an element, and half of the words move aside.
    raw = torch.from_numpy(draw_words(int(key), number, words).view(np.int64))
    halves = raw.view(torch.int16).ge_(lowest).view(torch.int32)
    return halves[words:].bitwise_left_shift(8).bitwise_or_(halves[:words])


def unpack_mask(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a packed mask as booleans in the shape of a tensor."""
    return unpacked(mask, like.shape).view(torch.bool)


def unpacked(mask: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns a packed mask with a byte an element, 0 or 1, in a given shape."""
    count = int(np.prod(shape, dtype=np.int64))
    return mask.view(torch.uint8).view(-1, 4).t().reshape(-1)[:count].view(tuple(shape))


def apply_mask(value: torch.Tensor, mask: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns a tensor times a factor where a mask keeps it, and times zero elsewhere.

    Args:
        value: Any floating-point tensor.
        mask: From :func:`draw_mask`, for as many elements.
        factor: 1 / (1 - p).
    """
    (bits,) = struct.unpack("i", struct.pack("f", factor))
    # The byte's lowest bit, over a whole word: all ones or zero, and with it the factor or zero.
    noise = mask.bitwise_left_shift(_SHIFTS).bitwise_right_shift_(31).bitwise_and_(bits).view(torch.float32)
    noise = noise.view(-1)[: value.numel()].view(value.shape)
    return noise.mul_(value) if value.dtype == torch.float32 else noise.to(value.dtype).mul_(value)
