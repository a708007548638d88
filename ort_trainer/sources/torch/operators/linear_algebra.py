"""Products of matrices, norms and distances."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .dtypes import is_whole
from .elementwise import with_zero_gradient
from .registry import composite, decomposition, untranslated

aten = torch.ops.aten


# torch.onnx translates it into what no ONNX Runtime loads.
untranslated(aten._linalg_det.default)


@decomposition(aten.mm.default, aten.bmm.default)
def _product(first: torch.Tensor, second: torch.Tensor) -> Any:
    """A sum over no elements is zero; ONNX Runtime leaves the memory as it finds it."""
    if not isinstance(first.shape[-1], int) or first.shape[-1] != 0:
        return NotImplemented
    return first.new_zeros([*first.shape[:-1], *second.shape[-1:]])


def _product_and_sum(operator: Any) -> Callable[..., Any]:
    def product(
        input: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Any:
        """ONNX has a product with a sum for fractions only, with factors of fp32, and of no empty matrices."""
        is_empty = isinstance(first.shape[-1], int) and first.shape[-1] == 0
        if not is_empty and not is_whole(input) and (input.dtype != torch.float64 or alpha == beta == 1):
            return NotImplemented
        return beta * input + alpha * operator(first, second)

    return product


decomposition(aten.addmm.default)(_product_and_sum(aten.mm.default))
decomposition(aten.baddbmm.default)(_product_and_sum(aten.bmm.default))


@composite(aten.bilinear.default)
def _bilinear(first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    product = torch.einsum("...i,oij,...j->...o", first, weight, second)
    return product if bias is None else product + bias


@decomposition(aten.linalg_vector_norm.default)
def _vector_norm(
    input: torch.Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Norms by their formulas: ONNX Runtime's are wrong at infinities and NaN. 16-bit floats are summed in fp32."""
    dims = list(range(input.dim())) if dim is None else list(dim)
    dtype = dtype or input.dtype
    size = input.to(torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype).abs()
    if ord == math.inf:
        result = size.amax(dims, keepdim=keepdim)
    elif ord == -math.inf:
        result = size.amin(dims, keepdim=keepdim)
    elif ord == 0:
        result = (size != 0).to(size.dtype).sum(dims, keepdim=keepdim)
    elif ord == 1:
        result = size.sum(dims, keepdim=keepdim)
    elif ord == 2:
        result = (size * size).sum(dims, keepdim=keepdim).sqrt()
    else:
        result = size.pow(ord).sum(dims, keepdim=keepdim).pow(1 / ord)
    return result.to(dtype)


@composite(aten.cdist.default)
def _cdist(first: torch.Tensor, second: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> torch.Tensor:
    difference = (first.unsqueeze(-2) - second.unsqueeze(-3)).abs()
    # The absolute value of NaN has a gradient of zero, its distance has none.
    difference = difference * torch.where(difference.isnan(), math.nan, 1.0)
    if p == 0:
        return with_zero_gradient(
            torch.where(difference.isnan(), math.nan, (difference != 0).to(first.dtype)).sum(-1), difference
        )
    if p == 1:
        return difference.sum(-1)
    if p == math.inf:
        return _chebyshev(difference)
    apart = difference != 0  # NaN is
    total = torch.where(apart, torch.where(apart, difference, 1.0).pow(p), 0.0).sum(-1)
    # The gradient of equal points is zero, and a power below 1 has none at zero.
    return torch.where(total != 0, torch.where(total != 0, total, 1.0).pow(1 / p), 0.0)


def _chebyshev(difference: torch.Tensor) -> torch.Tensor:
    """Returns the largest along the last dimension; each that equals it has the whole gradient."""
    largest = difference.amax(-1)
    value = largest.detach()
    total = torch.where(difference == value.unsqueeze(-1), difference, 0.0).sum(-1)
    return torch.where(value.isfinite(), value + (total - total.detach()), largest)


@composite(aten.pdist.default)
def _pdist(points: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    first, second = torch.triu_indices(int(points.shape[0]), int(points.shape[0]), 1)
    return _cdist(points, points, p)[first, second]
