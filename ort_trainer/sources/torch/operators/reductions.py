"""Products and running sums, where torch.onnx lacks them."""

from __future__ import annotations

import math

import torch

from .registry import decomposition, keep

aten = torch.ops.aten


# ONNX has these products; what PyTorch makes of them it has not.
keep(aten.prod.default, aten.prod.dim_int)


@decomposition(aten.cumprod.default)
def _cumprod(input: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Running products as products over the lower triangle of a square: ONNX has no scan by multiplication."""
    input = input if dtype is None else input.to(dtype)
    if input.dim() == 0:
        return input.clone()
    place = torch.arange(input.shape[dim], device=input.device)
    upto = torch.where(place <= place[:, None], input.movedim(dim, -1).unsqueeze(-2), 1)
    return upto.prod(-1).movedim(-1, dim)


@decomposition(aten.logcumsumexp.default)
def _logcumsumexp(input: torch.Tensor, dim: int) -> torch.Tensor:
    """Likewise, each sum less its own maximum, if that is finite."""
    if input.dim() == 0:
        return input.clone()
    place = torch.arange(input.shape[dim], device=input.device)
    upto = torch.where(place <= place[:, None], input.movedim(dim, -1).unsqueeze(-2), -math.inf)
    highest = upto.amax(-1, keepdim=True)
    highest = torch.where(highest.isinf(), 0.0, highest)
    total = (upto - highest).exp().sum(-1).log() + highest.squeeze(-1)
    return total.movedim(-1, dim)
