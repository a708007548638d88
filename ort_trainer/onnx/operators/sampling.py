"""Bilinear interpolation of images at points between pixels."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def bilinear(images: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Interpolates images at points between pixels; pixels outside of the image are zeros.

    Args:
        images: Of the shape N x C x H x W.
        y: The rows of points, N x P.
        x: Their columns, N x P.

    Returns:
        The values, N x C x P.
    """
    total = torch.zeros_like(images.flatten(-2)[..., :1])
    for values, factor in corners(images, y, x):
        total = total + values * factor.unsqueeze(1)
    return total


def corners(images: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the four pixels around each point, N x C x P, and their interpolation weights, N x P.

    The arguments are those of :func:`bilinear`.
    """
    height, width = images.shape[-2:]
    top, left = y.floor(), x.floor()
    down, right = y - top, x - left
    flat = images.flatten(-2)
    for row, of_row in ((top, 1 - down), (top + 1, down)):
        for column, of_column in ((left, 1 - right), (left + 1, right)):
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            index = row.clamp(0, height - 1).long() * width + column.clamp(0, width - 1).long()
            values = flat.gather(-1, index.unsqueeze(1).expand(-1, flat.shape[1], -1))
            yield values, torch.where(inside, of_row * of_column, torch.zeros_like(of_row))
