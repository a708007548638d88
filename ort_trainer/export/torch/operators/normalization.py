"""Normalization layers that torch.onnx translates wrongly, or not for all dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp import decomposition_table

from .registry import composite, decomposition

aten = torch.ops.aten


# torch.onnx translates these into inference batch norm: the loss is wrong, without an error.
for _operator in (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_batch_norm.default,
):
    decomposition(_operator)(decomposition_table[_operator])


@decomposition(aten.native_layer_norm.default)
def _layer_norm(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> Any:
    """Computes layer norm of fp16 values with fp32 weights in fp32: autocast produces it and ONNX does not have it.

    Doubles are computed by the formula, because ONNX computes their statistics in fp32.
    """
    if input.dtype == torch.float64:
        axes = list(range(input.dim() - len(normalized_shape), input.dim()))
        mean = input.mean(axes, keepdim=True)
        rstd = (((input - mean) ** 2).mean(axes, keepdim=True) + eps).rsqrt()
        output = (input - mean) * rstd
        output = output if weight is None else output * weight
        return output if bias is None else output + bias, mean, rstd
    wide = torch.float32 if weight is None else weight.dtype
    if wide == input.dtype or input.dtype not in (torch.float16, torch.bfloat16):
        return NotImplemented
    output, mean, rstd = aten.native_layer_norm.default(input.to(wide), normalized_shape, weight, bias, eps)
    return output.to(input.dtype), mean, rstd


@composite(aten._weight_norm.default)
def _weight_norm(direction: torch.Tensor, magnitude: torch.Tensor, dim: int = 0) -> torch.Tensor:
    axes = [axis for axis in range(direction.dim()) if dim == -1 or axis != dim]
    return direction * (magnitude / direction.square().sum(axes, keepdim=dim != -1).sqrt())
