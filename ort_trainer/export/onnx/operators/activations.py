"""Activation functions, with all their parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..registry import Node, operator

_Tensor = torch.Tensor


@operator("Relu", since=6)
def _relu(x: _Tensor) -> _Tensor:
    return torch.relu(x)


@operator("LeakyRelu", since=6)
def _leaky_relu(x: _Tensor, *, alpha: float) -> _Tensor:
    return F.leaky_relu(x, alpha)


@operator("PRelu", since=7)
def _prelu(x: _Tensor, slope: _Tensor) -> _Tensor:
    return torch.where(x < 0, slope * x, x)


@operator("ThresholdedRelu", since=10)
def _thresholded_relu(x: _Tensor, *, alpha: float) -> _Tensor:
    return torch.where(x > alpha, x, torch.zeros_like(x))


@operator("Elu", since=6)
def _elu(x: _Tensor, *, alpha: float) -> _Tensor:
    return F.elu(x, alpha)


@operator("Celu", since=12)
def _celu(x: _Tensor, *, alpha: float) -> _Tensor:
    return F.celu(x, alpha)


@operator("Selu", since=6)
def _selu(x: _Tensor, *, alpha: float, gamma: float) -> _Tensor:
    return gamma * F.elu(x, alpha)


@operator("Sigmoid", since=6)
def _sigmoid(x: _Tensor) -> _Tensor:
    return torch.sigmoid(x)


@operator("HardSigmoid", since=6)
def _hard_sigmoid(x: _Tensor, *, alpha: float, beta: float) -> _Tensor:
    return (alpha * x + beta).clamp(0, 1)


@operator("HardSwish", since=14)
def _hard_swish(x: _Tensor) -> _Tensor:
    return x * (x / 6 + 0.5).clamp(0, 1)


@operator("Softplus")
def _softplus(x: _Tensor) -> _Tensor:
    # By default PyTorch returns x itself above 20, which differs in double precision.
    return F.softplus(x, threshold=40)


@operator("Softsign")
def _softsign(x: _Tensor) -> _Tensor:
    return F.softsign(x)


@operator("Mish", since=18)
def _mish(x: _Tensor) -> _Tensor:
    return F.mish(x)


@operator("Shrink", since=9)
def _shrink(x: _Tensor, *, lambd: float, bias: float) -> _Tensor:
    zeros = torch.zeros_like(x)
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, zeros)).to(x.dtype)


@operator("Gelu", since=20)
def _gelu(x: _Tensor, *, approximate: str, node: Node) -> _Tensor:
    if approximate not in ("none", "tanh"):
        raise node.error(f"approximate is {approximate!r}, but must be 'none' or 'tanh'")
    return F.gelu(x, approximate=approximate)


@operator("SwiGLU", since=28)
def _swiglu(gate: _Tensor, x: _Tensor, *, alpha: float) -> _Tensor:
    return gate * torch.sigmoid(alpha * gate) * x


@operator("Swish", since=24)
def _swish(x: _Tensor, *, alpha: float) -> _Tensor:
    return x * torch.sigmoid(alpha * x)
