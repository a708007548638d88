"""Parts and arrangements of tensors: slices, splits, padding, triangles, blocks and reversed sequences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..node_table import Node, known_operator, operator
from ..values import Known, integers, is_known, is_traced, torch_dtype

_Tensor = torch.Tensor


@operator("Slice", known_inputs=(1, 2, 3, 4))
def _slice(x: _Tensor, starts: Any, ends: Any, axes: Any, steps: Any, *, node: Node) -> _Tensor:
    first, last = integers(starts, "starts", node), integers(ends, "ends", node)
    axis_list = list(range(len(first))) if axes is None else integers(axes, "axes", node)
    step_list = [1] * len(first) if steps is None else integers(steps, "steps", node)
    for axis, start, end, step in zip(axis_list, first, last, step_list, strict=True):
        x = _part(x, axis, start, end, step)
    return x


def _part(x: _Tensor, axis: int, start: Any, end: Any, step: int) -> _Tensor:
    """Returns a slice along an axis, as NumPy's ``[start:end:step]``."""
    size = x.shape[axis]
    if step < 0:
        # PyTorch has no negative steps: flips the axis, and counts positions from its other end.
        start = -1 - start if start < 0 else torch.sym_max(size - 1 - start, 0)  # type: ignore[no-untyped-call]
        end = -1 - end if end < 0 else torch.sym_max(size - 1 - end, 0)  # type: ignore[no-untyped-call]
        x, step = x.flip(axis), -step
    key: list[Any] = [slice(None)] * x.dim()
    key[axis] = slice(start, end, step)
    return x[tuple(key)]


@known_operator("Slice")
def _slice_known(x: Known, starts: Known, ends: Known, axes: Known | None, steps: Known | None) -> Any:
    axis_list = range(len(starts)) if axes is None else axes.tolist()
    step_list = [1] * len(starts) if steps is None else steps.tolist()
    key = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axis_list, starts.tolist(), ends.tolist(), step_list, strict=True):
        if not all(isinstance(value, int) for value in (start, end)):
            return NotImplemented  # a bound is symbolic
        key[axis] = slice(start, end, step)
        if step < 0 and end < -x.shape[axis]:  # through the first element, which NumPy writes as None
            key[axis] = slice(start, None, step)
    return x[tuple(key)]


@operator("Split", since=2, known_inputs=(0, 1))
def _split(x: Any, split: Any, *, axis: int, num_outputs: int | None = None, node: Node) -> tuple[Any, ...]:
    """Splits a value into parts of these sizes, or into parts of equal size, of which the last may be smaller."""
    if split is not None:
        sizes = integers(split, "split", node)
    else:
        count, size = num_outputs or node.outputs, x.shape[axis]
        part = -(-size // count)
        sizes = [*[part] * (count - 1), size - part * (count - 1)]
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis)) if is_known(x) else torch.split(x, sizes, axis)


@operator("Pad", since=2, known_inputs=(1, 3), scalars=(2,))
def _pad(x: _Tensor, pads: Any, value: Any, axes: Any, *, mode: str, node: Node) -> _Tensor:
    axis_list = list(range(x.dim())) if axes is None else integers(axes, "axes", node)
    return pad(x, integers(pads, "pads", node), axis_list, mode, 0 if value is None else value, node)


def pad(x: _Tensor, pads: list[Any], axes: list[int], mode: str, value: Any, node: Node) -> _Tensor:
    """Pads a tensor; negative numbers remove elements.

    Args:
        x: The tensor.
        pads: How many elements to add before each axis, then how many after each.
        axes: The axes.
        mode: constant, reflect, edge or wrap.
        value: What to add, for constant: a number or a tensor with one element.
        node: The node, for errors.
    """
    sizes = {axis % x.dim(): (pads[i], pads[i + len(axes)]) for i, axis in enumerate(axes)}
    if mode == "constant":
        flat = [amount for axis in reversed(range(x.dim())) for amount in sizes.get(axis, (0, 0))]
        if not isinstance(value, _Tensor):
            return F.pad(x, flat, value=value)
        if not is_traced(value) and not value.requires_grad:
            return F.pad(x, flat, value=value.item())
        inside = F.pad(torch.ones_like(x, dtype=torch.bool), flat)
        return torch.where(inside, F.pad(x, flat), value.reshape(()))
    if mode not in ("reflect", "edge", "wrap"):
        raise node.error(f"mode is {mode!r}, but must be 'constant', 'reflect', 'edge' or 'wrap'")
    for axis, (before, after) in sizes.items():
        if isinstance(before, int) and isinstance(after, int) and before == after == 0:
            continue
        size = x.shape[axis]
        position = torch.arange(-before, size + after, device=x.device)
        if mode == "edge":
            position = position.clamp(0, size - 1)
        elif mode == "wrap":
            position = position % size
        elif size == 1:
            position = torch.zeros_like(position)
        else:
            position = position % (2 * size - 2)
            position = torch.where(position < size, position, 2 * size - 2 - position)
        x = x.index_select(axis, position)
    return x


@operator("CenterCropPad", since=18, known_inputs=(1,))
def _center_crop_pad(x: _Tensor, shape: Any, *, axes: list[int] | None = None, node: Node) -> _Tensor:
    for axis, size in zip(range(x.dim()) if axes is None else axes, integers(shape, "shape", node), strict=True):
        old_size = x.shape[axis]
        if old_size > size:
            x = x.narrow(axis, (old_size - size) // 2, size)
        elif old_size < size:
            before = (size - old_size) // 2
            x = pad(x, [before, size - old_size - before], [axis], "constant", 0, node)
    return x


@operator("Trilu", since=14, known_inputs=(1,))
def _triangle(x: _Tensor, k: Any, *, upper: int) -> _Tensor:
    if isinstance(k, _Tensor) and is_traced(k):
        rows, columns = (torch.arange(x.shape[axis], device=x.device) for axis in (-2, -1))
        distance = columns - rows[:, None]
        inside = distance >= k.reshape(()) if upper else distance <= k.reshape(())
        return torch.where(inside, x, torch.zeros_like(x))
    diagonal = 0 if k is None else k.item()
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


@operator("EyeLike", since=9)
def _eye_like(x: _Tensor, *, dtype: int | None = None, k: int) -> _Tensor:
    kind = x.dtype if dtype is None else torch_dtype(dtype)
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape)
    return (columns - rows[:, None] == k).to(kind)


@operator("ReverseSequence", since=10)
def _reverse_sequence(x: _Tensor, lengths: _Tensor, *, batch_axis: int, time_axis: int) -> _Tensor:
    x = x.movedim((batch_axis, time_axis), (0, 1))
    time = torch.arange(x.shape[1], device=x.device)
    lengths = lengths[:, None]
    position = torch.where(time < lengths, lengths - 1 - time, time)
    batch = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[batch, position].movedim((0, 1), (batch_axis, time_axis))


@operator("DepthToSpace")
def _depth_to_space(x: _Tensor, *, blocksize: int, mode: str = "DCR", node: Node) -> _Tensor:
    n, c, h, w = x.shape
    if mode not in ("DCR", "CRD"):
        raise node.error(f"mode is {mode!r}, but must be 'DCR' or 'CRD'")
    if mode == "CRD":  # the order of PyTorch's pixel_shuffle
        return F.pixel_shuffle(x, blocksize)
    rest = c // blocksize**2
    x = x.reshape(n, blocksize, blocksize, rest, h, w).permute(0, 3, 4, 1, 5, 2)
    return x.reshape(n, rest, h * blocksize, w * blocksize)


@operator("SpaceToDepth")
def _space_to_depth(x: _Tensor, *, blocksize: int, mode: str = "DCR", node: Node) -> _Tensor:
    n, c, h, w = x.shape
    if mode not in ("DCR", "CRD"):
        raise node.error(f"mode is {mode!r}, but must be 'DCR' or 'CRD'")
    if mode == "CRD":
        return F.pixel_unshuffle(x, blocksize)
    x = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize).permute(0, 3, 5, 1, 2, 4)
    return x.reshape(n, c * blocksize**2, h // blocksize, w // blocksize)


@operator("TensorScatter", since=24)
def _tensor_scatter(
    past: _Tensor, update: _Tensor, starts: _Tensor | None, *, mode: str, axis: int, node: Node
) -> _Tensor:
    if mode not in ("linear", "circular"):
        raise node.error(f"mode is {mode!r}, but must be 'linear' or 'circular'")
    axis = axis % past.dim()
    position = torch.arange(update.shape[axis], device=past.device)[None]
    if starts is not None:
        position = position + starts[:, None]
    if mode == "circular":
        position = position % past.shape[axis]
    shape = [1] * past.dim()
    shape[0], shape[axis] = position.shape
    return past.scatter(axis, position.reshape(shape).expand(update.shape), update)


@operator("SplitToSequence", since=11, known_inputs=(1,))
def _split_to_sequence(x: _Tensor, split: Any, *, axis: int, keepdims: int, node: Node) -> tuple[list[_Tensor]]:
    if split is None:
        parts = list(torch.split(x, 1, axis))
        return ([part if keepdims else part.squeeze(axis) for part in parts],)
    sizes = integers(split, "split", node)
    size = x.shape[axis]
    if split.ndim == 0:
        sizes = [min(sizes[0], size - i * sizes[0]) for i in range(math.ceil(size / sizes[0]))]
    return (list(torch.split(x, sizes, axis)),)
