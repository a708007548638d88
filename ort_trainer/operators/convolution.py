"""Convolutions and their backward pass, written in operators that ONNX has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ..fx.operator_table import Size, decomposition

aten = torch.ops.aten


# Measured on two cores: larger kernels are faster as a convolution (7 x 7 by a factor of 3), 3 x 3 as a product.
_MANY_PLACES = 9


def windows(
    padded: torch.Tensor,
    kernel: Sequence[Size],
    stride: Sequence[int],
    dilation: Sequence[int],
    positions: Sequence[Size],
) -> list[torch.Tensor]:
    """Returns the elements that each place in the kernel meets as the kernel slides: im2col by strided slices."""
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
    """Pads the spatial axes at both edges."""
    if not any(padding):
        return value
    padded: torch.Tensor = aten.constant_pad_nd.default(
        value, [p for size in reversed(padding) for p in (size, size)], fill
    )
    return padded


@decomposition(aten.convolution_backward.default)
def _convolution_backward(
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
    """Returns the gradients of ``aten.convolution`` with respect to input, weight and bias, in any dimension."""
    dims = grad_output.dim() - 2
    stride, padding, dilation = _each_dimension(dims, stride, padding, dilation)
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        if transposed:
            grad_input = aten.convolution.default(
                grad_output, weight, None, stride, padding, dilation, False, [0] * dims, groups
            )
            for axis in range(dims):
                if output_padding[axis] >= stride[axis]:  # it holds at least one more step
                    grad_input = aten.slice.Tensor(grad_input, 2 + axis, 0, input.shape[2 + axis], 1)
        else:
            grad_input = _convolution_input_gradient(grad_output, input, weight, stride, padding, dilation, groups)
    if output_mask[1]:
        image, response = (grad_output, input) if transposed else (input, grad_output)
        grad_weight = _convolution_weight_gradient(image, response, weight, stride, padding, dilation, groups)
    if output_mask[2]:
        grad_bias = grad_output.sum([0, *range(2, dims + 2)])
    return grad_input, grad_weight, grad_bias


def _each_dimension(dims: int, *settings: Sequence[int]) -> list[list[int]]:
    """Returns settings with one number per dimension; a single number applies to all of them."""
    return [[*values] * dims if len(values) == 1 else [*values] for values in settings]


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

    A strided kernel may miss the last rows of its input: their gradient is zero. ONNX's output padding could add them,
    but it must be a number, and sizes may be symbolic: so the result is padded afterwards.
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


def _convolution_weight_gradient(
    image: torch.Tensor,
    response: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """Returns the sum over batch and positions of image window times response, in the weight's shape.

    Args:
        image: The larger tensor, (batch, channels of the image, spatial...).
        response: The kernel's result at each position, (batch, channels of the response, spatial...).
        weight: (channels of the response, channels of the image / groups, kernel...).
        stride: Stride of the kernel.
        padding: Padding of the image.
        dilation: Dilation of the kernel.
        groups: Number of channel groups.
    """
    kernel = weight.shape[2:]
    places = 1
    for size in kernel:
        places *= int(size)
    if places > _MANY_PLACES:
        return _weight_gradient_by_convolution(image, response, weight, stride, padding, dilation, groups)
    batch, positions = response.shape[0], response.shape[2:]
    count = batch
    for size in positions:
        count = count * size
    spatial = range(2, response.dim())
    # Both become matrices with a row per channel and a column per (batch, position), split into groups.
    columns = torch.stack(windows(_pad(image, padding), kernel, stride, dilation, positions), dim=2)
    columns = columns.permute(1, 2, 0, *(axis + 1 for axis in spatial))
    columns = columns.reshape(groups, image.shape[1] // groups * places, count)
    rows = response.permute(1, 0, *spatial).reshape(groups, weight.shape[0] // groups, count)
    return torch.bmm(rows, columns.transpose(1, 2)).reshape(weight.shape)


def _weight_gradient_by_convolution(
    image: torch.Tensor,
    response: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """Returns the same by one convolution, with batch and channels swapped, and stride and dilation swapped."""
    dims = len(stride)
    per_group = image.shape[1] // groups
    # (channels of a group, groups x batch, spatial...), and as a kernel (channels of the response, batch, spatial...)
    split = image.reshape(image.shape[0], groups, per_group, *image.shape[2:])
    swapped = split.permute(2, 1, 0, *range(3, 3 + dims)).flatten(1, 2)
    full: torch.Tensor = aten.convolution.default(
        swapped, response.transpose(0, 1), None, dilation, padding, stride, False, [0] * dims, groups
    )
    for axis in range(dims):
        # A stride may leave rows at the far edge that no window covers.
        full = aten.slice.Tensor(full, 2 + axis, 0, weight.shape[2 + axis], 1)
    return full.transpose(0, 1).reshape(weight.shape)


@decomposition(aten.convolution.default)
def _convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """Computes a transposed convolution with an output padding of a stride or more, which ONNX Runtime gets wrong.

    It convolves without any padding, cuts the padding off the near edge, and appends zeros for output beyond the far
    edge.
    """
    dims = input.dim() - 2
    stride, padding, output_padding = _each_dimension(dims, stride, padding, output_padding)
    if not transposed or all(more < step for more, step in zip(output_padding, stride, strict=True)):
        return NotImplemented
    none = [0] * dims
    full: torch.Tensor = aten.convolution.default(input, weight, None, stride, none, dilation, True, none, groups)
    sizes = [full.shape[2 + axis] - 2 * padding[axis] + output_padding[axis] for axis in range(dims)]
    beyond = [max(output_padding[axis] - padding[axis], 0) for axis in range(dims)]
    if any(beyond):
        full = aten.constant_pad_nd.default(full, [p for more in reversed(beyond) for p in (0, more)], 0.0)
    for axis in range(dims):
        full = aten.slice.Tensor(full, 2 + axis, padding[axis], padding[axis] + sizes[axis], 1)
    return full if bias is None else full + bias.reshape(-1, *[1] * dims)
