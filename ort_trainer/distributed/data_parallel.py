"""Data parallel training: every process has the complete model and a part of each batch."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..core.errors import DistributedError
from ..optim.parts import Named, Parts
from ..train.strategy import Arrival, Meeting, Share, Strategy
from .agreement import FOLLOW, KINDS, Row, check_rows, check_traits, checksum, compare_steps, number_of
from .buckets import Buckets, grouped
from .processes import Processes
from .reduction import WHAT, Reduction


class DataParallel(Strategy):
    """Combines the gradients of all processes, so that all make the same update.

    Args:
        processes: The processes that train.
        bucket_bytes: The size of the buckets in which gradients are sent.
        reduction: How gradients are combined.
    """

    def __init__(self, processes: Processes, bucket_bytes: int, reduction: Reduction) -> None:
        self.processes = processes
        self.world_size, self.world_rank = processes.size, processes.rank
        self._bucket_bytes, self.reduction = bucket_bytes, reduction
        self.divides_windows = reduction.of_means
        self.buckets = Buckets({}, self.world_size, bucket_bytes)
        self._names: list[str] = []
        self._trainable: Named = {}
        self._dtypes: Mapping[str, str] | None = None
        self._compared_step: Callable[[], dict[str, Any]] = dict
        self._number = 0
        self._compared = True

    def begin(self, tensors: Named, traits: Mapping[str, Any], seed: int) -> int:
        """Compares the traits by checksums, sends the tensors and seed of rank 0, and derives the rank's seed."""
        check_traits(self.processes, traits)
        self._names = list(tensors)
        self._check_order(tensors)
        self._broadcast("the weights of rank 0", tensors, 0)
        # A float64 holds only 53 of a seed's 64 bits.
        halves = self.processes.exchange("the seed", [seed >> 32, seed & 0xFFFFFFFF])[0]
        seed = int(halves[0]) << 32 | int(halves[1])
        if not self.world_rank:
            return seed
        return int(np.random.SeedSequence((seed, self.world_rank)).generate_state(1, np.uint64)[0])

    def _check_order(self, tensors: Named) -> None:
        """Raises if the processes make trainers of equal shapes in different orders, which their weights show."""
        made = self.processes.trainers
        own = checksum([zlib.crc32(_bytes(value)) for value in tensors.values()])
        made.append([row[0] for row in self.processes.exchange("the start of the other processes", [own])])
        self._number = len(made)
        for rank in range(self.world_size):
            first, here = ([row[at] for row in made] for at in (0, rank))
            if first != here and sorted(first) == sorted(here):
                raise DistributedError(
                    f"the processes make their {len(made)} trainers in different orders: rank {rank} begins with the "
                    "weights that another trainer of rank 0 begins with. Make them in the same order in all processes"
                )

    def lay_out(self, trainable: Named) -> tuple[dict[str, torch.Tensor], Parts]:
        """Makes the buckets."""
        self._trainable, self._compared = trainable, False
        self.buckets = Buckets(trainable, self.world_size, self._bucket_bytes)
        return self.buckets.views, Parts()

    def started(self, dtypes: Mapping[str, str], compared: Callable[[], dict[str, Any]]) -> None:
        """Keeps what the first update compares."""
        self._dtypes, self._compared_step = dtypes, compared

    def meet(self, arrival: Arrival) -> Meeting:
        """Exchanges one row of numbers, and more if the processes differ."""
        kind, share, rates, _, changed, step = arrival
        present: Collection[str] = arrival.gradients
        names, what = sorted((*present, *changed)), f"the others {KINDS[kind]}"
        row = Row(
            *(number_of(kind), self._number, float(self.stop_asked), float(self._compared), float(self.joining), step),
            *(checksum(list(rates)), len(rates), checksum(names), share.weight, share.unit, share.scale),
        )
        rows = [Row(*values) for values in self.processes.exchange(what, row)]
        self.stop_heard = any(row.stop for row in rows)
        check_rows(self.processes, rows, row, rates, names)
        doer = next((rank for rank, row in enumerate(rows) if row.kind != FOLLOW), 0)
        kind, rate_count = rows[doer].kind, int(rows[doer].rate_count)
        if kind in ("update", "step", "pass") and not all(row.compared for row in rows):
            # A parameter that some steps don't use is why their operators differ, and is no mistake.
            self._compare_start(steps=len({row.names for row in rows if row.weight}) < 2)
        if kind in ("state", "model"):
            self._compare_weights()
        if len({row.names for row in rows}) > 1:
            union = self._united(what, names)
            present, changed = union & self.buckets.views.keys(), union - self.buckets.views.keys()
        if rate_count and any(row.kind == FOLLOW for row in rows):
            sent = torch.zeros(rate_count, dtype=torch.float64)
            if self.world_rank == doer:
                sent.copy_(torch.tensor(rates, dtype=torch.float64))
            self.processes.broadcast(what, sent, doer)
            rates = sent.tolist()
        shares = [Share(row.weight, row.unit, row.scale) for row in rows]
        step = step if kind == FOLLOW else int(max(row.step for row in rows))
        return Meeting(arrival, kind, shares, rates, present, changed, step, doer)

    def reduce(self, meeting: Meeting) -> tuple[dict[str, torch.Tensor], Share]:
        """Reduces the buckets."""
        return self._reduce(meeting, meeting.own.gradients)

    def average(self, meeting: Meeting) -> dict[str, torch.Tensor]:
        """Averages copies in the buckets, which are free in the user's own loops."""
        views, gradients = self.buckets.views, meeting.own.gradients
        for name, gradient in gradients.items():
            views[name].copy_(gradient)
        reduced, share = self._reduce(meeting, {name: views[name] for name in gradients})
        return {name: gradient / share.weight for name, gradient in reduced.items()}

    def spread(self, meeting: Meeting, parameters: Named, buffers: Named) -> None:
        """Sends the leader's buffers; the weights are equal everywhere."""
        changed = {name: value for name, value in buffers.items() if name in meeting.changed}
        self._broadcast("the buffers that training changes", changed, meeting.leader)

    def total(self, meeting: Meeting, keep: bool = True) -> dict[str, torch.Tensor]:
        """Sums copies of the buckets, one at a time, independently of the reduction for updates."""
        gradients = meeting.own.gradients
        share, unit = meeting.shares[self.world_rank], meeting.shares[meeting.leader].unit
        sums: dict[str, torch.Tensor] = {}
        for bucket in self.buckets if meeting.weight else ():
            names = [name for name in bucket.views if name in meeting.present]
            if not names:
                continue
            flat = torch.zeros_like(bucket.flat)
            for name in gradients.keys() & names:
                torch.mul(gradients[name], share.unit / unit, out=bucket.view_in(flat, name))
            self.processes.all_reduce(WHAT, flat)
            sums |= {name: bucket.view_in(flat, name).to("cpu", copy=True) for name in (names if keep else ())}
        return sums

    def whole(self, parts: Named, keep: bool = True) -> dict[str, torch.Tensor]:
        """Returns the parts, because each process has complete tensors."""
        return dict(parts) if keep else {}

    def gather(self, data: bytes) -> list[bytes]:
        """Returns the data of all processes, by rank."""
        return self.processes.gather("the data of the others", data)

    @contextlib.contextmanager
    def join(self, follow: Callable[[], str]) -> Iterator[None]:
        """Follows until a meeting of processes that all merely follow."""
        if self.joining:
            raise RuntimeError("trainer.join() was entered inside another trainer.join(): remove one of them")
        self.joining = True
        try:
            yield
            while follow() != FOLLOW:
                pass
        except BaseException as error:
            self.failed(error)
            raise
        finally:
            self.joining = False

    def failed(self, error: BaseException) -> None:
        """Leaves a note for the others."""
        self.processes.leave_note(error)

    def _reduce(
        self, meeting: Meeting, gradients: Named, scatter: bool = False
    ) -> tuple[dict[str, torch.Tensor], Share]:
        """Reduces the buckets; see :meth:`reduce`, and ``Reduction`` for ``scatter``."""
        share = self._prepare(meeting, gradients)
        self.reduction.reduce([bucket for bucket in self.buckets if bucket.views.keys() & meeting.present], scatter)
        return {name: view for name, view in self.buckets.views.items() if name in meeting.present}, share

    def _compare_start(self, steps: bool) -> None:
        """Compares the first batch's dtypes, the weights and, if asked, the steps."""
        self._compared = True
        check_traits(self.processes, {"the dtypes of the first batch": self._dtypes})
        self._compare_weights()
        if steps:
            compare_steps(self.processes, self._compared_step())

    def _compare_weights(self) -> None:
        """Compares the weights, which training keeps equal to the last bit; the user may have changed some."""
        sums = {name: f"{zlib.crc32(_bytes(value)):08x}" for name, value in self._trainable.items()}
        check_traits(self.processes, {"the checksums of the weights": sums or None})

    def _prepare(self, meeting: Meeting, gradients: Named) -> Share:
        """Prepares the buckets for the reduction; returns the share that the result represents."""
        share, leading = meeting.shares[self.world_rank], meeting.shares[meeting.leader]
        absent = [view for name, view in self.buckets.views.items() if name not in gradients]
        if absent:
            torch._foreach_zero_(absent)
        # Micro-batches with the weights w and the gradients g have left sum(w g) / unit in the bucket.
        if self.reduction.of_means:
            factor, result = share.unit / share.weight if share.weight else 0.0, Share(1.0, 1.0, leading.scale)
        else:
            factor, result = share.unit / leading.unit, Share(meeting.weight, leading.unit, leading.scale)
        if gradients and factor != 1.0:
            torch._foreach_mul_(list(gradients.values()), factor)
        return result

    def _united(self, what: str, names: Collection[str]) -> set[str]:
        """Returns the union of the names of all processes, of parameters and buffers."""
        local = set(names)
        mask = torch.tensor([name in local for name in self._names], dtype=torch.uint8)
        self.processes.all_reduce(what, mask, dist.ReduceOp.MAX)
        return {name for name, is_present in zip(self._names, mask.tolist(), strict=True) if is_present}

    def _broadcast(self, what: str, tensors: Named, source: int) -> None:
        """Sends the tensors of one process to all, many at a time."""
        for names in grouped(tensors, self._bucket_bytes):
            chosen = [tensors[name].detach() for name in names]
            flat = torch.cat([tensor.reshape(-1) for tensor in chosen])
            self.processes.broadcast(what, flat.view(torch.uint8), source)  # as bytes: some dtypes can't be sent
            if self.world_rank != source:
                parts = torch.split_with_sizes(flat, [tensor.numel() for tensor in chosen])
                for tensor, values in zip(chosen, parts, strict=True):
                    tensor.copy_(values.view(tensor.shape))


def _bytes(tensor: torch.Tensor) -> Any:
    """Returns the bytes of a tensor as an array."""
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
