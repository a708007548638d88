"""Pooling and its backward pass, where torch.onnx or ONNX Runtime lacks it or differs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..fx.operator_table import Size, Value, composite, decomposition, op, translation
from .convolution import windows
from .sorting import keys

aten = torch.ops.aten


def _adaptive_max_pool(dims: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def pool(input: torch.Tensor, output_size: Sequence[Size]) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the maximum of each window by itself, as sizes differ: [i n // p, ceil((i + 1) n / p)) on each axis."""
        sizes = input.shape[-dims:]
        counts = [*output_size] * dims if len(output_size) == 1 else list(output_size)
        values, indices = [], []
        for position in itertools.product(*(range(int(count)) for count in counts)):
            starts = [i * size // count for i, size, count in zip(position, sizes, counts, strict=True)]
            stops = [
                ((i + 1) * size + count - 1) // count for i, size, count in zip(position, sizes, counts, strict=True)
            ]
            window = input
            for axis in range(dims):
                window = window.narrow(axis - dims, starts[axis], stops[axis] - starts[axis])
            best, place = window.flatten(-dims).max(-1)
            # From the place in the window, counted row by row, to the index in the input, counted likewise.
            index = torch.zeros_like(place)
            scale: Size = 1
            for axis in reversed(range(dims)):
                width = stops[axis] - starts[axis]
                index = index + (place % width + starts[axis]) * scale
                place, scale = place // width, scale * sizes[axis]
            values.append(best)
            indices.append(index)
        shape = [*input.shape[:-dims], *counts]
        return torch.stack(values, -1).reshape(shape), torch.stack(indices, -1).reshape(shape)

    return pool


for _dims, _operator in enumerate((aten.adaptive_max_pool1d, aten.adaptive_max_pool2d, aten.adaptive_max_pool3d), 1):
    composite(_operator.default)(_adaptive_max_pool(_dims))


@composite(aten.adaptive_avg_pool1d.default)
def _adaptive_avg_pool1d(input: torch.Tensor, output_size: Sequence[Size]) -> torch.Tensor:
    if list(output_size) == [1]:
        return input.mean(-1, keepdim=True)
    return aten.adaptive_avg_pool1d.default(input, output_size)  # type: ignore[no-any-return]


@composite(aten.adaptive_avg_pool2d.default)
def _adaptive_avg_pool2d(input: torch.Tensor, output_size: Sequence[Size]) -> torch.Tensor:
    """Computes a single pixel as a mean; PyTorch's own version takes a strided view of it, for channels last."""
    if list(output_size) in ([1], [1, 1]):
        return input.mean((-2, -1), keepdim=True)
    return aten.adaptive_avg_pool2d.default(input, output_size)  # type: ignore[no-any-return]


@composite(aten.adaptive_avg_pool3d.default)
def _adaptive_avg_pool3d(input: torch.Tensor, output_size: Sequence[Size]) -> torch.Tensor:
    """Averages axis by axis, since the mean of a box is a mean of means; a matrix product would spread infinities."""
    counts = [*output_size] * 3 if len(output_size) == 1 else output_size
    for axis, count in zip((-3, -2, -1), counts, strict=True):
        size, means = input.shape[axis], []
        for place in range(int(count)):
            start, stop = place * size // count, ((place + 1) * size + count - 1) // count
            means.append(input.narrow(axis, start, stop - start).mean(axis))
        input = torch.stack(means, axis)
    return input


@decomposition(aten._adaptive_avg_pool2d_backward.default)
def _adaptive_avg_pool2d_backward(grad_output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of adaptive average pooling: a product with an averaging matrix along each axis."""
    rows, columns = (_averages(input.shape[axis], grad_output.shape[axis], grad_output) for axis in (-2, -1))
    result: torch.Tensor = rows.transpose(0, 1) @ grad_output @ columns
    return result


def _averages(size: Size, positions: Size, like: torch.Tensor) -> torch.Tensor:
    """Returns the matrix (positions, size) that averages adaptively: window i is [i n // p, ceil((i + 1) n / p))."""
    index = torch.arange(positions, device=like.device)[:, None]
    start, stop = index * size // positions, ((index + 1) * size + positions - 1) // positions
    place = torch.arange(size, device=like.device)
    inside = (place >= start) & (place < stop)
    averages: torch.Tensor = inside.to(like.dtype) / (stop - start)
    return averages


def _avg_pool(dims: int) -> Callable[..., Any]:
    def avg_pool(
        input: torch.Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        """Computes average pooling in ceil mode or with a custom divisor, where ONNX or its runtime differs."""
        if not ceil_mode and divisor_override is None:
            return NotImplemented
        kernel, step, pad = _pool_arguments(dims, kernel_size, stride, padding)
        size = input.shape[-dims:]
        # A window that reaches past the far edge must start inside the input or the near padding.
        positions = []
        for axis in range(dims):
            reach = size[axis] + 2 * pad[axis] - kernel[axis]
            count = (reach + (step[axis] - 1 if ceil_mode else 0)) // step[axis] + 1
            if ceil_mode:
                count = count - int((count - 1) * step[axis] >= size[axis] + pad[axis])
            positions.append(count)
        far = [pad[axis] + kernel[axis] + step[axis] for axis in range(dims)]
        padded = aten.constant_pad_nd.default(
            input, [edge for axis in reversed(range(dims)) for edge in (pad[axis], far[axis])], 0.0
        )
        flat = padded.reshape(-1, 1, *padded.shape[-dims:])
        total = torch.stack(windows(flat, kernel, step, [1] * dims, positions)).sum(0)
        total = total.reshape(*input.shape[:-dims], *positions)
        return total / _divisor(size, positions, kernel, step, pad, count_include_pad, divisor_override, input)

    return avg_pool


def _avg_pool_backward(dims: int) -> Callable[..., torch.Tensor]:
    def avg_pool_backward(
        grad_output: torch.Tensor,
        input: torch.Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> torch.Tensor:
        """Returns the gradient of average pooling: each output's, over its divisor, goes to its whole window."""
        kernel, step, pad = _pool_arguments(dims, kernel_size, stride, padding)
        size, positions = input.shape[-dims:], grad_output.shape[-dims:]
        share = grad_output / _divisor(
            size, positions, kernel, step, pad, count_include_pad, divisor_override, grad_output
        )
        flat = share.reshape(-1, 1, *positions)
        ones = torch.ones([1, 1, *kernel], dtype=flat.dtype, device=flat.device)
        none, one = [0] * dims, [1] * dims
        full: torch.Tensor = aten.convolution.default(flat, ones, None, step, none, one, True, none, 1)
        # Elements at the far edge that no window covers get zero; one stride plus one kernel suffices in either mode.
        edges = [edge for axis in reversed(range(dims)) for edge in (0, step[axis] + kernel[axis])]
        full = aten.constant_pad_nd.default(full, edges, 0.0)
        for axis in range(dims):
            full = aten.slice.Tensor(full, 2 + axis, pad[axis], pad[axis] + size[axis], 1)
        return full.reshape(input.shape)

    return avg_pool_backward


def _pool_arguments(
    dims: int, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    kernel, step, pad = (
        [*values] * dims if len(values) == 1 else list(values) for values in (kernel_size, stride, padding)
    )
    return kernel, step or kernel, pad


def _divisor(
    size: Sequence[Size],
    positions: Sequence[Size],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    include_padding: bool,
    override: int | None,
    like: torch.Tensor,
) -> Any:
    """Returns the divisor of average pooling: a number, or a tensor with one for each window."""
    if override is not None:
        return override
    dims = len(kernel)
    divisor: Any = 1
    for axis in range(dims):
        counts = _counts(size[axis], positions[axis], kernel[axis], stride[axis], padding[axis], include_padding, like)
        divisor = divisor * counts.reshape([-1 if other == axis else 1 for other in range(dims)])
    return divisor


def _counts(
    size: Size, positions: Size, kernel: int, stride: int, padding: int, include_padding: bool, like: torch.Tensor
) -> torch.Tensor:
    """Returns how many elements each window averages along one axis, a tensor of shape (positions,)."""
    start = torch.arange(positions, device=like.device) * stride - padding
    stop = (start + kernel).clamp(max=size + padding)
    if not include_padding:
        start, stop = start.clamp(min=0), stop.clamp(max=size)
    return (stop - start).to(like.dtype)


decomposition(aten.avg_pool2d.default)(_avg_pool(2))
decomposition(aten.avg_pool3d.default)(_avg_pool(3))
decomposition(aten.avg_pool2d_backward.default)(_avg_pool_backward(2))
decomposition(aten.avg_pool3d_backward.default)(_avg_pool_backward(3))


@translation(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def _max_pool_with_indices(
    value: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Value, Value]:
    """Returns max pooling with indices into each channel's plane, as PyTorch counts them.

    ONNX counts through the whole tensor. torch.onnx finds the difference by pooling the whole input a second time,
    which doubles the cost; the remainder of a division by the plane's size is cheap.
    """
    dims = len(kernel_size)

    def each(values: Sequence[int]) -> list[int]:
        return [*values] * dims if len(values) == 1 else [*values]

    kernel, step, pads, spread = each(kernel_size), each(stride or kernel_size), each(padding), each(dilation)
    sizes: list[Any] = list(value.shape or ())[-dims:]
    far = _far_padding(sizes, kernel, step, pads, spread) if ceil_mode else pads
    alone = len(value.shape) == dims + 1
    batched = op.Unsqueeze(value, [0]) if alone else value
    is_float = value.dtype is not None and value.dtype.is_floating_point()
    ordered = keys(value) if is_float else value
    pooled, flat = op.MaxPool(
        op.Unsqueeze(ordered, [0]) if alone else ordered,
        kernel_shape=kernel,
        strides=step,
        pads=[*pads, *(far or pads)],
        dilations=spread,
        ceil_mode=int(far is None),
    )
    if is_float:
        pooled = op.Reshape(op.Gather(op.Reshape(batched, [-1]), op.Reshape(flat, [-1]), axis=0), op.Shape(flat))
    plane = op.ReduceProd(op.Shape(batched, start=2), keepdims=0)
    indices = op.Mod(flat, plane)
    if alone:
        pooled, indices = op.Squeeze(pooled, [0]), op.Squeeze(indices, [0])
    return pooled, indices


def _far_padding(
    sizes: Sequence[Any], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int] | None:
    """Returns the padding at the far edge that completes the windows which ceil mode adds.

    ONNX Runtime's own ceil mode has windows that start past the input, and contradicts itself about their number.
    Returns None if a size is symbolic, or if ONNX does not allow that much padding.
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


def _max_pool_backward(dims: int) -> Callable[..., torch.Tensor]:
    def max_pool_backward(
        grad_output: torch.Tensor,
        input: torch.Tensor,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil_mode: bool,
        indices: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the gradient of max pooling: each output's goes to the input element that was the maximum."""
        return _scatter_to_maxima(grad_output, input, indices, dims)

    return max_pool_backward


def _scatter_to_maxima(
    grad_output: torch.Tensor, input: torch.Tensor, indices: torch.Tensor, dims: int
) -> torch.Tensor:
    """Adds the gradient of each output to the element at its index in the flat plane."""
    flat = torch.zeros_like(input).flatten(-dims)
    return flat.scatter_add(-1, indices.flatten(-dims), grad_output.flatten(-dims)).reshape(input.shape)


decomposition(aten.max_pool2d_with_indices_backward.default)(_max_pool_backward(2))
decomposition(aten.max_pool3d_with_indices_backward.default)(_max_pool_backward(3))
