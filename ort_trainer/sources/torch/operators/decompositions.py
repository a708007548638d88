"""Which ATen operators are decomposed before translation: a lever on the size, speed and rightness of the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._decomp import decomposition_table as all_decompositions

from ..onnx_registry import has_translation
from ..random_inputs import RANDOM_OPERATORS, memory_order
from .convolution_ops import CONVOLUTION_DECOMPOSITIONS
from .division_ops import DIVISION_DECOMPOSITIONS
from .dtype_ops import DTYPE_DECOMPOSITIONS
from .math_ops import MATH_DECOMPOSITIONS
from .pooling_ops import POOLING_DECOMPOSITIONS
from .view_ops import VIEW_DECOMPOSITIONS

__all__ = ["decomposition_table"]

aten = torch.ops.aten
prims = torch.ops.prims

# Kept whole, although PyTorch would take them apart: other code of this package handles them.
_KEPT = (
    aten.native_dropout.default,
    aten.native_dropout_backward.default,
    # ONNX has these products; what PyTorch makes of them it has not.
    aten.prod.default,
    aten.prod.dim_int,
)

# Not taken apart, so that they are refused.
_REFUSED = (
    # ONNX has no complementary error function, and the difference from 1 has no digits where this one begins to matter.
    aten.special_log_ndtr.default,
)

# Taken apart, although torch.onnx would take them whole.
_DECOMPOSED = (
    # torch.onnx translates it into batch norm for inference: a wrong loss, and no error.
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_batch_norm.default,
    # The same erf as in its backward pass, so that it is computed once.
    aten.gelu.default,
)


def _mixed_layer_norm(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> Any:
    """Layer norm of fp16 values with fp32 weights, which autocast makes and ONNX does not have: computed in fp32.

    And of doubles, of which ONNX computes the statistics in fp32.
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


def _select_backward(grad: torch.Tensor, input_sizes: Sequence[Any], dim: int, index: int) -> torch.Tensor:
    """Puts a slice into zeros by padding: PyTorch's own way compares every index and then chooses, which is slow."""
    dim = dim % len(input_sizes)
    index = index + input_sizes[dim] if index < 0 else index
    pads = [0, 0] * (len(input_sizes) - 1 - dim) + [index, input_sizes[dim] - 1 - index]
    padded: torch.Tensor = aten.constant_pad_nd.default(grad.unsqueeze(dim), pads, 0.0)
    return padded


def _safe_softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Softmax that is 0 where a whole row is masked by -inf: the row's maximum tells, cheaper than all its elements."""
    input = input if dtype is None else input.to(dtype)
    # Of the maximum ONNX Runtime leaves NaN out, of the sum it does not.
    masked = prims.amax.default(input, [dim % input.dim()]).unsqueeze(dim) == float("-inf")
    masked = masked & (input.sum(dim, keepdim=True) == float("-inf"))
    return torch.where(masked, 0.0, torch.softmax(input, dim))


def _scatter_add(input: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> Any:
    """ONNX Runtime's CPU provider has no scatter that adds fp16 values; fp32 is also the better sum."""
    if input.dtype != torch.float16:
        return NotImplemented
    return aten.scatter_add.default(input.float(), dim, index, src.float()).to(input.dtype)


def _scatter_reduce(
    input: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """ONNX has no mean, and torch.onnx takes it for an assignment; and it begins a maximum with a finite number.

    (Before differentiation the mean is a composite; this is for a model that is differentiated as it stands.)
    """
    if reduce in ("amax", "amin") and not include_self and input.is_floating_point():
        start = aten.scatter.value(input, dim, index, float("-inf" if reduce == "amax" else "inf"))
        return aten.scatter_reduce.two(start, dim, index, src, reduce)
    if reduce != "mean":
        return NotImplemented
    total = aten.scatter_reduce.two(input, dim, index, src, "sum", include_self=include_self)
    ones, each = torch.ones_like(input), torch.ones_like(src)
    return total / aten.scatter_reduce.two(ones, dim, index, each, "sum", include_self=include_self)


def _empty_like(input: torch.Tensor, **settings: Any) -> Any:
    """Keeps the order of the dimensions in memory, in which a random operator fills what is still empty."""
    order = memory_order(input)
    if not order or settings.get("memory_format") not in (None, torch.preserve_format):
        return NotImplemented
    dtype = settings.get("dtype") or input.dtype
    device = settings.get("device") or input.device
    empty = torch.zeros([input.shape[axis] for axis in order], dtype=dtype, device=device)
    return empty.permute([order.index(axis) for axis in range(input.dim())])


def _has_short(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype == torch.int32 for index in indices)


def _lengthened(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [index if index is None or index.dtype != torch.int32 else index.long() for index in indices]


def _index(input: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    """ONNX wants 64-bit indices."""
    return aten.index.Tensor(input, _lengthened(indices)) if _has_short(indices) else NotImplemented


def _index_put(
    input: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> Any:
    """The same for an indexed assignment that adds; and ONNX wants 64-bit indices."""
    if _has_short(indices):
        return aten.index_put.default(input, _lengthened(indices), values, accumulate)
    if input.dtype != torch.float16 or not accumulate:
        return NotImplemented
    return aten.index_put.default(input.float(), indices, values.float(), True).to(input.dtype)


def _product(first: torch.Tensor, second: torch.Tensor) -> Any:
    """A sum over no elements is zero; ONNX Runtime leaves the memory as it finds it."""
    if not isinstance(first.shape[-1], int) or first.shape[-1] != 0:
        return NotImplemented
    return first.new_zeros([*first.shape[:-1], *second.shape[-1:]])


@functools.cache
def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """Returns operator -> decomposition.

    It is PyTorch's core table, to which every operator is added that torch.onnx does not know. (torch.onnx itself
    decomposes only the latter. That keeps composite operators, of which it translates some wrongly: an
    ``_unsafe_index_put`` that accumulates, for one.)
    """
    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    for operator, decomposition in all_decompositions.items():
        if operator not in table and hasattr(operator, "_schema") and not has_translation(operator):
            table[operator] = decomposition
    table.update(get_decompositions(list(_DECOMPOSED)))
    table |= CONVOLUTION_DECOMPOSITIONS | POOLING_DECOMPOSITIONS | VIEW_DECOMPOSITIONS | MATH_DECOMPOSITIONS
    table |= DIVISION_DECOMPOSITIONS | DTYPE_DECOMPOSITIONS
    table[aten.empty_like.default] = _empty_like
    table[aten.native_layer_norm.default] = _mixed_layer_norm
    table[aten.select_backward.default] = _select_backward
    table[aten._safe_softmax.default] = _safe_softmax
    table[aten.scatter_add.default] = _scatter_add
    table[aten.scatter_reduce.two] = _scatter_reduce
    table[aten.index_put.default] = _index_put
    table[aten.index.Tensor] = _index
    for operator in (aten.mm.default, aten.bmm.default):
        table[operator] = _product
    for operator in (*_KEPT, *_REFUSED, *RANDOM_OPERATORS):
        table.pop(operator, None)
    return table
