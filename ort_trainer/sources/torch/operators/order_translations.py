"""Maxima, sorting and the like, where ONNX Runtime does not know NaN: PyTorch takes it for the greatest of all numbers.

ONNX Runtime skips NaN in a maximum, a sort with NaN in it is in no order at all, and a maximum in a window begins with
the lowest finite number, which is more than negative infinity. The kernels look at keys instead: infinity stands for
NaN, and the largest finite numbers for infinities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset18 as op
from onnxscript.onnx_types import TensorType

__all__ = ["ORDER_TRANSLATIONS"]

aten = torch.ops.aten
prims = torch.ops.prims

_FINITE = {
    # One less than the largest, so that its negative is more than the lowest.
    ir.DataType.FLOAT: float(np.nextafter(np.finfo(np.float32).max, np.float32(0))),
    ir.DataType.DOUBLE: float(np.nextafter(np.finfo(np.float64).max, 0.0)),
}
# What no kernel orders, and what stands for it.
_WIDER = {
    ir.DataType.BOOL: ir.DataType.INT32,
    ir.DataType.INT8: ir.DataType.INT32,
    ir.DataType.UINT8: ir.DataType.INT32,
    ir.DataType.INT16: ir.DataType.INT32,
    ir.DataType.FLOAT16: ir.DataType.FLOAT,
    ir.DataType.BFLOAT16: ir.DataType.FLOAT,
}


def _keys(value: TensorType, nan_is_greatest: bool = True) -> TensorType:
    """Returns numbers of the same order without NaN, which is the greatest or the smallest."""
    kind = value.dtype
    if kind in _WIDER:
        kind = _WIDER[kind]
        value = op.Cast(value, to=kind)
    if kind not in _FINITE:
        return value
    largest, infinity = (op.Constant(value=ir.tensor(number, dtype=kind)) for number in (_FINITE[kind], float("inf")))
    finite = op.Clip(value, op.Neg(largest), largest)
    return op.Where(op.IsNaN(value), infinity if nan_is_greatest else op.Neg(infinity), finite)


def _place_of_best(largest: bool) -> Callable[..., Any]:
    best = op.ArgMax if largest else op.ArgMin

    def place(value: TensorType, dim: int | None = None, keepdim: bool = False) -> TensorType:
        """The place of the first maximum or minimum; NaN is either."""
        rank = len(value.shape)
        if rank == 0:
            return op.Constant(value_int=0)
        keys = _keys(value, largest)
        if value.dtype == ir.DataType.INT64:  # ONNX Runtime has a TopK of these, and no ArgMax
            _, first = op.TopK(keys if dim is not None else op.Reshape(keys, [-1]), [1], axis=dim or 0, largest=largest)
            return _shaped(first, rank, dim, keepdim)
        if dim is not None:
            return best(keys, axis=dim, keepdims=int(keepdim))
        first = best(op.Reshape(keys, [-1]), axis=0, keepdims=0)
        return op.Reshape(first, [1] * rank) if keepdim else first

    return place


def _shaped(first: TensorType, rank: int, dim: int | None, keepdim: bool) -> TensorType:
    if dim is not None:
        return first if keepdim else op.Squeeze(first, [dim])
    return op.Reshape(first, [1] * rank if keepdim else op.Constant(value_ints=[]))


_argmax, _argmin = _place_of_best(True), _place_of_best(False)


def _best(largest: bool) -> Callable[..., Any]:
    place = _argmax if largest else _argmin

    def best(value: TensorType, dim: int, keepdim: bool = False) -> tuple[TensorType, TensorType]:
        """The maximum or minimum along a dimension, and its place."""
        if len(value.shape) == 0:
            return op.Identity(value), op.Constant(value_int=0)
        indices = place(value, dim, True)
        values = op.GatherElements(value, indices, axis=dim)
        return (values, indices) if keepdim else (op.Squeeze(values, [dim]), op.Squeeze(indices, [dim]))

    return best


def _sort(
    value: TensorType, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> tuple[TensorType, TensorType]:
    """ONNX's order is stable."""
    if len(value.shape) == 0:
        return op.Identity(value), op.Constant(value_int=0)
    size = op.Reshape(op.Gather(op.Shape(value), dim, axis=0), [1])
    return _first(value, size, dim, descending)


def _sort_stable(
    value: TensorType, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[TensorType, TensorType]:
    return _sort(value, dim, descending)


def _topk(
    value: TensorType, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[TensorType, TensorType]:
    if len(value.shape) == 0:
        return op.Identity(value), op.Constant(value_int=0)
    return _first(value, op.Constant(value_ints=[k]) if isinstance(k, int) else op.Reshape(k, [1]), dim, largest)


def _first(value: TensorType, count: TensorType, dim: int, largest: bool) -> tuple[TensorType, TensorType]:
    keys = _keys(value)
    values, indices = op.TopK(keys, count, axis=dim, largest=int(largest), sorted=1)
    if keys is value:
        return values, indices
    return op.GatherElements(value, indices, axis=dim), indices


def _max_pool_with_indices(
    value: TensorType,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[TensorType, TensorType]:
    """Max pooling with indices into each channel's plane, as PyTorch counts them.

    ONNX counts through the whole tensor. What torch.onnx does to find the difference, a second pooling of the whole
    input, costs as much as the pooling itself; the rest of a division by the plane's size does not.
    """
    dims = len(kernel_size)

    def each(values: Sequence[int]) -> list[int]:
        return [*values] * dims if len(values) == 1 else [*values]

    kernel, step, pads, spread = each(kernel_size), each(stride or kernel_size), each(padding), each(dilation)
    sizes: list[Any] = list(value.shape or ())[-dims:]
    far = _far_padding(sizes, kernel, step, pads, spread) if ceil_mode else pads
    alone = len(value.shape) == dims + 1
    batched = op.Unsqueeze(value, [0]) if alone else value
    known = value.dtype is not None and value.dtype.is_floating_point()
    keys = _keys(value) if known else value
    pooled, flat = op.MaxPool(
        op.Unsqueeze(keys, [0]) if alone else keys,
        kernel_shape=kernel,
        strides=step,
        pads=[*pads, *(far or pads)],
        dilations=spread,
        ceil_mode=int(far is None),
    )
    if known:
        pooled = op.Reshape(op.Gather(op.Reshape(batched, [-1]), op.Reshape(flat, [-1]), axis=0), op.Shape(flat))
    plane = op.ReduceProd(op.Shape(batched, start=2), keepdims=0)
    indices = op.Mod(flat, plane)
    if alone:
        pooled, indices = op.Squeeze(pooled, [0]), op.Squeeze(indices, [0])
    return pooled, indices


def _far_padding(
    sizes: Sequence[Any], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int] | None:
    """Returns the padding behind the input that makes windows of those that the edge cuts off, as ceil mode has them.

    ONNX Runtime's own ceil mode has windows that begin behind the input, and contradicts itself about their number.
    None where only the batch tells the sizes, or where ONNX allows no such padding.
    """
    far = []
    for size, width, step, near, spread in zip(sizes, kernel, stride, padding, dilation, strict=True):
        if not isinstance(size, int):
            return None
        reach = spread * (width - 1) + 1
        count = -(-(size + 2 * near - reach) // step) + 1
        if (count - 1) * step >= size + near:
            count -= 1
        far.append(max((count - 1) * step + reach - size - near, 0))
        if far[-1] >= width:
            return None
    return far


def _largest(value: TensorType, dims: Sequence[int] | None = None, **options: Any) -> TensorType:
    """The maximum of numbers, NaN left out."""
    return op.ReduceMax(value, keepdims=0) if dims is None else op.ReduceMax(value, list(dims), keepdims=0)


def _smallest(value: TensorType, dims: Sequence[int] | None = None, **options: Any) -> TensorType:
    """The minimum of numbers, NaN left out."""
    return op.ReduceMin(value, keepdims=0) if dims is None else op.ReduceMin(value, list(dims), keepdims=0)


ORDER_TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.argmax.default: _argmax,
    aten.argmin.default: _argmin,
    aten.max.dim: _best(True),
    aten.min.dim: _best(False),
    aten.sort.default: _sort,
    aten.sort.stable: _sort_stable,
    aten.topk.default: _topk,
    aten.max_pool2d_with_indices.default: _max_pool_with_indices,
    aten.max_pool3d_with_indices.default: _max_pool_with_indices,
    prims.amax.default: _largest,
    prims.amin.default: _smallest,
}
