"""Operators, most of them backward ones, that are translated wrongly or not at all, written in ones that are right."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["BACKWARD_DECOMPOSITIONS"]

aten = torch.ops.aten
Size = Any
"""An int, or a symbolic one."""


def _windows(
    padded: torch.Tensor,
    kernel: Sequence[Size],
    stride: Sequence[int],
    dilation: Sequence[int],
    positions: Sequence[Size],
) -> list[torch.Tensor]:
    """Returns, for every place in the kernel, the elements that it meets as it slides: im2col by strided slices."""
    windows = []
    for offsets in itertools.product(*(range(int(size)) for size in kernel)):
        window = padded
        for axis, offset in enumerate(offsets):
            start = offset * dilation[axis]
            stop = start + (positions[axis] - 1) * stride[axis] + 1
            window = aten.slice.Tensor(window, 2 + axis, start, stop, stride[axis])
        windows.append(window)
    return windows


def _pad(value: torch.Tensor, padding: Sequence[int], fill: float = 0.0) -> torch.Tensor:
    if not any(padding):
        return value
    padded: torch.Tensor = aten.constant_pad_nd.default(
        value, [p for size in reversed(padding) for p in (size, size)], fill
    )
    return padded


def _convolution_weight_gradient(
    image: torch.Tensor,
    response: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """Returns the sum over batch and positions of image window times response, of the weight's shape.

    Args:
        image: The larger tensor, (batch, channels of the image, spatial...).
        response: What the kernel gives at each position, (batch, channels of the response, spatial...).
        weight: (channels of the response, channels of the image / groups, kernel...).
        stride: Of the kernel.
        padding: Of the image.
        dilation: Of the kernel.
        groups: Number of channel groups.
    """
    kernel = weight.shape[2:]
    places = 1
    for size in kernel:
        places *= int(size)
    batch, positions = response.shape[0], response.shape[2:]
    count = batch
    for size in positions:
        count = count * size
    spatial = range(2, response.dim())
    # Both as matrices with one row a channel and one column a (batch, position), split into groups.
    columns = torch.stack(_windows(_pad(image, padding), kernel, stride, dilation, positions), dim=2)
    columns = columns.permute(1, 2, 0, *(axis + 1 for axis in spatial))
    columns = columns.reshape(groups, image.shape[1] // groups * places, count)
    rows = response.permute(1, 0, *spatial).reshape(groups, weight.shape[0] // groups, count)
    return torch.bmm(rows, columns.transpose(1, 2)).reshape(weight.shape)


def convolution_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of ``aten.convolution`` with respect to input, weight and bias, in any number of dimensions."""
    dims = grad_output.dim() - 2
    stride, padding, dilation = (
        [*values] * dims if len(values) == 1 else values for values in (stride, padding, dilation)
    )
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        if transposed:
            grad_input = aten.convolution.default(
                grad_output, weight, None, stride, padding, dilation, False, [0] * dims, groups
            )
        else:
            grad_input = _convolution_input_gradient(grad_output, input, weight, stride, padding, dilation, groups)
    if output_mask[1]:
        image, response = (grad_output, input) if transposed else (input, grad_output)
        grad_weight = _convolution_weight_gradient(image, response, weight, stride, padding, dilation, groups)
    if output_mask[2]:
        grad_bias = grad_output.sum([0, *range(2, dims + 2)])
    return grad_input, grad_weight, grad_bias


def _convolution_input_gradient(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """Returns the transposed convolution of the gradient, cut or padded to the input's size.

    A strided kernel may miss the last rows of its input: their gradient is zero. How many there are is an output
    padding of the transposed convolution, which must be a number; with symbolic sizes it is padding after it.
    """
    dims = len(stride)
    full: torch.Tensor = aten.convolution.default(
        grad_output, weight, None, stride, [0] * dims, dilation, True, [0] * dims, groups
    )
    for axis in range(dims):
        size = input.shape[2 + axis]
        if stride[axis] > 1:
            # At most stride - 1 rows are missed, so this much padding is enough for the slice below.
            pads = [0] * (2 * dims)
            pads[2 * (dims - 1 - axis) + 1] = stride[axis] - 1
            full = aten.constant_pad_nd.default(full, pads, 0.0)
        if stride[axis] > 1 or padding[axis]:
            full = aten.slice.Tensor(full, 2 + axis, padding[axis], padding[axis] + size, 1)
    return full


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
    dims = 2 if input.dim() in (3, 4) else 3
    return _scatter_to_maxima(grad_output, input, indices, dims)


def adaptive_max_pool_backward(grad_output: torch.Tensor, input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Gradient of adaptive max pooling in two dimensions."""
    return _scatter_to_maxima(grad_output, input, indices, 2)


def _scatter_to_maxima(
    grad_output: torch.Tensor, input: torch.Tensor, indices: torch.Tensor, dims: int
) -> torch.Tensor:
    flat = torch.zeros_like(input).flatten(-dims)
    return flat.scatter_add(-1, indices.flatten(-dims), grad_output.flatten(-dims)).reshape(input.shape)


def avg_pool2d(
    input: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Average pooling where ONNX or its runtime differs: a last window cut off by the edge, or a divisor of its own."""
    if not ceil_mode and divisor_override is None:
        return NotImplemented
    kernel, step, pad = _pool_arguments(kernel_size, stride, padding)
    size = input.shape[-2:]
    # A window beyond the far edge must start inside the input or its padding before it.
    positions = []
    for axis in range(2):
        reach = size[axis] + 2 * pad[axis] - kernel[axis]
        count = (reach + (step[axis] - 1 if ceil_mode else 0)) // step[axis] + 1
        if ceil_mode:
            count = count - int((count - 1) * step[axis] >= size[axis] + pad[axis])
        positions.append(count)
    far = [kernel[axis] + step[axis] for axis in range(2)]
    padded = aten.constant_pad_nd.default(input, [pad[1], pad[1] + far[1], pad[0], pad[0] + far[0]], 0.0)
    flat = padded.reshape(-1, 1, size[0] + 2 * pad[0] + far[0], size[1] + 2 * pad[1] + far[1])
    total = torch.stack(_windows(flat, kernel, step, [1, 1], positions)).sum(0)
    total = total.reshape(*input.shape[:-2], *positions)
    return total / _divisor(size, positions, kernel, step, pad, count_include_pad, divisor_override, input)


def _pool_arguments(
    kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    kernel = [*kernel_size] * 2 if len(kernel_size) == 1 else list(kernel_size)
    step = ([*stride] * 2 if len(stride) == 1 else list(stride)) if len(stride) else kernel
    return kernel, step, [*padding] * 2 if len(padding) == 1 else list(padding)


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
    """Returns what each window of an average pooling in two dimensions is divided by: a number, or one for each."""
    if override is not None:
        return override
    rows, columns = (
        _counts(size[axis], positions[axis], kernel[axis], stride[axis], padding[axis], include_padding, like)
        for axis in range(2)
    )
    return rows[:, None] * columns


def adaptive_avg_pool2d_backward(grad_output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Gradient of adaptive average pooling, a product with a matrix of averages along each axis."""
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


def avg_pool2d_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    """Gradient of average pooling: each output's gradient, divided by what it averaged over, goes to all of them."""
    kernel, step, pad = _pool_arguments(kernel_size, stride, padding)
    height, width = input.shape[-2:]
    rows, columns = grad_output.shape[-2:]
    share = grad_output / _divisor(
        (height, width), (rows, columns), kernel, step, pad, count_include_pad, divisor_override, grad_output
    )
    flat = share.reshape(-1, 1, rows, columns)
    ones = torch.ones([1, 1, *kernel], dtype=flat.dtype, device=flat.device)
    full: torch.Tensor = aten.convolution.default(flat, ones, None, step, [0, 0], [1, 1], True, [0, 0], 1)
    # What the windows miss at the far edge is zero; one stride and kernel more than suffices for any rounding mode.
    full = aten.constant_pad_nd.default(full, [0, step[1] + kernel[1], 0, step[0] + kernel[0]], 0.0)
    full = aten.slice.Tensor(full, 2, pad[0], pad[0] + height, 1)
    full = aten.slice.Tensor(full, 3, pad[1], pad[1] + width, 1)
    return full.reshape(input.shape)


def _counts(
    size: Size, positions: Size, kernel: int, stride: int, padding: int, include_padding: bool, like: torch.Tensor
) -> torch.Tensor:
    """Returns over how many elements each window averages along one axis, as a tensor of ``positions`` numbers."""
    start = torch.arange(positions, device=like.device) * stride - padding
    stop = (start + kernel).clamp(max=size + padding)
    if not include_padding:
        start, stop = start.clamp(min=0), stop.clamp(max=size)
    return (stop - start).to(like.dtype)


def empty_permuted(size: Sequence[Size], physical_layout: Sequence[int], **options: Any) -> torch.Tensor:
    """Memory whose values nobody reads: zeros, as ONNX has no uninitialized tensors."""
    return torch.zeros(size, dtype=options.get("dtype"), device=options.get("device"))


BACKWARD_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.convolution_backward.default: convolution_backward,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
    aten.max_pool3d_with_indices_backward.default: max_pool_backward,
    aten.adaptive_max_pool2d_backward.default: adaptive_max_pool_backward,
    aten.avg_pool2d.default: avg_pool2d,
    aten.avg_pool2d_backward.default: avg_pool2d_backward,
    aten._adaptive_avg_pool2d_backward.default: adaptive_avg_pool2d_backward,
    aten.empty_permuted.default: empty_permuted,
}
