"""Looks for indices in a batch of PyTorch's tensors that its model does not have: classes, rows of an embedding."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .. import indices
from ..runtime import Plan

__all__ = ["check_indices"]


def check_indices(plan: Plan, batch: Mapping[str, torch.Tensor]) -> None:
    """Checks the inputs of a batch that operators index with; it takes one pass over each of them.

    Args:
        plan: For the shapes of the batch.
        batch: The inputs by name.

    Raises:
        IndexError: If one has a value that is out of range.
    """
    indices.check_indices(
        plan.indices,
        lambda name: batch[name].cpu().numpy(),
        lambda: plan.runner.graph.sizes({name: tuple(value.shape) for name, value in batch.items()}),
        lambda name, ignored: _extremes(batch[name], ignored),
    )


def _extremes(values: torch.Tensor, ignored: int | None) -> tuple[int, int]:
    """Returns the lowest and the highest value that count, found where the tensor is; 0 stands for the others."""
    lowest, highest = torch.aminmax(values)
    found = int(lowest.item()), int(highest.item())
    if ignored is not None and ignored in found:
        lowest, highest = torch.aminmax(values.masked_fill(values == ignored, 0))
        found = int(lowest.item()), int(highest.item())
    return found
