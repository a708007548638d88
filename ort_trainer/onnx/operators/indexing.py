"""Gathering and scattering by index, sorting and selecting."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..node_table import Node, known_operator, operator
from ..values import Known, integers, is_known, is_traced

_Tensor = torch.Tensor


@operator("Gather", known_inputs=(1,))
def _gather(data: _Tensor, indices: Any, *, axis: int) -> _Tensor:
    if is_known(indices):
        if indices.ndim == 0:
            return data.select(axis, indices.item())
        indices = torch.from_numpy(np.array(indices)) if indices.dtype != object else _stacked(indices)
    if data.dim() == 2 and axis in (0, -2) and data.is_floating_point():
        return F.embedding(_counted(indices, data.shape[0]), data)  # its gradient is faster than that of indexing
    # PyTorch's own indexing counts negative positions from the end, as ONNX does.
    key: list[Any] = [slice(None)] * (axis % data.dim())
    return data[(*key, indices.long())]


def _stacked(values: Known) -> _Tensor:
    scalars = [torch.scalar_tensor(value, dtype=torch.int64) for value in values.flat]
    return torch.stack(scalars).reshape(values.shape)


@known_operator("Gather")
def _gather_known(data: Known, indices: Known, *, axis: int) -> Any:
    return NotImplemented if indices.dtype == object else np.take(data, indices, axis)


def _counted(indices: _Tensor, size: Any) -> _Tensor:
    """Returns nonnegative positions: ONNX counts negative ones from the end."""
    indices = indices.long()
    return torch.where(indices < 0, indices + size, indices)


@operator("GatherElements", since=11)
def _gather_elements(data: _Tensor, indices: _Tensor, *, axis: int) -> _Tensor:
    return torch.gather(data, axis, _counted(indices, data.shape[axis]))


@operator("GatherND", since=11)
def _gather_nd(data: _Tensor, indices: _Tensor, *, batch_dims: int = 0) -> _Tensor:
    return data[_keys(indices, batch_dims)]


def _keys(indices: _Tensor, batch_dims: int = 0) -> tuple[_Tensor, ...]:
    """Splits the last dimension of ``indices`` into one index tensor per dimension, after those of the batch."""
    indices = indices.long()
    batch = []
    for axis in range(batch_dims):
        shape = [1] * (indices.dim() - 1)
        shape[axis] = indices.shape[axis]
        batch.append(torch.arange(indices.shape[axis], device=indices.device).reshape(shape))
    return (*batch, *indices.unbind(-1))


_REDUCTIONS = {"mul": "prod", "max": "amax", "min": "amin"}


@operator("Scatter", since=9)
def _scatter(data: _Tensor, indices: _Tensor, updates: _Tensor, *, axis: int) -> _Tensor:
    return torch.scatter(data, axis, _counted(indices, data.shape[axis]), updates)


@operator("ScatterElements", since=11)
def _scatter_elements(
    data: _Tensor, indices: _Tensor, updates: _Tensor, *, axis: int, reduction: str = "none", node: Node
) -> _Tensor:
    return _scattered(data, axis, _counted(indices, data.shape[axis]), updates, reduction, node)


def _scattered(data: _Tensor, axis: int, indices: _Tensor, updates: _Tensor, reduction: str, node: Node) -> _Tensor:
    """Returns data with updates written, or combined by a reduction, at indices along an axis."""
    if reduction == "none":
        return torch.scatter(data, axis, indices, updates)
    if reduction == "add":
        return torch.scatter_add(data, axis, indices, updates)
    if reduction not in _REDUCTIONS:
        raise node.error(f"reduction is {reduction!r}, but must be 'none', 'add' or one of {list(_REDUCTIONS)}")
    return torch.scatter_reduce(data, axis, indices, updates, _REDUCTIONS[reduction])


@operator("ScatterND", since=11)
def _scatter_nd(data: _Tensor, indices: _Tensor, updates: _Tensor, *, reduction: str = "none", node: Node) -> _Tensor:
    keys = _keys(indices)
    if reduction in ("none", "add"):
        return torch.index_put(data, keys, updates, accumulate=reduction == "add")
    # scatter_reduce takes one index: the indexed dimensions are flattened into rows, and the others into columns.
    depth = len(keys)
    row: Any = 0
    for key, size in zip(keys, data.shape[:depth], strict=True):
        row = row * size + _counted(key, size)
    rows = row.reshape(-1, 1).expand(row.numel(), updates.numel() // row.numel())
    flat = _scattered(
        data.flatten(0, depth - 1).flatten(1) if data.dim() > depth else data.reshape(-1, 1),
        0,
        rows,
        updates.reshape(rows.shape),
        reduction,
        node,
    )
    return flat.reshape(data.shape)


@operator("OneHot", since=9, known_inputs=(1,))
def _one_hot(indices: _Tensor, depth: Any, values: _Tensor, *, axis: int, node: Node) -> _Tensor:
    (size,) = integers(depth, "depth", node)
    axis = axis % (indices.dim() + 1)
    shape = [1] * (indices.dim() + 1)
    shape[axis] = size
    chosen = _counted(indices, size).unsqueeze(axis) == torch.arange(size, device=indices.device).reshape(shape)
    off, on = values.unbind()
    return torch.where(chosen, on, off)


@operator("TopK", known_inputs=(1,))
def _top_k(x: _Tensor, k: Any, *, axis: int, largest: int = 1, sorted: int = 1, node: Node) -> tuple[_Tensor, _Tensor]:
    (count,) = integers(k, "k", node)
    # torch.topk does not define the order of equal values; in ONNX the lower index comes first. With sorted=0 any order
    # is valid, including the sorted one.
    values, indices = torch.sort(x, dim=axis, descending=bool(largest), stable=True)
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)


def _refuse_traced(node: Node, what: str, *tensors: _Tensor) -> None:
    """Raises an ExportError in a trace, for operators whose result has a shape that depends on values."""
    if any(is_traced(tensor) for tensor in tensors):
        raise node.error(
            f"the shape of its result depends on {what} of a batch, but the shapes in a graph for training depend on "
            "shapes only: mask values instead of selecting them, or compute it outside and make it an input"
        )


@operator("NonZero", since=9)
def _non_zero(x: _Tensor, *, node: Node) -> _Tensor:
    _refuse_traced(node, "the values", x)
    return torch.nonzero(x).t()


@known_operator("NonZero", since=9)
def _non_zero_known(x: Known) -> Any:
    return NotImplemented if x.dtype == object else np.stack(np.nonzero(np.atleast_1d(x)))


@operator("Compress", since=9, known_inputs=(1,))
def _compress(x: _Tensor, condition: Any, *, axis: int | None = None, node: Node) -> _Tensor:
    if is_known(condition):
        chosen = torch.from_numpy(np.flatnonzero(condition))
    else:
        _refuse_traced(node, "the condition's values", condition)
        (chosen,) = torch.nonzero(condition, as_tuple=True)
    return x.reshape(-1)[chosen] if axis is None else x.index_select(axis, chosen)


@operator("Unique", since=11)
def _unique(
    x: _Tensor, *, axis: int | None = None, sorted: int, node: Node
) -> tuple[_Tensor, _Tensor, _Tensor, _Tensor]:
    _refuse_traced(node, "the values", x)
    if axis is None:
        x, axis = x.reshape(-1), 0
    # Scatters the positions in reverse, so that the first occurrence of each value is written last.
    _, inverse, counts = torch.unique(x, dim=axis, sorted=True, return_inverse=True, return_counts=True)
    places = torch.arange(x.shape[axis]).flip(0)
    first = torch.zeros(len(counts), dtype=torch.int64).scatter(0, inverse.flip(0), places)
    if not sorted:
        order = torch.argsort(first)
        rank = torch.argsort(order)
        first, counts, inverse = first[order], counts[order], rank[inverse]
    return x.index_select(axis, first), first, inverse, counts
