"""How the gradients of all processes are combined: their sum, or Adasum."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .buckets import Bucket
from .processes import Processes, reduce_scatter

WHAT = "the gradients of the other processes"
"""What a process waits for during a reduction, for messages."""


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
        """Sums all buckets, concurrently."""
        sent = [self._sent(bucket.flat) for bucket in buckets]
        started = [self._processes.run(WHAT, functools.partial(self._start, tensor, scatter)) for tensor in sent]
        for tensor, work in zip(sent, started, strict=True):
            self._finish(tensor, work)
        for bucket, tensor in zip(buckets, sent, strict=True):
            if tensor is not bucket.flat:
                bucket.flat.copy_(tensor).mul_(self._processes.size)

    def _sent(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the tensor to send: the given one, or a divided copy in the narrower dtype."""
        if self._dtype is None or flat.element_size() <= self._dtype.itemsize:
            return flat
        return (flat / self._processes.size).to(self._dtype)

    def _start(self, tensor: torch.Tensor, scatter: bool) -> dist.Work:
        """Starts to sum a tensor over the processes."""
        group = self._processes.group_of(tensor)
        # gloo's reduce_scatter takes six times as long as its all_reduce, whose result includes this process's part.
        if not scatter or tensor.device.type == "cpu":
            work: dist.Work = dist.all_reduce(tensor, group=group, async_op=True)
        else:
            part = tensor.chunk(self._processes.size)[self._processes.rank]
            work = reduce_scatter(part, tensor, group=group, async_op=True)
        return work

    def _finish(self, tensor: torch.Tensor, work: dist.Work) -> None:
        self._processes.finish(WHAT, self._processes.group_of(tensor), lambda: work)


# The number of elements converted to float64 at a time.
_CHUNK = 2**20


class Adasum(Reduction):
    """Combines the gradients of pairs of processes, tensor by tensor, then those of pairs of pairs, and so on.

    It sums them where they are orthogonal, and averages them where they agree (Maleki et al., "Scaling Distributed
    Training with Adaptive Summation", MLSys 2021, arXiv 2006.02924).

    Gradients a and b become (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b: their sum if they are orthogonal, and
    their mean if they are equal. A gradient of zeros changes nothing.

    Each process sends and receives all gradients log2(N) times; the sum sends them 2 (N - 1) / N times. The received
    gradients need as much memory as those of this process.

    Args:
        processes: The processes that train; their number is a power of two.
    """

    of_means = True

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def reduce(self, buckets: Sequence[Bucket], scatter: bool = False) -> None:
        """Combines buckets; afterwards every process has all of them, bit for bit the same."""
        processes, distance = self._processes, 1
        received = [torch.empty_like(bucket.flat) for bucket in buckets]
        while buckets and distance < processes.size:
            self._swap([bucket.flat for bucket in buckets], received, processes.rank ^ distance)
            is_first = not processes.rank & distance
            pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
            for bucket, other in zip(buckets, received, strict=True):
                local, remote = _tensors(bucket, bucket.flat), _tensors(bucket, other)
                pairs += zip(local, remote, strict=True) if is_first else zip(remote, local, strict=True)
            # Sums of products depend on the number of threads, so all ranks that combine the same gradients use the
            # results of the lowest of them, whose number has zeros in place of the bits up to the distance's.
            products = torch.stack([product for pair in pairs for product in _products(*pair)]).tolist()
            products = processes.exchange(WHAT, products)[processes.rank & -2 * distance]
            for place, pair in enumerate(pairs):
                _combine(*pair, *products[3 * place : 3 * place + 3])
            if not is_first:
                for bucket, other in zip(buckets, received, strict=True):
                    bucket.flat.copy_(other)
            distance *= 2

    def _swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], rank: int) -> None:
        """Exchanges tensors with another process."""
        processes, group = self._processes, self._processes.group_of(sent[0])
        operations = [dist.P2POp(dist.irecv, tensor, rank, group) for tensor in received]
        operations += [dist.P2POp(dist.isend, tensor, rank, group) for tensor in sent]
        # Not in slices of time, because gloo breaks the connection of two processes when a wait times out.
        for work in processes.run(WHAT, lambda: dist.batch_isend_irecv(operations)):
            processes.run(WHAT, work.wait)


def _tensors(bucket: Bucket, flat: torch.Tensor) -> list[torch.Tensor]:
    """Returns the gradients in a flat tensor with the bucket's layout."""
    return [bucket.view_in(flat, name).view(-1) for name in bucket.offsets]


def _products(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """Returns a.a, a.b and b.b in float64, where squares of float32 don't overflow."""
    sums = torch.zeros(3, dtype=torch.float64, device=a.device)
    for one, other in zip(torch.split(a, _CHUNK), torch.split(b, _CHUNK), strict=True):
        one, other = one.double(), other.double()
        sums += torch.stack([one.dot(one), one.dot(other), other.dot(other)])
    return list(sums.unbind())


def _combine(a: torch.Tensor, b: torch.Tensor, of_a: float, of_both: float, of_b: float) -> None:
    """Writes the Adasum of two gradients into the first; non-finite elements of either stay non-finite."""
    a.mul_(1.0 - of_both / (2.0 * of_a) if of_a else 1.0)
    b.mul_(1.0 - of_both / (2.0 * of_b) if of_b else 1.0)
    a.add_(b)
