"""Linear layers by oneDNN."""

from __future__ import annotations

import torch

__all__ = ["linear"]

_linear = torch.ops.mkldnn._linear_pointwise.default


def linear(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """Returns value @ weight.T + bias, and a function of it, by oneDNN's kernel.

    Args:
        value: (..., inputs), fp32.
        weight: (outputs, inputs).
        bias: (outputs), or None.
        activation: ``none`` or ``relu``.
    """
    if value.numel() and weight.numel():
        result: torch.Tensor = _linear(value, weight, bias, activation, [], "")
        return result
    result = torch.nn.functional.linear(value, weight, bias)  # oneDNN has no products without elements
    return result.relu_() if activation == "relu" else result
