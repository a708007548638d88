"""Shapes: reading and changing them, concatenation, and constants computed from sizes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ..node_table import Node, known_operator, operator
from ..values import Known, as_tensor, integers, is_known, known_array, numbers

_Tensor = torch.Tensor
# Larger results are tensors: in a trace they take no memory, however large the size in a model.
_MOST_FILLED, _MOST_EXPANDED = 64, 1024


@operator("Identity", known_inputs=True)
def _identity(x: Any) -> Any:
    return x


@operator("Shape", since=1)
def _shape(x: _Tensor, *, start: int = 0, end: int | None = None) -> Known:
    rank = x.dim()
    # ONNX clamps positions below -rank to 0; a Python slice would add the rank to the result again.
    first = max(start + rank, 0) if start < 0 else start
    last = rank if end is None else max(end + rank, 0) if end < 0 else end
    return known_array(list(x.shape[first:last]))


@known_operator("Shape", since=1)
def _shape_known(x: Known, *, start: int = 0, end: int | None = None) -> Known:
    return np.array(x.shape[start:end], dtype=np.int64)


@operator("Size")
def _size(x: _Tensor) -> Known:
    return known_array(x.numel())


@operator("Reshape", since=5, known_inputs=(1,))
def _reshape(x: _Tensor, shape: Any, *, allowzero: int = 0, node: Node) -> _Tensor:
    return x.reshape(_new_shape(x, integers(shape, "shape", node), allowzero))


@known_operator("Reshape", since=5)
def _reshape_known(x: Known, shape: Known, *, allowzero: int = 0) -> Any:
    return NotImplemented if shape.dtype == object else x.reshape(_new_shape(x, shape.tolist(), allowzero))


def _new_shape(x: Any, shape: list[Any], allowzero: int) -> list[Any]:
    """Returns the shape for Reshape: unless ``allowzero``, a 0 keeps the size of the input."""
    if allowzero:
        return shape
    return [x.shape[i] if isinstance(size, int) and size == 0 else size for i, size in enumerate(shape)]


@operator("Squeeze", known_inputs=True)
def _squeeze(x: Any, axes: Any, *, node: Node) -> Any:
    ones = [axis for axis, size in enumerate(x.shape) if size == 1] if axes is None else integers(axes, "axes", node)
    squeezed = np.squeeze if is_known(x) else torch.squeeze
    return squeezed(x, tuple(ones)) if ones else x


@operator("Unsqueeze", known_inputs=True)
def _unsqueeze(x: Any, axes: Any, *, node: Node) -> Any:
    places = integers(axes, "axes", node)
    for axis in sorted(axis % (x.ndim + len(places)) for axis in places):
        x = np.expand_dims(x, axis) if is_known(x) else x.unsqueeze(axis)
    return x


@operator("Flatten", since=1)
def _flatten(x: _Tensor, *, axis: int) -> _Tensor:
    axis = axis + x.dim() if axis < 0 else axis
    if axis == 0:
        return x.reshape(1, -1)
    return x.flatten(axis).flatten(0, axis - 1) if axis < x.dim() else x.reshape(-1, 1)


@operator("Transpose")
def _transpose(x: _Tensor, *, perm: list[int] | None = None) -> _Tensor:
    return x.permute(tuple(reversed(range(x.dim()))) if perm is None else perm)


@known_operator("Transpose")
def _transpose_known(x: Known, *, perm: list[int] | None = None) -> Known:
    return np.transpose(x, perm)


@operator("Expand", since=8, known_inputs=(1,))
def _expand(x: _Tensor, shape: Any, *, node: Node) -> _Tensor:
    sizes = integers(shape, "shape", node)
    x = x.reshape([1] * (len(sizes) - x.dim()) + list(x.shape)) if len(sizes) > x.dim() else x
    sizes = [1] * (x.dim() - len(sizes)) + sizes
    # A size of 1 leaves the input's: the shape is broadcast both ways.
    return x.expand(
        [old if isinstance(new, int) and new == 1 else new for old, new in zip(x.shape, sizes, strict=True)]
    )


@known_operator("Expand", since=8)
def _expand_known(x: Known, shape: Known) -> Any:
    if shape.dtype == object:
        return NotImplemented
    sizes = np.broadcast_shapes(x.shape, tuple(shape.tolist()))
    return np.broadcast_to(x, sizes) if math.prod(sizes) <= _MOST_EXPANDED else NotImplemented


@operator("Tile", since=6, known_inputs=(1,))
def _tile(x: _Tensor, repeats: Any, *, node: Node) -> _Tensor:
    return x.repeat(integers(repeats, "repeats", node))


@operator("Concat", since=4)
def _concat(*values: _Tensor, axis: int) -> _Tensor:
    return torch.cat(values, axis)


@known_operator("Concat", since=4)
def _concat_known(*values: Known, axis: int) -> Known:
    return np.concatenate(values, axis)


@operator("Range", since=11, known_inputs=True)
def _range(start: Any, limit: Any, delta: Any, *, node: Node) -> _Tensor:
    dtype = next((_dtype_of(value) for value in (start, limit, delta) if _dtype_of(value) is not None), torch.int64)
    first, last, step = (numbers(value, "its length", node)[0] for value in (start, limit, delta))
    if not any(isinstance(value, _Tensor) and value.requires_grad for value in (start, delta)):
        return torch.arange(first, last, step, dtype=dtype)
    count = max(math.ceil((last - first) / step), 0)
    return as_tensor(start) + torch.arange(count, dtype=dtype) * as_tensor(delta)


def _dtype_of(value: Any) -> torch.dtype | None:
    if isinstance(value, _Tensor):
        return value.dtype
    return None if value.dtype == object else torch.from_numpy(np.zeros(0, value.dtype)).dtype


@known_operator("Range", since=11)
def _range_known(start: Known, limit: Known, delta: Known) -> Any:
    values = [start, limit, delta]
    if any(value.dtype.kind not in "iu" for value in values):
        return NotImplemented
    count = len(range(start.item(), limit.item(), delta.item()))
    if count > _MOST_FILLED:
        return NotImplemented
    return np.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


@operator("ConstantOfShape", since=9, known_inputs=True)
def _constant_of_shape(shape: Any, *, value: Any = None, node: Node) -> _Tensor:
    filling = torch.zeros(1) if value is None else torch.from_numpy(np.array(value).reshape(1))
    return torch.full(integers(shape, "shape", node), filling.item(), dtype=filling.dtype)


@known_operator("ConstantOfShape", since=9)
def _constant_of_shape_known(shape: Known, *, value: Any = None) -> Any:
    if shape.dtype == object or math.prod(shape.tolist()) > _MOST_FILLED:
        return NotImplemented
    filling = np.zeros(1, np.float32) if value is None else np.array(value).reshape(1)
    return NotImplemented if filling.dtype.kind not in "iufb" else np.full(shape.tolist(), filling[0], filling.dtype)
