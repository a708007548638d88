"""Small modules of which tests train one that has what they need: randomness, buffers, tied weights, any function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .helpers import MLP

__all__ = ["MLP", "Applies", "Between", "Normed", "Tied"]


class Normed(nn.Module):
    """Two layers with a batch norm and a dropout between them: 8 features in, 3 classes out."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.dropout(self.norm(torch.tanh(self.fc1(x)))))


class Between(nn.Module):
    """Two layers and a function between them: 8 features in, 3 classes out."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], width: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(8, width), nn.Linear(width, 3), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.function(self.first(x)))


class Applies(nn.Module):
    """A layer, and what a function makes of it and of the arguments."""

    def __init__(self, function: Callable[..., Any], width: int = 4, outputs: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = nn.Linear(width, outputs), function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.linear, *args, **kwargs)


class Tied(nn.Module):
    """Two layers that share a weight, an unused parameter and a frozen one: 8 features in, 3 classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(2))
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))[:, :3] * self.fixed
