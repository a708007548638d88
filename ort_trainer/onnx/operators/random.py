"""Random numbers: dropout, and generators of distributions.

PyTorch's operators draw them; the trainer has its own generator for these, and saves its state. The ``seed`` of a
Dropout is therefore ignored, and generators with a seed, which would draw the same numbers in every step, are refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..node_table import Node, operator
from ..values import numbers, torch_dtype

_Tensor = torch.Tensor


@operator("Dropout", since=7, until=11)
def _dropout_by_attribute(x: _Tensor, *, ratio: float, node: Node) -> tuple[_Tensor, ...]:
    return _dropout(x, ratio, node.training, node)


@operator("Dropout", since=12, known_inputs=(1, 2))
def _dropout_by_inputs(
    x: _Tensor, ratio: Any, training_mode: Any, *, seed: int | None = None, node: Node
) -> tuple[_Tensor, ...]:
    chosen = 0.5 if ratio is None else float(numbers(ratio, "ratio", node)[0])
    training = training_mode is not None and bool(numbers(training_mode, "training_mode", node)[0])
    return _dropout(x, chosen, training and node.training, node)


def _dropout(x: _Tensor, ratio: float, training: bool, node: Node) -> tuple[_Tensor, ...]:
    if training and not 0 <= ratio < 1:
        raise node.error(f"ratio is {ratio}, but must be in [0, 1)")
    active = training and ratio > 0
    if not node.wants(1):
        return (F.dropout(x, ratio) if active else x,)
    if not active:
        return x, torch.ones_like(x, dtype=torch.bool)
    scaled_mask = F.dropout(torch.ones_like(x), ratio)
    return x * scaled_mask, scaled_mask != 0


@operator("RandomNormal")
def _normal(
    *, dtype: int, mean: float, scale: float, seed: float | None = None, shape: list[int], node: Node
) -> _Tensor:
    _check_seed(seed, node)
    return (torch.randn(shape) * scale + mean).to(torch_dtype(dtype))


@operator("RandomUniform")
def _uniform(
    *, dtype: int, high: float, low: float, seed: float | None = None, shape: list[int], node: Node
) -> _Tensor:
    _check_seed(seed, node)
    return (torch.rand(shape) * (high - low) + low).to(torch_dtype(dtype))


@operator("RandomNormalLike")
def _normal_like(
    x: _Tensor, *, dtype: int | None = None, mean: float, scale: float, seed: float | None = None, node: Node
) -> _Tensor:
    _check_seed(seed, node)
    return (torch.randn(x.shape) * scale + mean).to(x.dtype if dtype is None else torch_dtype(dtype))


@operator("RandomUniformLike")
def _uniform_like(
    x: _Tensor, *, dtype: int | None = None, high: float, low: float, seed: float | None = None, node: Node
) -> _Tensor:
    _check_seed(seed, node)
    return (torch.rand(x.shape) * (high - low) + low).to(x.dtype if dtype is None else torch_dtype(dtype))


@operator("Bernoulli", since=15)
def _bernoulli(x: _Tensor, *, dtype: int | None = None, seed: float | None = None, node: Node) -> _Tensor:
    _check_seed(seed, node)
    drawn = torch.rand(x.shape) < x.detach().float()
    return drawn.to(x.dtype if dtype is None else torch_dtype(dtype))


@operator("Multinomial", since=7)
def _multinomial(x: _Tensor, *, dtype: int, sample_size: int, seed: float | None = None, node: Node) -> _Tensor:
    _check_seed(seed, node)
    # The Gumbel-max trick: argmax(log p + noise), with noise -log(-log(uniform)), is distributed as p.
    drawn = torch.rand([x.shape[0], sample_size, x.shape[1]]).clamp(min=torch.finfo(torch.float32).tiny)
    noise = -torch.log(-torch.log(drawn))
    return (x.detach().float().unsqueeze(1) + noise).argmax(-1).to(torch_dtype(dtype))


def _check_seed(seed: float | None, node: Node) -> None:
    if seed is not None:
        raise node.error("with a seed it would draw the same numbers in every step: remove the attribute seed")
