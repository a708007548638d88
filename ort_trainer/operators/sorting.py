"""Sorting, medians and other operators that depend on order. PyTorch treats NaN as the greatest number.

ONNX Runtime skips NaN in a maximum, sorts input that contains NaN in no defined order, and starts the maximum of a
window at the lowest finite number, which is greater than negative infinity. Its kernels therefore compare keys, in
which infinity stands for NaN and the largest finite numbers stand for infinities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..fx.operator_table import Size, Value, composite, ir, op, translation

aten = torch.ops.aten


_FINITE = {
    # One step below the largest number, so that its negative is above the lowest.
    "FLOAT": float(np.nextafter(np.finfo(np.float32).max, np.float32(0))),
    "DOUBLE": float(np.nextafter(np.finfo(np.float64).max, 0.0)),
}


# Types that no kernel can order -> the type to use instead.
_WIDER = {
    "BOOL": "INT32",
    "INT8": "INT32",
    "UINT8": "INT32",
    "INT16": "INT32",
    "FLOAT16": "FLOAT",
    "BFLOAT16": "FLOAT",
}


def keys(value: Value, nan_is_greatest: bool = True) -> Value:
    """Returns keys in the order of the values, without NaN, which gets the greatest or the smallest key."""
    name = "" if value.dtype is None else value.dtype.name
    if name in _WIDER:
        name = _WIDER[name]
        value = op.Cast(value, to=ir.DataType[name])
    if name not in _FINITE:
        return value
    kind = ir.DataType[name]
    largest, infinity = (op.Constant(value=ir.tensor(number, dtype=kind)) for number in (_FINITE[name], float("inf")))
    finite = op.Clip(value, op.Neg(largest), largest)
    return op.Where(op.IsNaN(value), infinity if nan_is_greatest else op.Neg(infinity), finite)


@translation(aten.sort.default)
def _sort(value: Value, dim: int = -1, descending: bool = False, stable: bool | None = None) -> tuple[Value, Value]:
    """Sorts with TopK, which is stable in ONNX."""
    if len(value.shape) == 0:
        return op.Identity(value), op.Constant(value_int=0)
    size = op.Reshape(op.Gather(op.Shape(value), dim, axis=0), [1])
    return _first(value, size, dim, descending)


@translation(aten.sort.stable)
def _sort_stable(
    value: Value, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Value, Value]:
    return _sort(value, dim, descending)


@translation(aten.topk.default)
def _topk(value: Value, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Value, Value]:
    if len(value.shape) == 0:
        return op.Identity(value), op.Constant(value_int=0)
    return _first(value, op.Constant(value_ints=[k]) if isinstance(k, int) else op.Reshape(k, [1]), dim, largest)


def _first(value: Value, count: Value, dim: int, largest: bool) -> tuple[Value, Value]:
    """Returns the ``count`` largest or smallest elements along a dimension, sorted, and their indices."""
    ordered = keys(value)
    values, indices = op.TopK(ordered, count, axis=dim, largest=int(largest), sorted=1)
    if ordered is value:
        return values, indices
    return op.GatherElements(value, indices, axis=dim), indices


def _kth(
    input: torch.Tensor, places: Callable[[torch.Tensor, Size], Any], dim: int, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the elements at given places of the sorted rows, and their indices; NaN sorts last."""
    row = input if input.dim() else input.unsqueeze(0)
    indices = torch.sort(row, dim=dim, stable=True).indices
    chosen = indices.gather(dim, places(row, row.shape[dim]))
    values = row.gather(dim, chosen)
    if keepdim and input.dim():
        return values, chosen
    return values.squeeze(dim), chosen.squeeze(dim)


@composite(aten.kthvalue.default)
def _kthvalue(input: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    def places(row: torch.Tensor, size: Size) -> torch.Tensor:
        return torch.full_like(row.narrow(dim, 0, 1), k - 1, dtype=torch.long)

    return _kth(input, places, dim, keepdim)


@composite(aten.median.dim)
def _median_dim(input: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first NaN as the median, if there is any; NaN sorts last."""

    def places(row: torch.Tensor, size: Size) -> torch.Tensor:
        middle = torch.full_like(row.narrow(dim, 0, 1), (size - 1) // 2, dtype=torch.long)
        return torch.where(row.isnan().any(dim, keepdim=True), size - row.isnan().sum(dim, keepdim=True), middle)

    return _kth(input, places, dim, keepdim)


@composite(aten.nanmedian.dim)
def _nanmedian_dim(input: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    def places(row: torch.Tensor, size: Size) -> torch.Tensor:
        count: torch.Tensor = size - row.isnan().sum(dim, keepdim=True)
        return ((count - 1) // 2).clamp(min=0)

    return _kth(input, places, dim, keepdim)


def _whole_median(along: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., torch.Tensor]:
    def median(input: torch.Tensor) -> torch.Tensor:
        """Splits the gradient among all elements that equal the median."""
        value = along(input.detach().flatten(), 0)[0]
        if not input.is_floating_point():
            return value
        same = (input == value) | (input.isnan() & value.isnan())
        shared = torch.where(same, input, 0.0).sum() / same.sum()
        return torch.where(value.isnan(), shared, torch.where(same, input, -math.inf).amax())

    return median


composite(aten.median.default)(_whole_median(_median_dim))
composite(aten.nanmedian.default)(_whole_median(_nanmedian_dim))
