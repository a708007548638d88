"""The exported parts of a Hugging Face model's training and evaluation, as modules that wrap the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["ITEMS", "PARTS", "Forward", "Loss"]

# Inputs beside the model's: the divisors of the loss, which change from step to step.
ITEMS = "num_items_in_batch"
PARTS = "ort_trainer_micro_batches"


class Loss(nn.Module):
    """The loss as ``Trainer.compute_loss`` computes it, divided as ``Trainer.training_step`` divides it.

    Args:
        model: The model.
        compute_loss: The bound method of the trainer.
    """

    def __init__(self, model: nn.Module, compute_loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.compute_loss = compute_loss

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Returns the loss for the backward pass."""
        items, parts = inputs.pop(ITEMS, None), inputs.pop(PARTS, None)
        loss = self.compute_loss(self.model, inputs, num_items_in_batch=items)
        return loss if parts is None else loss / parts


class Forward(nn.Module):
    """The model itself, with its outputs as a flat list.

    Args:
        model: The model.
        example: An example of its outputs, for their structure.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        super().__init__()
        self.model = model
        leaves, self._structure = pytree.tree_flatten(example)
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns a zero, as the loss that every graph needs, followed by the tensors among the model's outputs."""
        tensors = [leaf for leaf in pytree.tree_leaves(self.model(**inputs)) if isinstance(leaf, torch.Tensor)]
        return torch.zeros((), device=tensors[0].device), *tensors

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Rebuilds the model's output; entries that are not tensors, such as a cache of keys and values, are None."""
        values = iter(tensors)
        leaves = [next(values) if is_tensor else None for is_tensor in self._is_tensor]
        return pytree.tree_unflatten(leaves, self._structure)
