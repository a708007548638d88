"""Dropout with 16-bit random numbers: masks with one byte per element, drawn inside the graph.

PyTorch's own ``bernoulli_`` draws one number after the other on one thread: 6 to 16 ns per element. Here four elements
share a 64-bit number of NumPy's SFC64, and an element is kept if its 16 bits are not below p * 65536 (so p is rounded
to a multiple of 1 / 65536, by at most 0.000008). Each block of a mask has its own stream, seeded by the key of the
step, the number of the dropout in the model, and the block's offset, so the numbers do not depend on who draws which
block, or in which order. (Drawing on two threads costs more than on one, because PyTorch's threads compute as well.)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch

from ...core import masks

# Shifts that move the lowest bit of each byte to the top of its int32: a row for each quarter of the tensor.
_SHIFTS = torch.tensor([[31], [23], [15], [7]], dtype=torch.int32)


def draw_mask(key: torch.Tensor, count: int, number: int, kept: float | torch.Tensor) -> torch.Tensor:
    """Returns a packed mask: int32, one word per four elements, with a byte for each that is 1 if it is kept.

    Args:
        key: Key of the step, an integer.
        count: Number of elements.
        number: Number of the dropout in the model.
        kept: Probability that an element is kept.
    """
    drawn = torch.from_numpy(masks.draw_mask(int(key), count, number, float(kept)))
    return drawn if count else torch.zeros(0, dtype=torch.int32)  # PyTorch can't view an empty NumPy array


def draw_unpacked(key: torch.Tensor, count: int, number: int, kept: float | torch.Tensor) -> torch.Tensor:
    """Returns the mask that :func:`draw_mask` packs, with one byte per element: bool [count]."""
    drawn = torch.from_numpy(masks.draw_unpacked(int(key), count, number, float(kept)))
    return drawn if count else torch.zeros(0, dtype=torch.bool)


def unpack_mask(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a packed mask as booleans in the shape of a tensor."""
    return unpacked(mask, like.shape).view(torch.bool)


def unpacked(mask: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns a packed mask with one byte per element, 0 or 1, in a given shape.

    Byte b of word w is element b * words + w, so the transposition puts the elements in order.
    """
    count = int(np.prod(shape, dtype=np.int64))
    return mask.view(torch.uint8).view(-1, 4).t().reshape(-1)[:count].view(tuple(shape))


def apply_mask(value: torch.Tensor, mask: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns a tensor times a factor where the mask keeps elements, and zero elsewhere.

    Args:
        value: Any floating-point tensor.
        mask: From :func:`draw_mask`, for the same number of elements.
        factor: 1 / (1 - p).
    """
    (bits,) = struct.unpack("i", struct.pack("f", factor))
    # Spreads the byte's lowest bit over a whole word, all ones or zeros, whose AND gives the factor or zero.
    noise = mask.bitwise_left_shift(_SHIFTS).bitwise_right_shift_(31).bitwise_and_(bits).view(torch.float32)
    noise = noise.view(-1)[: value.numel()].view(value.shape)
    return noise.mul_(value) if value.dtype == torch.float32 else noise.to(value.dtype).mul_(value)
