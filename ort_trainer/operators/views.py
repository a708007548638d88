"""Operators of shape and layout that torch.onnx lacks or translates differently."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

import torch

from ..core.errors import ExportError
from ..engine.programs import operators  # noqa: F401 - which defines the package's own
from ..engine.torch_memory import dense_order
from ..fx.operator_table import Size, Value, decomposition, ir, op, replacement, translation
from ..graph.random_inputs import order_when_empty

aten = torch.ops.aten
_len = builtins.len


@replacement(builtins, "len")
def _length(value: Any, /) -> Size:
    """Returns the first size of a tensor, symbolic as in ``value.shape[0]``; Python's own ``len`` returns a number."""
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else _len(value)


@translation(aten.sym_numel.default)
def _sym_numel(value: Value) -> Value:
    """Returns the number of elements of a tensor, which batch norm's gradient needs."""
    return op.Size(value)


@translation(torch.ops.prims.view_of.default)
def _identity(value: Value) -> Value:
    """Returns the tensor itself."""
    return op.Identity(value)


@decomposition(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(input: torch.Tensor, dims: int | Sequence[int] | None = None) -> Any:
    """Removes the dimensions that are 1 in the graph; ONNX would look at the sizes of each batch."""
    axes = range(input.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    ones = [d % input.dim() for d in axes if input.dim() and isinstance(input.shape[d], int) and input.shape[d] == 1]
    if not ones:
        return input.clone()
    if isinstance(dims, int):
        return NotImplemented
    for dim in sorted(ones, reverse=True):
        input = aten.squeeze.dim(input, dim)
    return input


@decomposition(aten.copy.default)
def _copy(input: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Returns the source in the shape and dtype of the tensor that it overwrites; torch.onnx converts neither."""
    return src.to(input.dtype).expand(input.shape).clone()


@decomposition(aten.diagonal.default, aten.diagonal_copy.default)
def _diagonal(input: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """Gathers the diagonal: torch.onnx sums a product with a matrix of ones and zeros, which spreads infinities."""
    matrices = input.movedim((dim1, dim2), (-2, -1))
    rows, columns = matrices.shape[-2:]
    # In a flat matrix, the next element of a diagonal is columns + 1 elements away.
    flat = matrices.flatten(-2)
    first = offset if offset >= 0 else -offset * columns
    pair = (rows, columns - offset) if offset >= 0 else (rows + offset, columns)
    length = torch.sym_min(*pair)  # type: ignore[no-untyped-call]
    count = torch.sym_max(length, 0)  # type: ignore[no-untyped-call]
    place = torch.arange(count, device=input.device) * (columns + 1) + first
    return flat.index_select(-1, place)


@decomposition(aten.diagonal_scatter.default)
def _diagonal_scatter(
    input: torch.Tensor, src: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    matrices = input.movedim((dim1, dim2), (-2, -1))
    rows, columns = matrices.shape[-2:]
    length = rows if offset >= 0 else columns
    spread = aten.constant_pad_nd.default(src, [0, length - src.shape[-1]], 0.0)
    spread = spread.unsqueeze(-1) if offset >= 0 else spread.unsqueeze(-2)
    place = torch.arange(columns, device=input.device) - torch.arange(rows, device=input.device)[:, None]
    return torch.where(place == offset, spread, matrices).movedim((-2, -1), (dim1, dim2))


@decomposition(aten.diagonal_backward.default)
def _diagonal_backward(
    grad: torch.Tensor, input_sizes: Sequence[Size], offset: int, dim1: int, dim2: int
) -> torch.Tensor:
    return _diagonal_scatter(grad.new_zeros(input_sizes), grad, offset, dim1, dim2)


@decomposition(aten.as_strided.default)
def _as_strided(
    input: torch.Tensor, size: Sequence[Size], stride: Sequence[Size], storage_offset: Size | None = None
) -> torch.Tensor:
    flat = input.permute(_memory_order(input)).reshape(-1)
    return flat[_places(input, size, stride, storage_offset)]


@decomposition(aten.as_strided_scatter.default)
def _as_strided_scatter(
    input: torch.Tensor,
    src: torch.Tensor,
    size: Sequence[Size],
    stride: Sequence[Size],
    storage_offset: Size | None = None,
) -> torch.Tensor:
    order = _memory_order(input)
    arranged = input.permute(order)
    flat = arranged.reshape(-1).index_put((_places(input, size, stride, storage_offset),), src)
    return flat.reshape(arranged.shape).permute([order.index(axis) for axis in range(input.dim())])


def _memory_order(value: torch.Tensor) -> tuple[int, ...]:
    """Returns the dimensions from the slowest to the fastest in memory; the tensor must not have gaps."""
    order = dense_order(value.shape, [int(stride) for stride in value.stride()])
    if order is None:
        raise ExportError("as_strided() is not supported for a tensor that has gaps or overlaps itself")
    return order


def _places(like: torch.Tensor, size: Sequence[Size], stride: Sequence[Size], offset: Size | None) -> torch.Tensor:
    """Returns the index in memory of each element of a strided view: offset + i stride_0 + j stride_1 + ..."""
    place = torch.full((), 0 if offset is None else offset - like.storage_offset(), dtype=torch.long)
    for axis, (count, step) in enumerate(zip(size, stride, strict=True)):
        steps = torch.arange(count, device=like.device) * step
        place = place + steps.reshape([-1 if other == axis else 1 for other in range(len(size))])
    return place


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


@translation(torch.ops.ort_trainer.as_sizes.default)
def _translate_as_sizes(values: Value) -> list[Value]:
    """Returns tensors without elements whose first sizes are the values."""
    zero = op.Constant(value_ints=[0])
    sizes = op.Max(values, zero)
    rows = [op.Gather(sizes, op.Constant(value_ints=[number])) for number in range(values.shape[0])]
    return [op.Cast(op.ConstantOfShape(op.Concat(size, zero, axis=0)), to=ir.DataType.INT64) for size in rows]
