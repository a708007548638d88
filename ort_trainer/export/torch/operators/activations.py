"""Softmax and other activations."""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp import decomposition_table

from .registry import decomposition

aten = torch.ops.aten
prims = torch.ops.prims


# Has the same erf as its backward pass, so that it is computed once.
decomposition(aten.gelu.default)(decomposition_table[aten.gelu.default])


@decomposition(aten._softmax.default)
def _softmax(input: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    """Computes doubles by the formula: ONNX Runtime's operator is wrong for NaN and infinities."""
    if input.dtype != torch.float64:
        return NotImplemented
    growth = (input - input.amax(dim, keepdim=True)).exp()
    return growth / growth.sum(dim, keepdim=True)


@decomposition(aten._log_softmax.default)
def _log_softmax(input: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    """Computes doubles by the formula, for the same reason."""
    if input.dtype != torch.float64:
        return NotImplemented
    less = input - input.amax(dim, keepdim=True)
    return less - less.exp().sum(dim, keepdim=True).log()


@decomposition(aten._safe_softmax.default)
def _safe_softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Computes softmax with 0 in rows that are all -inf; a row's maximum is cheaper to test than all its elements."""
    input = input if dtype is None else input.to(dtype)
    # ONNX Runtime ignores NaN in the maximum, but not in the sum.
    masked = prims.amax.default(input, [dim % input.dim()]).unsqueeze(dim) == float("-inf")
    masked = masked & (input.sum(dim, keepdim=True) == float("-inf"))
    return torch.where(masked, 0.0, torch.softmax(input, dim))
