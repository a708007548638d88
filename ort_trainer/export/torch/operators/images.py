"""Sampling and padding of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._decomp import decompositions

from .elementwise import with_zero_gradient
from .registry import Size, composite

aten = torch.ops.aten


@composite(aten.grid_sampler.default)
def _grid_sampler(input: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, align_corners: bool) -> Any:
    if input.dim() != 4:
        return aten.grid_sampler.default(input, grid, mode, padding, align_corners)
    # A NaN or infinite position would become an arbitrary index into memory.
    finite = grid.isfinite()
    grid = torch.where(finite, grid, 0.0)
    sampled = decompositions._grid_sampler_2d(input, grid, mode, padding, align_corners)  # type: ignore[no-untyped-call]
    sampled = torch.where(finite.all(-1).unsqueeze(1), sampled, math.nan)
    return with_zero_gradient(sampled, grid) if mode == 1 else sampled


@composite(aten.affine_grid_generator.default)
def _affine_grid(theta: torch.Tensor, size: Sequence[Size], align_corners: bool) -> Any:
    return decompositions.affine_grid_generator(theta, list(size), align_corners)


@composite(aten.pad.default)
def _pad(input: torch.Tensor, pad: Sequence[Size], mode: str = "constant", value: float | None = None) -> torch.Tensor:
    if mode != "replicate":
        return aten.pad.default(input, pad, mode, value)  # type: ignore[no-any-return]
    for number in range(len(pad) // 2):
        axis, size = -1 - number, input.shape[-1 - number]
        place = torch.arange(-pad[2 * number], size + pad[2 * number + 1], device=input.device)
        input = input.index_select(axis, place.clamp(0, size - 1))
    return input
