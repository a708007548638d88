"""Activations, normalization and transformers: what torch.onnx translates wrongly, or what reads values of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.nn.modules import transformer

from ..fx.operator_table import Value, composite, decomposition, op, replacement, translation

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


# torch.onnx translates these into inference batch norm: the loss is wrong, without an error.
for _operator in (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_batch_norm.default,
):
    decomposition(_operator)(decomposition_table[_operator])


@composite(aten.batch_norm.default, for_pytorch=True)
def _batch_norm(input: torch.Tensor, *others: Any) -> torch.Tensor:
    """Normalizes a contiguous copy: the kernel's result is contiguous, and a captured one has the order of its input.

    PyTorch draws the numbers of a following dropout in the order of memory. (Images may be channels last in both.)
    """
    result: torch.Tensor = aten.batch_norm.default(input.contiguous() if input.dim() < 4 else input, *others)
    return result


@decomposition(aten.native_layer_norm.default)
def _layer_norm(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> Any:
    """Computes layer norm of fp16 values in fp32.

    ONNX does not have it with fp32 weights, which autocast produces. With fp16 weights its statistics are fp32, where
    PyTorch's are fp16. Doubles are computed by the formula, because ONNX computes their statistics in fp32.
    """
    if input.dtype == torch.float64:
        axes = list(range(input.dim() - len(normalized_shape), input.dim()))
        mean = input.mean(axes, keepdim=True)
        rstd = (((input - mean) ** 2).mean(axes, keepdim=True) + eps).rsqrt()
        output = (input - mean) * rstd
        output = output if weight is None else output * weight
        return output if bias is None else output + bias, mean, rstd
    if input.dtype not in (torch.float16, torch.bfloat16):
        return NotImplemented
    statistics = torch.float32 if weight is None else weight.dtype
    weight, bias = (None if value is None else value.float() for value in (weight, bias))
    output, mean, rstd = aten.native_layer_norm.default(input.float(), normalized_shape, weight, bias, eps)
    return output.to(input.dtype), mean.to(statistics), rstd.to(statistics)


@translation(aten.native_layer_norm.default)
def _centered_layer_norm(
    input: Value, normalized_shape: Any, weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    """Subtracts the mean first.

    Many versions of ONNX Runtime, 1.19.2 among them, compute the variance as the mean of the squares minus the square
    of the mean. This is inaccurate where values are far from 0, and may be negative: rows of 768 times 5.3 become NaN.
    """
    axis = -len(normalized_shape)
    mean = op.ReduceMean(input, op.Constant(value_ints=list(range(axis, 0))), keepdims=1)
    if weight is None:
        one = op.CastLike(op.Constant(value_floats=[1.0]), input)
        weight = op.Expand(one, op.Shape(input, start=axis))
    output, _, rstd = op.LayerNormalization(op.Sub(input, mean), weight, bias, axis=axis, epsilon=eps)
    return output, mean, rstd


@composite(aten._weight_norm.default, for_pytorch=True)
def _weight_norm(direction: torch.Tensor, magnitude: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Returns w = g v / |v| (Salimans and Kingma, 2016), with a norm per slice of ``dim``, or of all of v for -1."""
    axes = [axis for axis in range(direction.dim()) if dim == -1 or axis != dim]
    return direction * (magnitude / direction.square().sum(axes, keepdim=dim != -1).sqrt())


@replacement(transformer, "_detect_is_causal_mask")
def _detect_is_causal_mask(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Does not inspect the mask: knowing that it is causal would only save reading it."""
    return is_causal is True
