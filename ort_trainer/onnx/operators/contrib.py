"""Operators of ONNX Runtime's own domain, com.microsoft, which its optimizer writes: fused normalizations and products.

ONNX has no schemas for them, so defaults come from ONNX Runtime's documentation. SimplifiedLayerNormalization, which it
writes in ONNX's own domain, is here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..node_table import Node, operator
from .activations import ACTIVATIONS
from .convolution import convolved
from .elementwise import unary
from .linear_algebra import gemm
from .normalization import check_stash_type, layer_normalized, rms_normalized
from .quantization import rounded

_Tensor = torch.Tensor
_DOMAIN = "com.microsoft"


@operator("SimplifiedLayerNormalization")
@operator("SimplifiedLayerNormalization", domain=_DOMAIN)
def _simplified_layer_normalization(
    x: _Tensor, scale: _Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, node: Node
) -> tuple[_Tensor, ...]:
    check_stash_type(stash_type, node)
    return rms_normalized(x, scale, axis, epsilon)


@operator("SkipLayerNormalization", domain=_DOMAIN)
def _skip_layer_normalization(
    x: _Tensor,
    skip: _Tensor,
    scale: _Tensor,
    shift: _Tensor | None,
    bias: _Tensor | None,
    *,
    epsilon: float = 1e-12,
    node: Node,
) -> tuple[_Tensor | None, ...]:
    total = x + skip if bias is None else x + skip + bias
    y, *statistics = layer_normalized(total, scale, shift, epsilon=epsilon, node=node)
    mean, deviation = statistics or (None, None)
    return y, mean, deviation, total


@operator("SkipSimplifiedLayerNormalization", domain=_DOMAIN)
def _skip_simplified_layer_normalization(
    x: _Tensor, skip: _Tensor, scale: _Tensor, bias: _Tensor | None, *, epsilon: float = 1e-12, node: Node
) -> tuple[_Tensor | None, ...]:
    if node.wants(1):
        raise node.error("it has no mean: don't use its second output")
    total = x + skip if bias is None else x + skip + bias
    y, inverse = rms_normalized(total, scale, -1, epsilon)
    return y, None, inverse, total


@operator("EmbedLayerNormalization", domain=_DOMAIN)
def _embedding_normalization(
    tokens: _Tensor,
    segments: _Tensor | None,
    of_words: _Tensor,
    of_positions: _Tensor,
    of_segments: _Tensor | None,
    scale: _Tensor,
    shift: _Tensor,
    mask: _Tensor | None = None,
    positions: _Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 1,
    node: Node,
) -> tuple[_Tensor, ...]:
    if node.wants(1) and mask is not None and mask_index_type != 1:
        raise node.error(f"mask_index_type is {mask_index_type}, but only 1, the lengths of sequences, is supported")
    place = torch.arange(tokens.shape[1]).unsqueeze(0) if positions is None else positions
    total = F.embedding(tokens, of_words) + F.embedding(place, of_positions)
    if segments is not None and of_segments is not None:
        total = total + F.embedding(segments, of_segments)
    (y, *_) = layer_normalized(total, scale, shift, epsilon=epsilon, node=node)
    zeros = torch.zeros(tokens.shape[0], dtype=torch.int32)
    return y, zeros if mask is None else mask.sum(1).to(torch.int32), total


operator("Gelu", domain=_DOMAIN)(unary(F.gelu))
operator("BiasGelu", domain=_DOMAIN)(lambda x, bias: F.gelu(x + bias))


@operator("FastGelu", domain=_DOMAIN)
def _fast_gelu(x: _Tensor, bias: _Tensor | None) -> _Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


@operator("QuickGelu", domain=_DOMAIN)
def _quick_gelu(x: _Tensor, *, alpha: float = 1.702) -> _Tensor:
    return x * torch.sigmoid(alpha * x)


@operator("FusedMatMul", "TransposeMatMul", domain=_DOMAIN)
def _fused_product(
    a: _Tensor,
    b: _Tensor,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> _Tensor:
    a, b = _operand(a, transA, transBatchA), _operand(b, transB, transBatchB)
    product = torch.matmul(a, b)
    return product if alpha == 1 else product * alpha


def _operand(x: _Tensor, transposed: int, with_batch: int) -> _Tensor:
    # transBatch moves the first dimension to the last but one; trans then exchanges the last two.
    x = x.movedim(0, -2) if with_batch else x
    return x.transpose(-2, -1) if transposed and x.dim() > 1 else x


@operator("FusedGemm", domain=_DOMAIN, passing=gemm)
def _fused_gemm(
    a: _Tensor,
    b: _Tensor,
    c: _Tensor | None,
    *,
    activation: str = "",
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    node: Node,
    **attributes: Any,
) -> _Tensor:
    parameters = [value for value in (activation_alpha, activation_beta) if value is not None]
    return _activated(gemm(a, b, c, **attributes), activation, parameters, node)


@operator("FusedConv", domain=_DOMAIN, passing=convolved)
def _fused_convolution(
    x: _Tensor,
    weight: _Tensor,
    bias: _Tensor | None,
    added: _Tensor | None,
    *,
    activation: str = "",
    activation_params: list[float] | None = None,
    node: Node,
    **attributes: Any,
) -> _Tensor:
    y = convolved(x, weight, bias, node=node, **attributes)
    return _activated(y if added is None else y + added, activation, activation_params or [], node)


@operator("FakeQuant", domain=_DOMAIN)
def _fake_quantized(
    x: _Tensor, scale: _Tensor, zero: _Tensor, *, quant_min: int = 0, quant_max: int = 255
) -> tuple[_Tensor, _Tensor]:
    """Returns rounded numbers, and which of them are in the range; onnxruntime-training writes this for Q and DQ."""
    levels = rounded(x / scale.detach()) + zero.detach()
    inside = (levels >= quant_min) & (levels <= quant_max)
    return (levels.clamp(quant_min, quant_max) - zero.detach()) * scale.detach(), inside


def _activated(x: _Tensor, name: str, parameters: Sequence[float], node: Node) -> _Tensor:
    if name not in ACTIVATIONS:
        raise node.error(f"its activation {name!r} is not supported: there are {sorted(filter(None, ACTIVATIONS))}")
    function, defaults = ACTIVATIONS[name]
    return function(x, *[*parameters, *defaults[len(parameters) :]][: len(defaults)])


@operator("MatMulNBits", domain=_DOMAIN)
def _product_with_few_bits(
    x: _Tensor,
    packed: _Tensor,
    scales: _Tensor,
    zeros: _Tensor | None = None,
    groups: _Tensor | None = None,
    bias: _Tensor | None = None,
    *,
    K: int,
    N: int,
    accuracy_level: int = 0,  # a hint for speed
    bits: int = 4,
    block_size: int,
    node: Node,
) -> _Tensor:
    """Multiplies by a frozen weight of few bits: only the input and the bias have a gradient."""
    if bits not in (2, 4, 8):
        raise node.error(f"bits is {bits}, but must be 2, 4 or 8")
    blocks = -(-K // block_size)
    weight = _unpacked(packed.reshape(N, blocks, -1), bits).to(x.dtype)
    if zeros is None:  # the default zero point is the middle of the range
        weight = weight - 2 ** (bits - 1)
    elif zeros.is_floating_point():
        weight = weight - zeros.reshape(N, blocks, 1).to(x.dtype)
    else:
        weight = weight - _unpacked(zeros.reshape(N, -1), bits)[:, :blocks].unsqueeze(2).to(x.dtype)
    if groups is None:
        weight = (weight * scales.detach().reshape(N, blocks, 1)).reshape(N, -1)[:, :K]
    else:
        raise node.error("its input g_idx is not supported: quantize the weight without reordering")
    return F.linear(x, weight, bias)


def _unpacked(packed: _Tensor, bits: int) -> _Tensor:
    """Returns the numbers in bytes, the lowest bits first, along the last dimension."""
    parts = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(-2)
