"""Quantization: scales and zero points, and products of quantized numbers.

Gradients pass straight through rounding, and are zero where a number was clamped to the range of its type, as in
``torch.fake_quantize_per_tensor_affine``; of a scale as in PyTorch's learnable one. Quantized numbers therefore flow as
floats, :class:`~..values.Rounded`, to the operators that take them as numbers. Scales that DynamicQuantizeLinear
computes have no gradient, as those of PyTorch's observers.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from ..node_table import Node, operator
from ..values import Rounded, floats, torch_dtype
from .casts import cast
from .convolution import convolved

_Tensor = torch.Tensor
_LARGEST_FLOAT4 = 6.0
# No type of quantized numbers reaches as far.
_BEYOND = 2.0**20

# The range of each integer type. Torch stores the smaller types in wider ones, whose limits don't apply.
_LIMITS = {
    ir.DataType.UINT2: (0, 3),
    ir.DataType.INT2: (-2, 1),
    ir.DataType.UINT4: (0, 15),
    ir.DataType.INT4: (-8, 7),
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT16: (0, 65535),
    ir.DataType.INT16: (-32768, 32767),
}


@operator("DequantizeLinear", since=10, takes_rounded=True)
@operator("DequantizeLinear", domain="com.microsoft", takes_rounded=True)
def _dequantize(
    x: _Tensor | Rounded,
    scale: _Tensor,
    zero: _Tensor | None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    node: Node,
) -> _Tensor:
    return dequantized(
        floats(x), scale, zero, axis, block_size, node, torch_dtype(output_dtype) if output_dtype else None
    )


def dequantized(
    x: _Tensor,
    scale: _Tensor,
    zero: _Tensor | None,
    axis: int,
    block_size: int,
    node: Node,
    dtype: torch.dtype | None = None,
) -> _Tensor:
    """Returns the floats that quantized numbers represent: (x - zero) * scale.

    Args:
        x: The numbers.
        scale: The scale: of the tensor, of each entry along an axis, or of each block.
        zero: The zero point, or None.
        axis: The axis.
        block_size: The size of blocks along the axis; 0 if there are none.
        node: The node, for errors.
        dtype: The dtype of the result; by default that of the scale.
    """
    dtype = dtype or scale.dtype
    # Integers of 32 bits, such as a bias, need float64; smaller ones are exact in float32.
    wide = torch.float64 if x.dtype in (torch.int32, torch.float64) else torch.promote_types(dtype, torch.float32)
    values = x.to(wide)
    if zero is not None:
        values = values - _spread(zero, x, axis, block_size, node).to(wide)
    return (values * _spread(scale, x, axis, block_size, node).to(wide)).to(dtype)


def _spread(of_parts: _Tensor, x: _Tensor, axis: int, block_size: int, node: Node) -> _Tensor:
    """Returns a scale or zero point in a shape that can be broadcast to the tensor."""
    if block_size:
        whole = of_parts.repeat_interleave(block_size, axis)
        return whole.narrow(axis, 0, x.shape[axis])
    if of_parts.dim() == 0 or (of_parts.dim() == 1 and of_parts.shape[0] == 1):
        return of_parts.reshape(())
    if of_parts.dim() != 1:
        if of_parts.dim() == x.dim():
            return of_parts
        raise node.error(f"its scale has {of_parts.dim()} dimensions: only blocks have more than one")
    shape = [1] * x.dim()
    shape[axis] = -1
    return of_parts.reshape(shape)


@operator("QuantizeLinear", since=10)
@operator("QuantizeLinear", domain="com.microsoft")
def _quantize(
    x: _Tensor,
    scale: _Tensor,
    zero: _Tensor | None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
    node: Node,
) -> Rounded:
    output_type = ir.DataType(output_dtype or ir.DataType.UINT8)
    if zero is not None:
        output_type = zero_point_type(node, 2, zero)
    return quantized(x, scale, zero, axis, block_size, output_type, node, saturate, precision)


def zero_point_type(node: Node, index: int, zero: _Tensor) -> ir.DataType:
    """Returns the type of a zero point, which is that of the output.

    The model's type comes before the dtype, because tensors store types of 2 and 4 bits in 8 bits.
    """
    return node.input_type(index) or ir.tensor_adapters.from_torch_dtype(zero.dtype)


def quantized(
    x: _Tensor,
    scale: _Tensor,
    zero: _Tensor | None,
    axis: int,
    block_size: int,
    output_type: ir.DataType,
    node: Node,
    saturate: int = 1,
    precision: int = 0,
) -> Rounded:
    """Returns floats quantized to a type, round(x / scale) + zero, with ties to even."""
    dtype = torch_dtype(precision) if precision else scale.dtype
    values = x.to(dtype) / _spread(scale, x, axis, block_size, node).to(dtype)
    offset = None if zero is None else _spread(zero, x, axis, block_size, node)
    if output_type not in _LIMITS:
        values = values if offset is None else values + offset.to(dtype)
        limit = _LARGEST_FLOAT4 if output_type == ir.DataType.FLOAT4E2M1 else torch.finfo(torch_dtype(output_type)).max
        rounded = cast(values.detach(), output_type, bool(saturate), "up", node).to(dtype)
        return Rounded(_straight(rounded, values.clamp(-limit, limit)), torch_dtype(output_type))
    return _limited(values, offset, output_type)


def _straight(rounded: _Tensor, values: _Tensor) -> _Tensor:
    """Returns rounded numbers, whose gradient is that of the finite numbers that were rounded."""
    return rounded + (values - values.detach())


def rounded(values: _Tensor) -> _Tensor:
    """Returns whole numbers, through which a gradient passes as if they had not been rounded."""
    return _straight(values.detach().round(), values)


def _limited(values: _Tensor, zero: _Tensor | None, output_type: ir.DataType) -> Rounded:
    """Returns numbers rounded, shifted and clamped to an integer type."""
    # Infinite numbers would make differences NaN. The sum with a zero point of 16 bits is exact in float32.
    values = values.to(torch.promote_types(values.dtype, torch.float32)).clamp(-_BEYOND, _BEYOND)
    whole = rounded(values)
    return Rounded((whole if zero is None else whole + zero).clamp(*_LIMITS[output_type]), torch_dtype(output_type))


@operator("DynamicQuantizeLinear", since=11)
def _quantize_dynamically(x: _Tensor) -> tuple[Rounded, _Tensor, _Tensor]:
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = ((high - low) / 255).detach()
    steps = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = (-low.detach() / steps).round().clamp(0, 255)
    return _limited(x / steps, zero, ir.DataType.UINT8), scale, zero.to(torch.uint8)


@operator("MatMulInteger", since=10, takes_rounded=True)
def _product_of_integers(
    a: _Tensor | Rounded, b: _Tensor | Rounded, a_zero: _Tensor | None, b_zero: _Tensor | None
) -> Rounded:
    return Rounded(_exact_product(a, b, a_zero, b_zero), torch.int32)


def _exact_product(
    a: _Tensor | Rounded, b: _Tensor | Rounded, a_zero: _Tensor | None, b_zero: _Tensor | None
) -> _Tensor:
    """Returns the product of integer matrices, computed exactly in double precision: PyTorch lacks integer kernels."""
    return torch.matmul(_without(a, _of_rows(a_zero)), _without(b, b_zero))


def _without(x: _Tensor | Rounded, zero: _Tensor | None) -> _Tensor:
    """Returns quantized numbers less their zero point, in double precision."""
    return floats(x).double() if zero is None else floats(x).double() - zero.double()


def _kernel_without(weight: _Tensor | Rounded, zero: _Tensor | None) -> _Tensor:
    return _without(weight, None if zero is None else zero.reshape([-1] + [1] * (floats(weight).dim() - 1)))


def _of_rows(values: _Tensor | None) -> _Tensor | None:
    """Returns scales or zero points of rows in a shape that can be broadcast to the matrix."""
    return values.unsqueeze(-1) if values is not None and values.dim() == 1 else values


@operator("QLinearMatMul", since=10, takes_rounded=True)
def _product_of_quantized(
    a: _Tensor | Rounded,
    a_scale: _Tensor,
    a_zero: _Tensor,
    b: _Tensor | Rounded,
    b_scale: _Tensor,
    b_zero: _Tensor,
    y_scale: _Tensor,
    y_zero: _Tensor,
    *,
    node: Node,
) -> Rounded:
    rows = _of_rows(a_scale)
    assert rows is not None
    product = _exact_product(a, b, a_zero, b_zero) * (rows.double() * b_scale.double())
    output_type = zero_point_type(node, 7, y_zero)
    return quantized(product, y_scale.double(), y_zero, -1, 0, output_type, node)


@operator("ConvInteger", since=10, takes_rounded=True, passing=convolved)
def _convolution_of_integers(
    x: _Tensor | Rounded,
    weight: _Tensor | Rounded,
    x_zero: _Tensor | None,
    weight_zero: _Tensor | None,
    **attributes: Any,
) -> Rounded:
    # Computed exactly in double precision: PyTorch lacks integer kernels.
    kernel = _kernel_without(weight, weight_zero)
    return Rounded(convolved(_without(x, x_zero), kernel, **attributes), torch.int32)


@operator("QLinearConv", since=10, takes_rounded=True, passing=convolved)
def _convolution_of_quantized(
    x: _Tensor | Rounded,
    x_scale: _Tensor,
    x_zero: _Tensor,
    weight: _Tensor | Rounded,
    weight_scale: _Tensor,
    weight_zero: _Tensor,
    y_scale: _Tensor,
    y_zero: _Tensor,
    bias: _Tensor | None,
    *,
    node: Node,
    **attributes: Any,
) -> Rounded:
    kernel = _kernel_without(weight, weight_zero)
    offset = None if bias is None else bias.double()
    sums = convolved(_without(x, x_zero), kernel, offset, node=node, **attributes)
    of_channels = (x_scale.double() * weight_scale.double()).reshape([-1] + [1] * (kernel.dim() - 2))
    output_type = zero_point_type(node, 7, y_zero)
    return quantized(sums * of_channels, y_scale.double(), y_zero, 1, 0, output_type, node)
