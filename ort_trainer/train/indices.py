"""Checks a batch of PyTorch tensors for indices out of range, such as classes or rows of an embedding."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..core import indices
from ..engine import Plan

__all__ = ["check_indices"]


def check_indices(plan: Plan, batch: Mapping[str, torch.Tensor]) -> None:
    """Checks the inputs that operators use as indices, in one pass over each of them.

    Args:
        plan: The plan for the batch's shapes.
        batch: The inputs by name.

    Raises:
        IndexError: If a value is out of range.
    """
    indices.check_indices(
        plan.indices,
        lambda name: batch[name].cpu().numpy(),
        lambda: plan.sizes,
        lambda name, ignored: _extremes(batch[name], ignored),
    )


def _extremes(values: torch.Tensor, ignored: int | None) -> tuple[int, int]:
    """Returns the lowest and highest value, computed on the tensor's device; ignored values are taken as 0."""
    lowest, highest = torch.aminmax(values)
    found = int(lowest.item()), int(highest.item())
    if ignored is not None and ignored in found:
        lowest, highest = torch.aminmax(values.masked_fill(values == ignored, 0))
        found = int(lowest.item()), int(highest.item())
    return found
