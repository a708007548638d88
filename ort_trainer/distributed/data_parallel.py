"""Data parallel training: every process has the whole model and a part of each batch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from ..errors import DistributedError
from ..optim.parts import Named, Parts
from ..training.strategy import Meeting, Strategy
from ..training.window import Share
from .agreement import check_traits
from .buckets import Buckets
from .joining import Joining
from .processes import Processes
from .reduction import Reduction

__all__ = ["DataParallel"]

KINDS = ("follow", "update", "step", "pass", "state", "model")


class DataParallel(Strategy):
    """Adds up the gradients of all processes, so that all make the same update.

    Args:
        processes: Who trains.
        bucket_bytes: Size of the buckets that gradients are put together in.
        reduction: How.
    """

    def __init__(self, processes: Processes, bucket_bytes: int, reduction: Reduction) -> None:
        self.processes = processes
        self.world_size, self.world_rank = processes.size, processes.rank
        self._bucket_bytes, self.reduction = bucket_bytes, reduction
        self.buckets = Buckets({}, self.world_size, bucket_bytes)
        self._present: set[str] = set()
        self._changed: set[str] = set()
        self._joining: Joining | None = None

    def begin(self, tensors: Named, traits: Mapping[str, Any], seed: int) -> int:
        """Compares the traits by checksums, sends tensors and seed, and makes a seed of the rank's own of it."""
        check_traits(self.processes, traits)
        for name, tensor in tensors.items():
            with torch.no_grad():
                self.processes.broadcast(f"the value of {name!r}", tensor.detach())
        # Of the 64 bits of a seed a float64 keeps 53.
        halves = self.processes.exchange("the seed", [seed >> 32, seed & 0xFFFFFFFF])[0]
        seed = int(halves[0]) << 32 | int(halves[1])
        if not self.world_rank:
            return seed
        words = np.random.SeedSequence((seed % 2**64, self.world_rank)).generate_state(2, np.uint32)
        return int(words[0]) << 20 ^ int(words[1])

    def lay_out(self, trainable: Named) -> tuple[dict[str, torch.Tensor], Parts]:
        """Makes the buckets."""
        self.buckets = Buckets(trainable, self.world_size, self._bucket_bytes)
        return self.buckets.views, Parts()

    def meet(
        self,
        kind: str,
        share: Share,
        rates: Sequence[float] = (),
        present: Collection[str] = (),
        changed: Collection[str] = (),
    ) -> Meeting:
        """Exchanges one row of numbers."""
        self._present, self._changed = set(present), set(changed)
        if kind != "follow" and self._joining is not None:
            self._joining.notify()
        own = [KINDS.index(kind), share.weight, share.unit, share.scale, _sum(rates), _sum([*present, *changed])]
        rows = self.processes.exchange(f"{kind!r} of the other processes", own)
        shares = [Share(*row[1:4]) for row in rows]
        doing = [row for row in rows if row[0]]
        for column, what in ((0, "what they do"), (4, "learning rates")):
            if len({row[column] for row in doing}) > 1:
                found = {rank: row[column] for rank, row in enumerate(rows)}
                raise DistributedError(f"the processes differ in {what}, by rank: {found}")
        bringing = {share.scale for share in shares if share.weight}
        if len(bringing) > 1:
            raise DistributedError(f"the processes have different loss scales: {[share.scale for share in shares]}")
        return Meeting(KINDS[int(doing[0][0])], shares, len({row[5] for row in rows}) == 1)

    def reduce(self, meeting: Meeting, gradients: Named) -> tuple[dict[str, torch.Tensor], Share]:
        """Adds up the buckets."""
        share = self._gather(meeting, gradients)
        for bucket in self.buckets:
            self.reduction.reduce(bucket)
        return {name: view for name, view in self.buckets.views.items() if name in self._present}, share

    def average(self, meeting: Meeting, gradients: Named) -> dict[str, torch.Tensor]:
        """Adds up copies in the buckets, which hold nothing else where the user has a loop of their own."""
        views = self.buckets.views
        for name, gradient in gradients.items():
            views[name].copy_(gradient)
        reduced, share = self.reduce(meeting, gradients)
        return {name: gradient / share.weight for name, gradient in reduced.items()}

    def spread(self, meeting: Meeting, parameters: Named, buffers: Named) -> None:
        """Sends the leader's buffers; weights are equal everywhere."""
        for name in buffers:
            if name in self._changed:
                self.processes.broadcast(f"the buffer {name!r}", buffers[name], meeting.leader)

    def whole(self, parts: Named, like: Named) -> dict[str, torch.Tensor]:
        """Returns them: each process has everything."""
        return dict(parts)

    def random_states(self, state: torch.Tensor) -> list[torch.Tensor]:
        """Returns those of all processes."""
        found = torch.empty(self.world_size * state.numel(), dtype=state.dtype)
        self.processes.all_gather("the random states", found, state.cpu())
        return list(found.view(self.world_size, -1).unbind())

    def join(self, follow: Callable[[], None]) -> AbstractContextManager[Any]:
        """Returns ``torch.distributed.algorithms.Join`` around the trainer."""
        self._joining = Joining(self.processes, follow)
        return self._joining.context()

    def wait(self) -> None:
        """Waits at a barrier."""
        self.processes.exchange("the other processes", [0.0])

    def failed(self, error: BaseException) -> None:
        """Leaves a note for the others."""
        self.processes.leave_note(error)

    def _gather(self, meeting: Meeting, gradients: Named) -> Share:
        """Makes the buckets ready to be added up; returns what their sum will count."""
        if not meeting.agree:
            self._unite()
        share, unit = meeting.shares[self.world_rank], meeting.shares[meeting.leader].unit
        for bucket in self.buckets:
            absent = [view for name, view in bucket.views.items() if name not in gradients]
            if absent:
                torch._foreach_zero_(absent)
        if share.weight and share.unit != unit:
            torch._foreach_mul_(list(gradients.values()), share.unit / unit)
        return Share(meeting.weight, unit, meeting.shares[meeting.leader].scale)

    def _unite(self) -> None:
        """Makes the names of gradients, and of changed buffers, those that any process has."""
        raise NotImplementedError


def _sum(values: Collection[Any]) -> float:
    """Returns a checksum, in the same way in all processes."""
    return float(zlib.crc32("\0".join(map(str, values)).encode()))
