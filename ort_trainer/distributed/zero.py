"""ZeRO stage 1: each process keeps the optimizer's state of its part of the weights, and updates that.

(S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..optim.parts import Named, Parts, global_norm
from ..ownership import shared_groups
from ..training.strategy import Meeting
from ..training.window import Share
from .buckets import Bucket, Buckets
from .data_parallel import DataParallel
from .processes import Processes

__all__ = ["ShardedOptimizer"]


class ShardedOptimizer(DataParallel):
    """Divides the elements of each bucket among the processes: of N equal parts, each has the one of its rank.

    Gradients are reduced to where their part is; the weights of the parts are updated there, and gathered through the
    memory of the gradients, which are used up by then.
    """

    zero_stage = 1

    def lay_out(self, trainable: Named) -> tuple[dict[str, torch.Tensor], Parts]:
        """Makes the buckets.

        Raises:
            ValueError: If parameters have memory in common, of which two processes would update the same elements.
        """
        shared = shared_groups(trainable, trainable)
        if shared:
            raise ValueError(
                f"{shared[0]} are different parameters in the same memory, which can't be divided among processes: set "
                "distributed.deepspeed_zero_optimization.stage to 0, or make them one Parameter and compute with a "
                "view of it in forward()"
            )
        memory, _ = super().lay_out(trainable)
        self._parts = _OwnParts(self.buckets, self.processes)
        return memory, self._parts

    def reduce(self, meeting: Meeting, gradients: Named) -> tuple[dict[str, torch.Tensor], Share]:
        """Adds up the buckets; returns the parts of this process."""
        reduced, share = self._reduce(meeting, gradients, scatter=True)
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
        """Gathers bucket by bucket, into memory of the size of one; what is kept goes to the CPU."""
        found: dict[str, torch.Tensor] = {}
        for bucket in self.buckets:
            names = [name for name in bucket.views if name in parts]
            if names:
                flat = torch.empty_like(bucket.flat)
                self._gather_parts(bucket, flat, {name: parts[name] for name in names})
                for name in names if keep else ():
                    found[name] = bucket.view_in(flat, name).to("cpu", copy=True)
        return {name: found[name] for name in parts} if keep else {}

    def _gather_parts(self, bucket: Bucket, flat: torch.Tensor, own: Named) -> None:
        """Fills memory of the size of a bucket with the parts of all processes."""
        for name, part in own.items():
            first, last = self._parts.ranges[name]
            flat[bucket.offsets[name] + first : bucket.offsets[name] + last] = part
        size = flat.numel() // self.world_size
        begin = self.world_rank * size
        self.processes.all_gather("the parts of the other processes", flat, flat[begin : begin + size])


class _OwnParts(Parts):
    """The elements of each parameter that lie in this process's part of a bucket, in one dimension.

    Args:
        buckets: The buckets.
        processes: Who shares them.

    Attributes:
        ranges: Parameter name -> where its part begins and ends; both are equal where it is empty.
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
        """Returns the elements; of contiguous tensors they are views."""
        return {name: tensor.reshape(-1)[slice(*self.ranges[name])] for name, tensor in tensors.items()}

    def total_norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """Returns the norm of what all processes have."""
        return self._together(global_norm(gradients).view(1))[0]

    def norms(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the norm of each tensor, with one message for all."""
        own = torch.stack([norm.double() for norm in torch._foreach_norm(list(tensors))])
        together = self._together(own).unbind()
        return [norm.to(tensor.dtype) for norm, tensor in zip(together, tensors, strict=True)]

    def _together(self, norms: torch.Tensor) -> torch.Tensor:
        found = norms.new_empty(self._processes.size * norms.numel())
        self._processes.all_gather("the norms of the other processes", found, norms)
        # In the same order everywhere, so that all processes get the same number.
        together: torch.Tensor = torch.linalg.vector_norm(found.view(self._processes.size, -1), dim=0)
        return together
