"""Products and running sums, where torch.onnx lacks them, and means of what may be empty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .registry import decomposition, keep

aten = torch.ops.aten


# ONNX has these products, but not what PyTorch decomposes them into.
keep(aten.prod.default, aten.prod.dim_int)


@decomposition(aten.mean.default, aten.mean.dim)
def _mean(
    input: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """The mean of a number of elements that depends on values: of none, ONNX Runtime's is 0, and PyTorch's NaN."""
    if not any(free_unbacked_symbols(size) for size in input.shape if isinstance(size, torch.SymInt)):
        return NotImplemented
    axes = dim or range(input.dim())
    count = math.prod(input.shape[axis] for axis in axes)
    return input.sum(list(axes), keepdim, dtype=dtype) / count


@decomposition(aten.cumprod.default)
def _cumprod(input: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Computes running products as products over a lower triangle: ONNX has no cumulative product."""
    input = input if dtype is None else input.to(dtype)
    if input.dim() == 0:
        return input.clone()
    place = torch.arange(input.shape[dim], device=input.device)
    upto = torch.where(place <= place[:, None], input.movedim(dim, -1).unsqueeze(-2), 1)
    return upto.prod(-1).movedim(-1, dim)


@decomposition(aten.logcumsumexp.default)
def _logcumsumexp(input: torch.Tensor, dim: int) -> torch.Tensor:
    """Computes running sums in the same way; each subtracts its own maximum first, if that is finite."""
    if input.dim() == 0:
        return input.clone()
    place = torch.arange(input.shape[dim], device=input.device)
    upto = torch.where(place <= place[:, None], input.movedim(dim, -1).unsqueeze(-2), -math.inf)
    highest = upto.amax(-1, keepdim=True)
    highest = torch.where(highest.isinf(), 0.0, highest)
    total = (upto - highest).exp().sum(-1).log() + highest.squeeze(-1)
    return total.movedim(-1, dim)
