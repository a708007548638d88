"""Linear layers with oneDNN, and products of groups of rows, each group with its own matrix."""

from __future__ import annotations

import torch

__all__ = ["grouped_mm", "grouped_mm_fake", "linear"]

# macOS's builds of PyTorch have no oneDNN, and graphs don't ask for it there.
_has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
_linear = torch.ops.mkldnn._linear_pointwise.default if _has_onednn else None


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
        (rows, n), or (groups, m, n).
    """
    return torch._grouped_mm(first, second, offs=ends).contiguous()


def grouped_mm_fake(first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the shape that :func:`grouped_mm` gives."""
    groups = () if second.dim() == 3 else ends.shape
    return first.new_empty((*groups, first.shape[0], second.shape[-1]))
