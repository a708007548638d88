"""How the gradients of all processes are combined: the interface, and the sum."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .buckets import Bucket
from .processes import Processes

__all__ = ["Reduction", "Sum"]

WHAT = "the gradients of the other processes"


class Reduction(ABC):
    """Combines the buckets of all processes.

    Attributes:
        of_means: Whether each process contributes the mean of its micro-batches instead of their sum.
    """

    of_means = False

    @abstractmethod
    def reduce(self, buckets: Sequence[Bucket], scatter: bool = False) -> None:
        """Reduces buckets in place.

        Args:
            buckets: The buckets.
            scatter: Whether each process needs only its part of each bucket: of N equal parts, the one of its rank. The
                contents of the other parts are undefined then.
        """


class Sum(Reduction):
    """The sum of the gradients.

    Args:
        processes: The processes that train.
        dtype: The dtype in which gradients are sent; None for their own. For a narrower dtype they are divided by the
            number of processes first, as in PyTorch's ``fp16_compress_hook``, so that sums of finite gradients do not
            overflow.
    """

    def __init__(self, processes: Processes, dtype: torch.dtype | None = None) -> None:
        self._processes, self._dtype = processes, dtype

    def reduce(self, buckets: Sequence[Bucket], scatter: bool = False) -> None:
        """Sums all buckets concurrently."""
        sent = [self._sent(bucket.flat) for bucket in buckets]
        started = [self._processes.run(WHAT, functools.partial(self._start, tensor, scatter)) for tensor in sent]
        for tensor, work in zip(sent, started, strict=True):
            self._finish(tensor, work)
        for bucket, tensor in zip(buckets, sent, strict=True):
            if tensor is not bucket.flat:
                bucket.flat.copy_(tensor).mul_(self._processes.size)

    def _sent(self, flat: torch.Tensor) -> torch.Tensor:
        if self._dtype is None or flat.element_size() <= self._dtype.itemsize:
            return flat
        return (flat / self._processes.size).to(self._dtype)

    def _start(self, tensor: torch.Tensor, scatter: bool) -> dist.Work:
        group = self._processes.group_of(tensor)
        # gloo's reduce_scatter takes six times as long as its all_reduce, whose result includes this process's part.
        if not scatter or tensor.device.type == "cpu":
            work: dist.Work = dist.all_reduce(tensor, group=group, async_op=True)
        else:
            part = tensor.chunk(self._processes.size)[self._processes.rank]
            work = dist.reduce_scatter_single(part, tensor, group=group, async_op=True)
        return work

    def _finish(self, tensor: torch.Tensor, work: dist.Work) -> None:
        self._processes.finish(WHAT, self._processes.group_of(tensor), lambda: work)
