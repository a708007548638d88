"""A module beside the same module as an ``ORTModule``, and what their passes give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ort_trainer import ORTModule

__all__ = ["Heads", "assert_same_gradients", "close", "pair"]


def pair(module: nn.Module, options: Any = None) -> tuple[nn.Module, ORTModule]:
    """Returns a module and a copy of it as an ``ORTModule``."""
    return module, ORTModule(copy.deepcopy(module), options)


def close(found: Any, expected: Any) -> None:
    """Asserts that tensors, or structures of them, are equal to rounding."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)
    elif isinstance(expected, (dict, tuple, list)):
        assert type(found) is type(expected) and len(found) == len(expected)
        keys = expected if isinstance(expected, dict) else range(len(expected))
        for key in keys:
            close(found[key], expected[key])
    else:
        assert found == expected


def assert_same_gradients(eager: nn.Module, ours: nn.Module, run: Callable[[nn.Module], Any]) -> None:
    """Runs a pass on both, and compares ``p.grad``; a parameter without a gradient must have none in both."""
    for module in (eager, ours):
        module.zero_grad()
        run(module)
    for (name, mine), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            close(mine.grad, theirs.grad)


class Heads(nn.Module):
    """A trunk with two heads, a buffer that training changes, and outputs of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.first, self.second = nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, label: torch.Tensor | None = None) -> dict[str, Any]:
        """Returns a loss if there is a label, both predictions, the class, and things that are not tensors."""
        h = torch.tanh(self.norm(self.trunk(x)))
        first, second = self.first(h), self.second(h)
        loss = None if label is None else nn.functional.cross_entropy(first, label)
        return {"loss": loss, "heads": (first, second), "class": first.argmax(1), "name": "heads", "turned": h.t()}
