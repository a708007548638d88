"""How the gradients of all processes become one: their sum."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist

from .buckets import Bucket
from .processes import Processes

__all__ = ["Reduction", "Sum"]

WHAT = "the gradients of the other processes"


class Reduction(ABC):
    """Puts the buckets of all processes together.

    Attributes:
        of_means: Whether each process brings the mean of its micro-batches, and not their sum.
    """

    of_means = False

    @abstractmethod
    def reduce(self, bucket: Bucket, scatter: bool = False) -> None:
        """Reduces a bucket, in place.

        Args:
            bucket: The bucket.
            scatter: Whether each process needs its part of it only: of N equal parts the one of its rank.
        """


class Sum(Reduction):
    """The sum.

    Args:
        processes: Who trains.
        dtype: In which gradients are sent; None for their own.
    """

    def __init__(self, processes: Processes, dtype: torch.dtype | None = None) -> None:
        self._processes, self._dtype = processes, dtype

    def reduce(self, bucket: Bucket, scatter: bool = False) -> None:
        """Adds up a bucket."""
        self._processes.all_reduce(WHAT, bucket.flat, dist.ReduceOp.SUM)
