"""Products of matrices, sums of products, determinants."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..joins import DOMAIN
from ..node_table import operator

_Tensor = torch.Tensor


@operator("MatMul")
def _matmul(a: _Tensor, b: _Tensor) -> _Tensor:
    return torch.matmul(a, b)


@operator("Linear", domain=DOMAIN)
def linear(x: _Tensor, weight: _Tensor, bias: _Tensor | None) -> _Tensor:
    """Computes a linear layer joined by ``joins.py``; its weight, (in, out), is the transpose of PyTorch's."""
    fits = weight.dim() == 2 and (bias is None or (bias.dim() == 1 and bias.shape[0] == weight.shape[1]))
    if not fits or not x.is_floating_point():
        return x @ weight if bias is None else x @ weight + bias
    return F.linear(x, weight.t(), bias)


@operator("Gemm", since=7)
def gemm(
    a: _Tensor,
    b: _Tensor,
    c: _Tensor | None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Any:
    """Computes ONNX's Gemm."""
    a = a.t() if transA else a
    b = b.t() if transB else b
    if alpha == beta == 1 and (c is None or c.dim() == 1):
        return linear(a, b, c)
    product = a @ b
    product = product if alpha == 1 else _scaled(product, alpha)
    return product if c is None else product + (c if beta == 1 else _scaled(c, beta))


def _scaled(x: _Tensor, factor: float) -> _Tensor:
    return (x * factor).to(x.dtype)


@operator("Einsum", since=12)
def _einsum(*values: _Tensor, equation: str) -> _Tensor:
    product: _Tensor = torch.einsum(equation, *values)
    return product


@operator("Det", since=11)
def _determinant(x: _Tensor) -> _Tensor:
    determinant: _Tensor = torch.linalg.det(x)
    return determinant
