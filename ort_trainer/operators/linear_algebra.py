"""Products of matrices, norms and distances."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..engine.programs import operators  # noqa: F401 - which defines the package's own
from ..fx.operator_table import composite, decomposition, replacement, untranslated, whole
from .dtypes import is_whole
from .elementwise import with_zero_gradient

aten = torch.ops.aten
ort_ops = torch.ops.ort_trainer


# No ONNX Runtime loads torch.onnx's translation.
untranslated(aten._linalg_det.default)


@decomposition(aten.mm.default, aten.bmm.default)
def _product(first: torch.Tensor, second: torch.Tensor) -> Any:
    """Returns zeros for a sum over no elements, where ONNX Runtime leaves the memory uninitialized."""
    if not isinstance(first.shape[-1], int) or first.shape[-1] != 0:
        return NotImplemented
    return first.new_zeros([*first.shape[:-1], *second.shape[-1:]])


def _product_and_sum(operator: Any) -> Callable[..., Any]:
    def product(
        input: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Any:
        """Decomposes what ONNX's product with a sum lacks: integers, factors of doubles, and empty matrices."""
        is_empty = isinstance(first.shape[-1], int) and first.shape[-1] == 0
        if not is_empty and not is_whole(input) and (input.dtype != torch.float64 or alpha == beta == 1):
            return NotImplemented
        return beta * input + alpha * operator(first, second)

    return product


decomposition(aten.addmm.default)(_product_and_sum(aten.mm.default))
decomposition(aten.addmv.default)(_product_and_sum(aten.mv.default))
decomposition(aten.baddbmm.default)(_product_and_sum(aten.bmm.default))
decomposition(aten.addbmm.default)(_product_and_sum(lambda first, second: aten.bmm.default(first, second).sum(0)))


_of_groups = torch._grouped_mm


@replacement(torch, "_grouped_mm")
def _grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes the layers of all experts of a mixture by an operator of our own."""
    if mat_a.dim() != 2 or mat_b.dim() != 3 or offs is None or bias is not None or out_dtype not in (None, mat_a.dtype):
        return _of_groups(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)
    result: torch.Tensor = ort_ops.grouped_mm(mat_a, mat_b, offs)
    return result


def _keep_groups(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_mm_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    first, second, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    return ort_ops.grouped_mm(gradient, second.mT, ends), ort_ops.grouped_mm(first.mT, gradient, ends), None


torch.library.register_autograd("ort_trainer::grouped_mm", _grouped_mm_backward, setup_context=_keep_groups)


@composite("transformers.grouped_mm_fallback.default", for_pytorch=True)
def _grouped_mm_of_transformers(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Replaces the fallback that transformers uses while a model is compiled or exported."""
    result: torch.Tensor = ort_ops.grouped_mm(input, weight, offs)
    return result


@decomposition(ort_ops.grouped_mm.default)
def _grouped_mm_of_all(first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiplies all rows with all groups, and zeroes the rows of other groups: ONNX has no product of groups."""
    of_rows = second.dim() == 3
    groups, rows = ends.shape[0], torch.arange(first.shape[0 if of_rows else 1], device=first.device)
    group = (rows[:, None] >= ends).sum(1)  # number of groups that end before the row
    chosen = (group[:, None] == torch.arange(groups, device=first.device)).to(first.dtype)
    if of_rows:
        return (chosen[:, :, None] * first[:, None, :]).flatten(1) @ second.flatten(0, 1)
    return (chosen.mT[:, None, :] * first) @ second


torch.library.register_autograd("ort_trainer::checked_matrix", lambda ctx, gradient: (gradient, None, None))


@whole(aten.linalg_inv.default, aten.inverse.default)
def _inverse(matrix: torch.Tensor) -> torch.Tensor:
    """Checks the result in the operator that returns it: PyTorch's own check is a side effect, which a graph lacks."""
    return ort_ops.checked_matrix(*aten.linalg_inv_ex.default(matrix), "linalg.inv")  # type: ignore[no-any-return]


@whole(aten.linalg_cholesky.default)
def _cholesky(matrix: torch.Tensor, *, upper: bool = False) -> torch.Tensor:
    """Checks the result as above."""
    factor = aten.linalg_cholesky_ex.default(matrix, upper=upper)
    return ort_ops.checked_matrix(*factor, "linalg.cholesky")  # type: ignore[no-any-return]


@whole(aten.linalg_solve.default)
def _solve(matrix: torch.Tensor, right: torch.Tensor, *, left: bool = True) -> torch.Tensor:
    """Checks the result as above."""
    solution = aten.linalg_solve_ex.default(matrix, right, left=left)
    return ort_ops.checked_matrix(*solution, "torch.linalg.solve")  # type: ignore[no-any-return]


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
    """Computes norms by their formulas, in fp32 for 16-bit floats: ONNX Runtime's are wrong at infinities and NaN."""
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
    """Returns (sum |x - y|^p)^(1/p) for all pairs of rows, with PyTorch's gradients for NaN and equal points."""
    difference = (first.unsqueeze(-2) - second.unsqueeze(-3)).abs()
    # The gradient of abs(NaN) is zero, but that of its distance is NaN.
    difference = difference * torch.where(difference.isnan(), math.nan, 1.0)
    if p == 0:
        return with_zero_gradient(
            torch.where(difference.isnan(), math.nan, (difference != 0).to(first.dtype)).sum(-1), difference
        )
    if p == 1:
        return difference.sum(-1)
    if p == math.inf:
        return _chebyshev(difference)
    apart = difference != 0  # true for NaN
    total = torch.where(apart, torch.where(apart, difference, 1.0).pow(p), 0.0).sum(-1)
    # The gradient of equal points is zero, but a power below 1 has no finite gradient at zero.
    return torch.where(total != 0, torch.where(total != 0, total, 1.0).pow(1 / p), 0.0)


def _chebyshev(difference: torch.Tensor) -> torch.Tensor:
    """Returns the maximum along the last dimension; every element that equals it gets the whole gradient."""
    largest = difference.amax(-1)
    value = largest.detach()
    total = torch.where(difference == value.unsqueeze(-1), difference, 0.0).sum(-1)
    return torch.where(value.isfinite(), value + (total - total.detach()), largest)


@composite(aten.pdist.default)
def _pdist(points: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    first, second = torch.triu_indices(int(points.shape[0]), int(points.shape[0]), 1)
    return _cdist(points, points, p)[first, second]
