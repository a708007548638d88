"""Convolutions, transposed and deformable convolutions, and patches of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..node_table import Node, operator
from ..values import Number, integers
from .sampling import bilinear
from .windows import greatest, padded, same_pads, windows_of

_Tensor = torch.Tensor
CONVOLUTIONS: Any = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
"""Number of spatial dimensions -> PyTorch's convolution."""
_TRANSPOSED: Any = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@operator("Conv", passing=windows_of)
def convolved(
    x: _Tensor,
    weight: _Tensor,
    bias: _Tensor | None = None,
    *,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    node: Node,
    **attributes: Any,
) -> _Tensor:
    """Computes ONNX's Conv.

    Args:
        x: The input, N x C x D1 x ...
        weight: The weight, M x C / group x k1 x ...
        bias: The bias, M, or None.
        group: The number of groups.
        kernel_shape: The shape of the kernel.
        node: The node, for errors.
        attributes: Those of :func:`windows_of`.

    Raises:
        ExportError: If PyTorch can't compute it, or the kernel's shape is not the weight's.
    """
    _check_kernel(weight, kernel_shape, node)
    windows = windows_of(x, weight.shape[2:], node=node, **attributes)
    padding = windows.before
    if not windows.symmetric:
        x, padding = padded(x, windows.before, windows.after), [0] * len(padding)
    result: _Tensor = CONVOLUTIONS[len(padding)](x, weight, bias, windows.strides, padding, windows.dilations, group)
    return result


def _check_kernel(weight: _Tensor, kernel_shape: Sequence[int] | None, node: Node) -> None:
    if kernel_shape and list(kernel_shape) != list(weight.shape[2:]):
        raise node.error(f"kernel_shape is {kernel_shape}, but the weight has the shape {list(weight.shape)}")


@operator("ConvTranspose")
def _transposed_convolution(
    x: _Tensor,
    weight: _Tensor,
    bias: _Tensor | None = None,
    *,
    auto_pad: str,
    dilations: list[int] | None = None,
    group: int,
    kernel_shape: list[int] | None = None,
    output_padding: list[int] | None = None,
    output_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
    node: Node,
) -> _Tensor:
    _check_kernel(weight, kernel_shape, node)
    windows = windows_of(x, weight.shape[2:], auto_pad="VALID", dilations=dilations, strides=strides, node=node)
    rank = len(windows.sizes)
    extra_padding: list[Number] = list(output_padding or [0] * rank)
    # The output's size without padding.
    full = [
        (size - 1) * stride + extent
        for size, stride, extent in zip(windows.sizes, windows.strides, windows.extents, strict=True)
    ]
    if auto_pad.startswith("SAME") or output_shape:
        shape = (output_shape or [size * stride for size, stride in zip(windows.sizes, windows.strides, strict=True)])[
            -rank:
        ]
        excess = [size + extra - target for size, extra, target in zip(full, extra_padding, shape, strict=True)]
        before, after = same_pads(
            node,
            [greatest(total, 0) for total in excess],
            auto_pad if auto_pad == "SAME_UPPER" else "SAME_LOWER",
        )
        # An output shape beyond the full size is padded at the end.
        extra_padding = [extra + greatest(-total, 0) for extra, total in zip(extra_padding, excess, strict=True)]
    else:
        if auto_pad not in ("NOTSET", "VALID"):
            same_pads(node, [], auto_pad)
        explicit_pads = pads if pads and auto_pad == "NOTSET" else [0] * (2 * rank)
        before, after = list(explicit_pads[:rank]), list(explicit_pads[rank:])
    transposed = _TRANSPOSED[rank]
    # PyTorch requires the same padding on both sides, and less output padding than the stride or dilation.
    has_fixed_pads = all(isinstance(number, int) for number in (*before, *after, *extra_padding))
    native = has_fixed_pads and all(
        a == b >= 0 and extra < max(stride, step)
        for a, b, extra, stride, step in zip(
            before, after, extra_padding, windows.strides, windows.dilations, strict=True
        )
    )
    result: _Tensor
    if native:
        result = transposed(x, weight, bias, windows.strides, before, extra_padding, group, windows.dilations)
        return result
    # Otherwise computes the output without padding, then crops or extends it.
    result = transposed(x, weight, None, windows.strides, 0, 0, group, windows.dilations)
    result = padded(result, [-p for p in before], [extra - p for extra, p in zip(extra_padding, after, strict=True)])
    return result if bias is None else result + bias.reshape([-1] + [1] * rank)


@operator("DeformConv", since=19)
def _deformable_convolution(
    x: _Tensor,
    weight: _Tensor,
    offset: _Tensor,
    bias: _Tensor | None,
    mask: _Tensor | None,
    *,
    dilations: list[int] | None = None,
    group: int,
    kernel_shape: list[int] | None = None,
    offset_group: int,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
    node: Node,
) -> _Tensor:
    if x.dim() != 4:
        raise node.error(f"its input has {x.dim() - 2} spatial dimensions, but only 2 are supported")
    _check_kernel(weight, kernel_shape, node)
    windows = windows_of(x, weight.shape[2:], dilations=dilations, pads=pads, strides=strides, node=node)
    (batch, channels), (height, width) = x.shape[:2], offset.shape[2:]
    rows, columns = windows.kernel
    patch = rows * columns
    # Position of each element of each window: its regular place plus the offset.
    moved = offset.reshape(batch, offset_group, patch, 2, height, width)
    places = []
    for axis, (count, elements) in enumerate(((height, rows), (width, columns))):
        start = torch.arange(count, dtype=x.dtype) * windows.strides[axis] - windows.before[axis]
        element = torch.arange(elements, dtype=x.dtype) * windows.dilations[axis]
        place = element.reshape([-1, 1, 1, 1] if axis == 0 else [1, -1, 1, 1])
        place = place + start.reshape([-1, 1] if axis == 0 else [1, -1])
        places.append(moved[:, :, :, axis] + place.expand(rows, columns, height, width).reshape(patch, height, width))
    images = x.reshape(batch * offset_group, channels // offset_group, *x.shape[2:])
    y, x_place = (place.reshape(batch * offset_group, patch * height * width) for place in places)
    values = bilinear(images, y, x_place).reshape(batch, offset_group, channels // offset_group, patch, height, width)
    if mask is not None:
        values = values * mask.reshape(batch, offset_group, 1, patch, height, width)
    grouped = values.reshape(batch, group, channels // group * patch, height * width)
    kernel = weight.reshape(group, weight.shape[0] // group, -1)
    result = torch.matmul(kernel, grouped).reshape(batch, weight.shape[0], height, width)
    return result if bias is None else result + bias.reshape(-1, 1, 1)


@operator("Col2Im", since=18, known_inputs=(1, 2))
def _columns_to_image(
    x: _Tensor,
    image_shape: Any,
    block_shape: Any,
    *,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
    node: Node,
) -> _Tensor:
    image, block = integers(image_shape, "image_shape", node), integers(block_shape, "block_shape", node)
    rank = len(image)
    dilations, strides, pads = dilations or [1] * rank, strides or [1] * rank, pads or [0] * (2 * rank)
    totals = [size + pads[i] + pads[rank + i] for i, size in enumerate(image)]
    counts = [(totals[i] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1 for i in range(rank)]
    y = x.reshape([x.shape[0], -1, *block, *counts])
    # One dimension after another: adds the elements of the windows at their places.
    for i in range(rank):
        y = y.movedim((2, 2 + rank - i), (-2, -1)).flatten(-2)
        place = torch.arange(block[i])[:, None] * dilations[i] + torch.arange(counts[i]) * strides[i]
        image_of_zeros = y.new_zeros([*y.shape[:-1], totals[i]])
        y = image_of_zeros.index_add(-1, place.flatten(), y)
        # The new dimension stays last, so the next block and count dimensions have moved up.
    return padded(y, [-pad for pad in pads[:rank]], [-pad for pad in pads[rank:]])


@operator("CausalConvWithState", since=27)
def _causal_convolution(
    x: _Tensor,
    weight: _Tensor,
    bias: _Tensor | None,
    past: _Tensor | None,
    *,
    activation: str,
    node: Node,
) -> tuple[_Tensor, _Tensor]:
    if activation not in ("none", "silu", "swish"):
        raise node.error(f"activation is {activation!r}, but must be 'none', 'silu' or 'swish'")
    # Zeros or the past of the last call before the sequence: each output sees only itself and earlier inputs.
    before = weight.shape[2] - 1
    y = F.pad(x, [before, 0]) if past is None else torch.cat([past, x], -1)
    result = F.conv1d(y, weight, bias, groups=weight.shape[0])
    return result if activation == "none" else F.silu(result), y[..., y.shape[-1] - before :]
