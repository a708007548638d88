"""Pooling: the maximum, mean or norm over windows, regions or all spatial dimensions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..node_table import Node, operator
from ..values import integers
from .convolution import CONVOLUTIONS
from .windows import Windows, padded, windows_of

_Tensor = torch.Tensor
_MAX_POOLS: Any = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOLS: Any = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@operator("MaxPool", passing=windows_of)
def _max_pool(
    x: _Tensor, *, ceil_mode: int = 0, kernel_shape: list[int], storage_order: int = 0, node: Node, **attributes: Any
) -> _Tensor | tuple[_Tensor, _Tensor]:
    windows = windows_of(x, kernel_shape, node=node, **attributes)
    dtype = x.dtype
    if not dtype.is_floating_point:
        x = x.float()  # represents the 8 bits exactly, and has kernels
    before = windows.before
    native = windows.symmetric and all(2 * p <= extent for p, extent in zip(before, windows.extents, strict=True))
    images = x
    if not native:
        images = padded(x, before, windows.needed(bool(ceil_mode)), float("-inf"))
    pool = _MAX_POOLS[len(before)]
    padding = before if native else 0
    arguments = (windows.kernel, windows.strides, padding, windows.dilations, bool(ceil_mode) and native)
    if not node.wants(1):
        result: _Tensor = pool(images, *arguments).to(dtype)
        return result
    values, index = pool(images, *arguments, True)
    # PyTorch's indices count elements of one channel of the padded image, ONNX's elements of the whole input.
    places = []
    for size, shift in zip(reversed(images.shape[2:]), reversed([0] * len(before) if native else before), strict=True):
        places.append(index % size - shift)
        index = index // size
    order = list(range(len(places))) if storage_order == 0 else list(reversed(range(len(places))))
    flat, step = torch.zeros_like(places[0]), 1
    for i in order:
        flat, step = flat + places[i] * step, step * x.shape[-1 - i]
    channels = torch.arange(x.shape[0] * x.shape[1]).reshape([x.shape[0], x.shape[1], *[1] * len(places)])
    return values.to(dtype), flat + channels * step


@operator("AveragePool", since=7, passing=windows_of)
def _average_pool(
    x: _Tensor, *, ceil_mode: int = 0, count_include_pad: int, kernel_shape: list[int], node: Node, **attributes: Any
) -> _Tensor:
    windows = windows_of(x, kernel_shape, node=node, **attributes)
    ceil, before = bool(ceil_mode), windows.before
    undilated = windows.symmetric and windows.extents == windows.kernel
    if undilated and all(2 * p <= size for p, size in zip(before, windows.kernel, strict=True)):
        arguments = (windows.kernel, windows.strides, before, ceil, bool(count_include_pad))
        result: _Tensor = _AVERAGE_POOLS[len(before)](x, *arguments)
        return result
    return _sums(x, windows, ceil) / _counts(windows, ceil, bool(count_include_pad), x)


def _sums(x: _Tensor, windows: Windows, ceil: bool) -> _Tensor:
    """Returns the sum of each window; padding counts as zeros."""
    rank = len(windows.kernel)
    images = padded(x, windows.before, windows.needed(ceil)).flatten(0, 1).unsqueeze(1)
    ones = torch.ones([1, 1, *windows.kernel], dtype=x.dtype)
    sums: _Tensor = CONVOLUTIONS[rank](images, ones, None, windows.strides, 0, windows.dilations)
    return sums.reshape([*x.shape[:2], *sums.shape[2:]])


def _counts(windows: Windows, ceil: bool, with_padding: bool, x: _Tensor) -> _Tensor:
    """Returns the number of elements of each window that lie on the input, or with padding also on the padding."""
    rank = len(windows.kernel)
    product = torch.ones([1] * rank, dtype=x.dtype)
    for i, count in enumerate(windows.counts(ceil)):
        begins = torch.arange(count) * windows.strides[i] - windows.before[i]
        places = begins.unsqueeze(1) + torch.arange(windows.kernel[i]) * windows.dilations[i]
        first, last = (
            (-windows.before[i], windows.sizes[i] + windows.after[i]) if with_padding else (0, windows.sizes[i])
        )
        inside = ((places >= first) & (places < last)).sum(1)
        product = product * inside.to(x.dtype).reshape([-1] + [1] * (rank - 1 - i))
    return product


@operator("LpPool", since=2, passing=windows_of)
def _norm_pool(
    x: _Tensor, *, ceil_mode: int = 0, kernel_shape: list[int], p: int, node: Node, **attributes: Any
) -> _Tensor:
    windows = windows_of(x, kernel_shape, node=node, **attributes)
    sums = _sums(x.abs() if p == 1 else x.abs().pow(p), windows, bool(ceil_mode))
    if p == 1:
        return sums
    # The root has no derivative at 0; PyTorch's norms take 0 there.
    is_zero = sums == 0
    return torch.where(is_zero, sums, torch.where(is_zero, torch.ones_like(sums), sums).pow(1 / p))


@operator("GlobalAveragePool")
def _global_average_pool(x: _Tensor) -> _Tensor:
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


@operator("GlobalMaxPool")
def _global_max_pool(x: _Tensor) -> _Tensor:
    # For ties, max() passes the gradient to one element, as PyTorch's pools do; amax() would divide it.
    return x.flatten(2).max(-1).values.reshape([*x.shape[:2], *[1] * (x.dim() - 2)])


@operator("GlobalLpPool", since=2)
def _global_norm_pool(x: _Tensor, *, p: int) -> _Tensor:
    norm: _Tensor = torch.linalg.vector_norm(x, p, tuple(range(2, x.dim())), keepdim=True)
    return norm


@operator("MaxUnpool", since=9, known_inputs=(2,))
def _max_unpool(
    x: _Tensor,
    index: _Tensor,
    output_shape: Any,
    *,
    kernel_shape: list[int],
    pads: list[int] | None = None,
    strides: list[int] | None = None,
    node: Node,
) -> _Tensor:
    rank = len(kernel_shape)
    strides, pads = strides or [1] * rank, pads or [0] * (2 * rank)
    sizes = [
        (size - 1) * stride + extent - before - after
        for size, stride, extent, before, after in zip(
            x.shape[2:], strides, kernel_shape, pads[:rank], pads[rank:], strict=True
        )
    ]
    total = x.shape[0] * x.shape[1]
    for size in sizes:
        total = total * size
    flat = x.new_zeros([total]).scatter(0, index.flatten(), x.flatten())
    result = flat.reshape([x.shape[0], x.shape[1], *sizes])
    if output_shape is None:
        return result
    target_shape = integers(output_shape, "output_shape", node)
    return padded(result, [0] * rank, [new - old for new, old in zip(target_shape[-rank:], sizes, strict=True)])


@operator("MaxRoiPool")
def _max_region_pool(x: _Tensor, regions: _Tensor, *, pooled_shape: list[int], spatial_scale: float) -> _Tensor:
    # Regions are whole pixels and include the last. floor(x + 0.5) rounds half up, as ONNX Runtime does, not to even.
    corners = (regions[:, 1:].detach() * spatial_scale + 0.5).floor()
    y = x[regions[:, 0].long()]
    for axis, (bins, size) in enumerate(zip(pooled_shape, x.shape[2:], strict=True)):
        first, last = corners[:, 1 - axis], corners[:, 3 - axis]
        extent = (last - first + 1).clamp(min=1).unsqueeze(1) / bins
        number = torch.arange(bins, dtype=x.dtype)
        begin = ((number * extent).floor() + first.unsqueeze(1)).clamp(0, size)
        end = (((number + 1) * extent).ceil() + first.unsqueeze(1)).clamp(0, size)
        place = torch.arange(size)
        inside = (place >= begin.unsqueeze(-1)) & (place < end.unsqueeze(-1))
        # One dimension after the other: (regions, channels, bins before, bins, pixels, pixels after).
        if axis == 0:
            y = y.unsqueeze(2).masked_fill(~inside[:, None, :, :, None], float("-inf")).amax(3)
        else:
            y = y.unsqueeze(3).masked_fill(~inside[:, None, None, :, :], float("-inf")).amax(4)
    return torch.where(y == float("-inf"), torch.zeros_like(y), y)
