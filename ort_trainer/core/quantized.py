"""Weights rounded to 8 or 4 bits, symmetrically around zero."""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import shown

KINDS = ("int8", "int4")

Array = np.ndarray[Any, Any]


def check_kind(kind: object, what: str = "kind", optional: bool = False) -> None:
    """Checks the name of a type of quantized weights.

    Args:
        kind: The name.
        what: What the error calls it.
        optional: Whether it may also be None.

    Raises:
        ValueError: If it is unknown.
    """
    if kind not in KINDS and not (optional and kind is None):
        raise ValueError(
            f"{what} must be {'None or ' if optional else ''}one of {list(KINDS)}, but {shown(kind)} was given"
        )


def int8_rows(value: Array) -> tuple[Array, Array]:
    """Returns integers from -127 to 127 in the shape of the value, and the scale of each row, max(abs(row)) / 127."""
    rows = value.reshape(len(value), -1)
    scale = _scale(np.abs(rows).max(1), 127)
    return np.rint(rows / scale[:, None]).astype(np.int8).reshape(value.shape), scale


def int4_numbers(value: Array, size: int) -> tuple[Array, Array]:
    """Returns integers from -7 to 7 plus 8, and the scale of each block, max(abs(block)) / 7.

    Args:
        value: The weight; rows are padded with zeros to whole blocks.
        size: The number of consecutive elements of a row that share a scale.

    Returns:
        Arrays of the shapes (rows, blocks, size), uint8, and (rows, blocks).
    """
    rows = value.reshape(len(value), -1)
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % size)))
    blocks = padded.reshape(len(rows), -1, size)
    scale = _scale(np.abs(blocks).max(2), 7)
    return (np.rint(blocks / scale[..., None]) + 8).astype(np.uint8), scale


def int4_blocks(value: Array, size: int) -> tuple[Array, Array]:
    """Returns :func:`int4_numbers`, two in a byte, the first in the low half: (rows, blocks, size / 2)."""
    numbers, scale = int4_numbers(value, size)
    return numbers[..., ::2] | (numbers[..., 1::2] << 4), scale


def _scale(largest: Array, steps: int) -> Array:
    """Returns the scale that maps the largest magnitude to a number of steps; 1 for zeros."""
    scale = np.where(largest > 0, largest / steps, 1).astype(np.float32)
    # The scale of tiny weights would underflow to 0, by which they are divided.
    return np.maximum(scale, np.finfo(np.float32).tiny)
