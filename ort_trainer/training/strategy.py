"""Where the gradients of several processes meet: the seam between the backward pass and the weight update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

__all__ = ["SingleProcess", "Strategy"]


class Strategy(ABC):
    """How the processes that train one model work together.

    Attributes:
        world_size: Number of processes.
        world_rank: The number of this one, from 0.
    """

    world_size: int
    world_rank: int

    @abstractmethod
    def reduce_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Makes the gradients those of all processes, in place, before they are checked, clipped and used.

        Args:
            gradients: Parameter name -> the sum of the gradients of a window, multiplied by the loss scale.
        """


class SingleProcess(Strategy):
    """One process: the gradients are what they are."""

    world_size, world_rank = 1, 0

    def reduce_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Leaves the gradients alone."""
