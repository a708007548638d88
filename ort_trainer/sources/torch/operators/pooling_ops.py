"""Pooling and its backward pass, where torch.onnx or ONNX Runtime lacks them or differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .convolution_ops import windows

__all__ = ["POOLING_DECOMPOSITIONS", "averages"]

aten = torch.ops.aten
Size = Any
"""An int, or a symbolic one."""


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
        """Gradient of max pooling: each output's gradient goes to the input that was the maximum."""
        return _scatter_to_maxima(grad_output, input, indices, dims)

    return max_pool_backward


def _scatter_to_maxima(
    grad_output: torch.Tensor, input: torch.Tensor, indices: torch.Tensor, dims: int
) -> torch.Tensor:
    flat = torch.zeros_like(input).flatten(-dims)
    return flat.scatter_add(-1, indices.flatten(-dims), grad_output.flatten(-dims)).reshape(input.shape)


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
        """Average pooling where ONNX or its runtime differs: a last window cut off by the edge, or an own divisor."""
        if not ceil_mode and divisor_override is None:
            return NotImplemented
        kernel, step, pad = _pool_arguments(dims, kernel_size, stride, padding)
        size = input.shape[-dims:]
        # A window beyond the far edge must start inside the input or its padding before it.
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
    """Returns what each window of an average pooling is divided by: a number, or one for each."""
    if override is not None:
        return override
    dims = len(kernel)
    divisor: Any = 1
    for axis in range(dims):
        counts = _counts(size[axis], positions[axis], kernel[axis], stride[axis], padding[axis], include_padding, like)
        divisor = divisor * counts.reshape([-1 if other == axis else 1 for other in range(dims)])
    return divisor


def _adaptive_avg_pool2d_backward(grad_output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Gradient of adaptive average pooling, a product with a matrix of averages along each axis."""
    rows, columns = (averages(input.shape[axis], grad_output.shape[axis], grad_output) for axis in (-2, -1))
    result: torch.Tensor = rows.transpose(0, 1) @ grad_output @ columns
    return result


def averages(size: Size, positions: Size, like: torch.Tensor) -> torch.Tensor:
    """Returns the matrix (positions, size) that averages adaptively: window i is [i n // p, ceil((i + 1) n / p))."""
    index = torch.arange(positions, device=like.device)[:, None]
    start, stop = index * size // positions, ((index + 1) * size + positions - 1) // positions
    place = torch.arange(size, device=like.device)
    inside = (place >= start) & (place < stop)
    averages: torch.Tensor = inside.to(like.dtype) / (stop - start)
    return averages


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
        """Gradient of average pooling: each output's, divided by what it averaged over, goes to all of them."""
        kernel, step, pad = _pool_arguments(dims, kernel_size, stride, padding)
        size, positions = input.shape[-dims:], grad_output.shape[-dims:]
        share = grad_output / _divisor(
            size, positions, kernel, step, pad, count_include_pad, divisor_override, grad_output
        )
        flat = share.reshape(-1, 1, *positions)
        ones = torch.ones([1, 1, *kernel], dtype=flat.dtype, device=flat.device)
        none, one = [0] * dims, [1] * dims
        full: torch.Tensor = aten.convolution.default(flat, ones, None, step, none, one, True, none, 1)
        # What the windows miss at the far edge is zero; one stride and kernel more suffices for any rounding mode.
        edges = [edge for axis in reversed(range(dims)) for edge in (0, step[axis] + kernel[axis])]
        full = aten.constant_pad_nd.default(full, edges, 0.0)
        for axis in range(dims):
            full = aten.slice.Tensor(full, 2 + axis, pad[axis], pad[axis] + size[axis], 1)
        return full.reshape(input.shape)

    return avg_pool_backward


def _counts(
    size: Size, positions: Size, kernel: int, stride: int, padding: int, include_padding: bool, like: torch.Tensor
) -> torch.Tensor:
    """Returns over how many elements each window averages along one axis, as a tensor of ``positions`` numbers."""
    start = torch.arange(positions, device=like.device) * stride - padding
    stop = (start + kernel).clamp(max=size + padding)
    if not include_padding:
        start, stop = start.clamp(min=0), stop.clamp(max=size)
    return (stop - start).to(like.dtype)


POOLING_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward(2),
    aten.max_pool3d_with_indices_backward.default: _max_pool_backward(3),
    aten.avg_pool2d.default: _avg_pool(2),
    aten.avg_pool3d.default: _avg_pool(3),
    aten.avg_pool2d_backward.default: _avg_pool_backward(2),
    aten.avg_pool3d_backward.default: _avg_pool_backward(3),
    aten._adaptive_avg_pool2d_backward.default: _adaptive_avg_pool2d_backward,
}
