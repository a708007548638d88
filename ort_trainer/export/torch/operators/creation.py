"""New tensors: filled with one number, or uninitialized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ..random_inputs import order_when_empty
from .registry import Size, Value, decomposition, op, translation

aten = torch.ops.aten


@translation(aten.scalar_tensor.default)
def number(s: Any, dtype: int = -1, **placement: Any) -> Value:
    """Returns a number in the requested precision: torch.onnx rounds it to fp32 on the way to double precision."""
    if isinstance(s, (bool, int, float)):
        return op.Constant(value=ir.tensor(s, dtype=ir.DataType.FLOAT if dtype == -1 else ir.DataType(dtype)))
    return s if dtype == -1 else op.Cast(s, to=dtype)


@translation(aten.full.default)
def _full(size: Sequence[Any], fill_value: Any, dtype: int = -1, **placement: Any) -> Value:
    """Returns a tensor with the same number in every element."""
    if dtype == -1 and isinstance(fill_value, (bool, int)):
        dtype = ir.DataType.BOOL if isinstance(fill_value, bool) else ir.DataType.INT64
    value = number(fill_value, dtype)
    sizes = [op.Constant(value_ints=[n]) if isinstance(n, int) else op.Reshape(n, [-1]) for n in size]
    return op.Expand(value, op.Concat(*sizes, axis=0) if sizes else op.Constant(value_ints=[]))


@translation(aten.full_like.default)
def _full_like(value: Value, fill_value: Any, dtype: int = -1, **placement: Any) -> Value:
    """Returns a tensor of one number, in the shape of another and, by default, in its dtype."""
    return op.Expand(number(fill_value, value.dtype if dtype == -1 else dtype), op.Shape(value))


@decomposition(aten.empty_permuted.default, aten._efficientzerotensor.default)
def _zeros(size: Sequence[Size], *ignored: Any, **options: Any) -> torch.Tensor:
    """Returns zeros, for zero tensors as well as for uninitialized memory: ONNX has neither."""
    return torch.zeros(size, dtype=options.get("dtype"), device=options.get("device"))


@decomposition(aten.empty_like.default)
def _empty_like(input: torch.Tensor, **settings: Any) -> Any:
    """Keeps the memory order of the dimensions, in which a random operator will fill the tensor."""
    order = order_when_empty(input)
    if not order or settings.get("memory_format") not in (None, torch.preserve_format):
        return NotImplemented
    dtype = settings.get("dtype") or input.dtype
    device = settings.get("device") or input.device
    empty = torch.zeros([input.shape[axis] for axis in order], dtype=dtype, device=device)
    return empty.permute([order.index(axis) for axis in range(input.dim())])
