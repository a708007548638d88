"""The tensors that a trainer works on: copies of the model's, unless it shares them (``shared_tensors.py``)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from ..engine.ownership import own_copies

Named = Mapping[str, torch.Tensor]


class ModelMemory:
    """The tensors that a trainer works on: by default, copies of the model's.

    Args:
        model: The module.
        name: Its name in error messages.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model, self._name = model, name

    def adopt(self, device: torch.device) -> Named:
        """Returns the parameters and buffers that the trainer works on, by canonical name.

        Args:
            device: The device for the tensors.
        """
        parameters = dict(self._model.named_parameters())
        return own_copies({**parameters, **dict(self._model.named_buffers())}, parameters, device)

    def take_changes(self) -> Named:
        """Picks up changes to the model itself, if the trainer works on the model's tensors.

        Returns:
            The tensors whose memory has changed, by canonical name, contiguous; usually none.

        Raises:
            RuntimeError: If a change is not supported.
        """
        return {}

    def publish(self, names: Collection[str]) -> None:
        """Updates the model's tensors from the trainer's, if it does not see the changes by itself.

        Args:
            names: Canonical names of the tensors that have changed.
        """

    def add_gradients(self, gradients: Named) -> None:
        """Adds gradients to those of the model's parameters, as PyTorch's backward pass does.

        Args:
            gradients: New tensors by canonical name, which the model may keep.

        Raises:
            RuntimeError: If the trainer does not work on the model's tensors.
        """
        raise RuntimeError(
            f"{self._name} can't receive gradients, because the trainer works on copies of its weights: use "
            "train_step, or a PyTorch model without utils.share_weights=False"
        )

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns the gradients of the model's trained parameters, by canonical name."""
        return {}

    def drop_gradients(self) -> None:
        """Removes the gradients of the model's trained parameters."""
