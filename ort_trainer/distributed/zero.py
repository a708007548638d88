"""ZeRO stage 1: each process keeps the optimizer's state for its part of the weights, and updates that part.

(S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..engine.ownership import shared_groups
from ..optim.parts import Named, Parts, global_norm
from ..train.strategy import Meeting, Share
from .buckets import Bucket, Buckets
from .data_parallel import DataParallel
from .processes import Processes

WHAT = "the parts of the other processes"


class ShardedOptimizer(DataParallel):
    """Divides each bucket into one equal part per process, by rank.

    Each process gets the reduced gradients of its part and updates the weights of that part. The weights are then
    gathered through the memory of the gradients, which are no longer needed.
    """

    zero_stage = 1

    def lay_out(self, trainable: Named) -> tuple[dict[str, torch.Tensor], Parts]:
        """Makes the buckets.

        Raises:
            ValueError: If parameters share memory, because two processes would update the same elements.
        """
        shared = shared_groups(trainable, trainable)
        if shared:
            raise ValueError(
                f"{shared[0]} are different parameters that share memory, which can't be divided among processes: set "
                "distributed.deepspeed_zero_optimization.stage to 0, or use one Parameter and views of it in forward()"
            )
        memory, _ = super().lay_out(trainable)
        self._parts = _OwnParts(self.buckets, self.processes)
        return memory, self._parts

    def reduce(self, meeting: Meeting) -> tuple[dict[str, torch.Tensor], Share]:
        """Sums the buckets over the processes; returns the parts of this process."""
        reduced, share = self._reduce(meeting, meeting.own.gradients, scatter=True)
        return self._parts.of(reduced), share

    def spread(self, meeting: Meeting, parameters: Named, buffers: Named) -> None:
        """Gathers the weights, and sends the leader's buffers."""
        for bucket in self.buckets:
            names = [name for name in bucket.views if name in parameters]
            if names:
                weights = {name: parameters[name] for name in names}
                self._gather_parts(bucket, bucket.flat, self._parts.of(weights))
                torch._foreach_copy_(list(weights.values()), [bucket.views[name] for name in names])
        super().spread(meeting, parameters, buffers)

    def whole(self, parts: Named, keep: bool = True) -> dict[str, torch.Tensor]:
        """Gathers one bucket at a time, in memory of its size; copies the results to the CPU."""
        tensors: dict[str, torch.Tensor] = {}
        for bucket in self.buckets:
            names = [name for name in bucket.views if name in parts]
            if names:
                flat = torch.empty_like(bucket.flat)
                self._gather_parts(bucket, flat, {name: parts[name] for name in names})
                for name in names if keep else ():
                    tensors[name] = bucket.view_in(flat, name).to("cpu", copy=True)
        return {name: tensors[name] for name in parts} if keep else {}

    def _gather_parts(self, bucket: Bucket, flat: torch.Tensor, own_parts: Named) -> None:
        """Fills a tensor of the size of a bucket with the parts of all processes."""
        for name, part in own_parts.items():
            first, last = self._parts.ranges[name]
            flat[bucket.offsets[name] + first : bucket.offsets[name] + last] = part
        self.processes.all_gather(WHAT, flat, flat.chunk(self.world_size)[self.world_rank])


class _OwnParts(Parts):
    """The elements of each parameter, flattened, that lie in this process's part of a bucket.

    Args:
        buckets: The buckets.
        processes: The processes that share them.

    Attributes:
        ranges: Parameter name -> start and end of its part; equal if the part is empty.
    """

    are_shared = True

    def __init__(self, buckets: Buckets, processes: Processes) -> None:
        self._processes = processes
        self.ranges: dict[str, tuple[int, int]] = {}
        for bucket in buckets:
            size = bucket.flat.numel() // processes.size
            begin = processes.rank * size
            self.ranges |= {name: bucket.slice_of(name, begin, begin + size) for name in bucket.views}

    def of(self, tensors: Named) -> dict[str, torch.Tensor]:
        """Returns this process's elements of each tensor; views if the tensor is contiguous."""
        return {name: tensor.reshape(-1)[slice(*self.ranges[name])] for name, tensor in tensors.items()}

    def total_norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """Returns the norm over the parts of all processes."""
        return self._together(global_norm(gradients).view(1))[0]

    def norms(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the norm of each tensor over all processes, with one message for all tensors."""
        local_norms = torch.stack([norm.double() for norm in torch._foreach_norm(list(tensors))])
        together = self._together(local_norms).unbind()
        return [norm.to(tensor.dtype) for norm, tensor in zip(together, tensors, strict=True)]

    def _together(self, norms: torch.Tensor) -> torch.Tensor:
        """Returns the norms of whole tensors, from the norms of this process's parts of them."""
        all_norms = norms.new_empty(self._processes.size * norms.numel())
        self._processes.all_gather("the norms of the other processes", all_norms, norms)
        # All processes add in the same order, so their results are equal bit for bit.
        together: torch.Tensor = torch.linalg.vector_norm(all_norms.view(self._processes.size, -1), dim=0)
        return together
