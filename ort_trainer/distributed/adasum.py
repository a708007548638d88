"""Adasum: gradients of processes are added up as far as they say different things, and averaged where they agree.

Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021 (arXiv 2006.02924).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .buckets import Bucket
from .processes import Processes
from .reduction import WHAT, Reduction

__all__ = ["Adasum"]

# Elements that are converted to float64 at a time.
_CHUNK = 2**20


class Adasum(Reduction):
    """Combines the gradients of two processes, tensor by tensor, and then those of two pairs, and so on.

    Of gradients a and b it makes (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b: their sum where they are
    orthogonal, and their mean where they are equal. A gradient of zeros changes nothing.

    Each process sends and receives all gradients log2(N) times; the sum sends them 2 (N - 1) / N times. What is
    received needs as much memory as the gradients.

    Args:
        processes: Who trains: a power of two of them.
    """

    of_means = True

    def __init__(self, processes: Processes) -> None:
        self._processes = processes

    def reduce(self, buckets: Sequence[Bucket], scatter: bool = False) -> None:
        """Combines buckets; every process has all of them then, bit for bit the same."""
        processes, distance = self._processes, 1
        received = [torch.empty_like(bucket.flat) for bucket in buckets]
        while buckets and distance < processes.size:
            self._swap([bucket.flat for bucket in buckets], received, processes.rank ^ distance)
            is_first = not processes.rank & distance
            pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
            for bucket, other in zip(buckets, received, strict=True):
                own, others = _tensors(bucket, bucket.flat), _tensors(bucket, other)
                pairs += zip(own, others, strict=True) if is_first else zip(others, own, strict=True)
            # Sums of products depend on how many threads add them up, so the lowest of the ranks that combine the
            # same says what they are.
            products = torch.stack([product for pair in pairs for product in _products(*pair)]).tolist()
            products = processes.exchange(WHAT, products)[processes.rank & -2 * distance]
            for place, pair in enumerate(pairs):
                _combine(*pair, *products[3 * place : 3 * place + 3])
            if not is_first:
                for bucket, other in zip(buckets, received, strict=True):
                    bucket.flat.copy_(other)
            distance *= 2

    def _swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], rank: int) -> None:
        """Sends tensors to another process, and receives as many of it."""
        processes, group = self._processes, self._processes.group_of(sent[0])
        operations = [dist.P2POp(dist.irecv, tensor, rank, group) for tensor in received]
        operations += [dist.P2POp(dist.isend, tensor, rank, group) for tensor in sent]
        # Not in slices of time, as gloo breaks the connection of two processes where a wait is over.
        for work in processes.run(WHAT, lambda: dist.batch_isend_irecv(operations)):
            processes.run(WHAT, work.wait)


def _tensors(bucket: Bucket, flat: torch.Tensor) -> list[torch.Tensor]:
    """Returns the gradients that lie in a flat tensor as they do in the bucket."""
    return [bucket.view_in(flat, name).view(-1) for name in bucket.offsets]


def _products(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """Returns a.a, a.b and b.b in float64, in which squares of float32 don't overflow."""
    sums = torch.zeros(3, dtype=torch.float64, device=a.device)
    for one, other in zip(torch.split(a, _CHUNK), torch.split(b, _CHUNK), strict=True):
        one, other = one.double(), other.double()
        sums += torch.stack([one.dot(one), one.dot(other), other.dot(other)])
    return list(sums.unbind())


def _combine(a: torch.Tensor, b: torch.Tensor, of_a: float, of_both: float, of_b: float) -> None:
    """Writes the Adasum of two gradients into the first; it is not finite where one of them is not."""
    a.mul_(1.0 - of_both / (2.0 * of_a) if of_a else 1.0)
    b.mul_(1.0 - of_both / (2.0 * of_b) if of_b else 1.0)
    a.add_(b)
