"""Activation functions, with all their parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..node_table import Node, operator
from .elementwise import unary

_Tensor = torch.Tensor


def _thresholded_relu(x: _Tensor, alpha: float) -> _Tensor:
    return torch.where(x > alpha, x, torch.zeros_like(x))


def _hard_sigmoid(x: _Tensor, alpha: float, beta: float) -> _Tensor:
    return (alpha * x + beta).clamp(0, 1)


def _softplus(x: _Tensor) -> _Tensor:
    # By default PyTorch returns x itself above 20, which differs in double precision.
    return F.softplus(x, threshold=40)


ACTIVATIONS: dict[str, tuple[Callable[..., _Tensor], tuple[float, ...]]] = {
    "": (lambda x: x, ()),
    "Affine": (lambda x, alpha, beta: alpha * x + beta, (1.0, 0.0)),
    "Clip": (lambda x, low, high: x.clamp(low, high), (float("-inf"), float("inf"))),
    "Elu": (F.elu, (1.0,)),
    "HardSigmoid": (_hard_sigmoid, (0.2, 0.5)),
    "HardSwish": (F.hardswish, ()),
    "LeakyRelu": (F.leaky_relu, (0.01,)),
    "Relu": (torch.relu, ()),
    "ScaledTanh": (lambda x, alpha, beta: alpha * torch.tanh(beta * x), (1.0, 1.0)),
    "Sigmoid": (torch.sigmoid, ()),
    "Softplus": (_softplus, ()),
    "Softsign": (F.softsign, ()),
    "Tanh": (torch.tanh, ()),
    "ThresholdedRelu": (_thresholded_relu, (1.0,)),
}
"""The functions that other operators name in their attributes, each with the defaults of its parameters."""


def _with_alpha(function: Callable[..., _Tensor]) -> Callable[..., _Tensor]:
    """Returns a function with ONNX's name of its parameter."""
    return lambda x, *, alpha: function(x, alpha)


operator("Relu", since=6)(unary(torch.relu))
operator("Sigmoid", since=6)(unary(torch.sigmoid))
operator("Softplus")(_softplus)
operator("Softsign")(unary(F.softsign))
operator("Mish", since=18)(unary(F.mish))
operator("LeakyRelu", since=6)(_with_alpha(F.leaky_relu))
operator("Elu", since=6)(_with_alpha(F.elu))
operator("Celu", since=12)(_with_alpha(F.celu))
operator("ThresholdedRelu", since=10)(_with_alpha(_thresholded_relu))
operator("HardSigmoid", since=6)(lambda x, *, alpha, beta: _hard_sigmoid(x, alpha, beta))


@operator("PRelu", since=7)
def _prelu(x: _Tensor, slope: _Tensor) -> _Tensor:
    return torch.where(x < 0, slope * x, x)


@operator("Selu", since=6)
def _selu(x: _Tensor, *, alpha: float, gamma: float) -> _Tensor:
    return gamma * F.elu(x, alpha)


@operator("HardSwish", since=14)
def _hard_swish(x: _Tensor) -> _Tensor:
    return x * (x / 6 + 0.5).clamp(0, 1)


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
