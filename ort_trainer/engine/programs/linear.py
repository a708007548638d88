"""Matrix products with oneDNN, and products of groups of rows, each group with its own matrix."""

from __future__ import annotations

import torch

from .processor import slow_mkl

# macOS's builds of PyTorch have no oneDNN, and graphs don't ask for it there.
_has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
_linear = torch.ops.mkldnn._linear_pointwise.default if _has_onednn else None
# Floating-point operations of products for which oneDNN is worth its call, which takes longer than MKL's.
_LARGE, _MEDIUM = 16e6, 4e6
# The same of a group of rows. Groups have other sizes in every step, and oneDNN prepares each new size for 0.1 ms: it
# gets a multiple of some rows, and MKL the rest.
_LARGE_GROUP, _ROWS = 64e6, 64


def is_faster(operations: float, is_transposed: bool) -> bool:
    """Returns whether oneDNN computes a product of fp32 faster than MKL.

    For the gradient of a weight, mm(t(gradient), x), it copies the transpose first, so that MKL is faster on Intel's
    processors. Small products take oneDNN longer to prepare: on one of these, 28 microseconds instead of 24 for a batch
    of 64 and a layer of 512 x 10, 42 instead of 22 for a batch of 8 and a layer of 256 x 256.

    Args:
        operations: Its floating-point operations.
        is_transposed: Whether the left operand is a transpose.
    """
    if not _has_onednn or not torch.backends.mkldnn.enabled:  # type: ignore[no-untyped-call]
        return False
    if slow_mkl():
        return operations >= (_LARGE if is_transposed else _MEDIUM)
    return operations >= _LARGE and not is_transposed


def product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns left @ right + bias, computed by the faster library.

    Args:
        left: (m, k).
        right: (k, n).
        bias: (n), or None.
    """
    operations = 2.0 * left.numel() * right.shape[1]
    if left.dtype == torch.float32 and is_faster(operations, not left.is_contiguous()):
        return linear(left, right.t(), bias)
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def linear(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns value @ weight.T + bias, computed by oneDNN's kernel.

    Args:
        value: (..., inputs), fp32.
        weight: (outputs, inputs).
        bias: (outputs), or None.
    """
    if _linear is not None and value.numel() and weight.numel():
        if bias is not None:
            bias = bias.contiguous()  # oneDNN reads a bias without its strides
        result: torch.Tensor = _linear(value, weight, bias, "none", [], "")
        return result
    return torch.nn.functional.linear(value, weight, bias)  # oneDNN does not support empty products


def grouped_mm(first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Returns ``torch._grouped_mm``: its fake form only takes bfloat16, although its kernel takes fp32 as well.

    Args:
        first: (rows, k); or (m, rows), with a matrix as ``second``.
        second: (groups, k, n), a matrix for the rows of each group; or (rows, n), for one product of each group's rows.
        ends: (groups), int32: the row after the last one of each group.

    Returns:
        (rows, n), in which rows after the last group have undefined contents; or (groups, m, n).
    """
    operations = 2.0 * first.numel() * second.shape[-1] / max(len(ends), 1)
    is_large = operations >= _LARGE_GROUP and first.dtype == torch.float32 and first.is_cpu
    if is_large and slow_mkl() and is_faster(operations, True):
        return _by_groups(first, second, ends)
    return torch._grouped_mm(first, second, offs=ends).contiguous()


def _by_groups(first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Returns what :func:`grouped_mm` does, where PyTorch's loop over the groups calls a slow MKL."""
    result, start = grouped_mm_fake(first, second, ends), 0
    for group, end in enumerate(ends.tolist()):
        rest = end - (end - start) % _ROWS
        if second.dim() == 3:
            result[start:rest] = linear(first[start:rest], second[group].t(), None)
            torch.mm(first[rest:end], second[group], out=result[rest:end])
        else:
            torch.mm(first[:, rest:end], second[rest:end], out=result[group])
            result[group] += linear(first[:, start:rest], second[start:rest].t(), None)
        start = end
    return result


def grouped_mm_fake(first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the shape that :func:`grouped_mm` gives."""
    groups = () if second.dim() == 3 else ends.shape
    return first.new_empty((*groups, first.shape[0], second.shape[-1]))


def checked_matrix(matrix: torch.Tensor, info: torch.Tensor, name: str) -> torch.Tensor:
    """Returns a copy of the result of a function such as ``torch.linalg.inv``, whose checks have no result.

    Args:
        matrix: The result: one matrix, or a batch of them.
        info: LAPACK's code for each matrix; 0 if there is a result.
        name: The function's name, for the error.

    Raises:
        torch.linalg.LinAlgError: If a matrix has no result, for instance because it is singular.
    """
    torch.ops.aten._linalg_check_errors(info, name, is_matrix=info.dim() == 0)
    return matrix.clone()
