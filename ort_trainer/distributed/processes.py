"""The processes that train together: PyTorch's process groups, and errors that say which rank is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import DistributedError

__all__ = ["Processes"]

Result = TypeVar("Result")


class Processes:
    """Two groups of all processes: one for small messages, on the CPU, and one for tensors.

    Args:
        device: Where training runs.
        timeout: Seconds that a process waits for the others.

    Attributes:
        size: Number of processes.
        rank: The number of this one.
        control: The group for messages.
        group: The group for tensors.
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self.timeout = timeout
        limit = timedelta(seconds=timeout)
        self.control = dist.new_group(backend="gloo", timeout=limit)
        # Messages on the CPU need not wait for what a GPU has to do first.
        self.group = self.control if device.type == "cpu" else dist.new_group(backend="nccl", timeout=limit)

    def exchange(self, what: str, values: Sequence[float]) -> list[list[float]]:
        """Returns the numbers of all processes, by rank; each must give as many."""
        own = torch.tensor(values, dtype=torch.float64)
        found = torch.empty(self.size * len(values), dtype=torch.float64)
        self.run(what, lambda: dist.all_gather_single(found, own, group=self.control))
        rows: list[list[float]] = found.view(self.size, -1).tolist()
        return rows

    def all_reduce(self, what: str, tensor: torch.Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """Adds up a tensor over the processes, in place; or its largest elements, or whatever the operation says."""
        self.run(what, lambda: dist.all_reduce(tensor, operation, group=self._group_of(tensor)))

    def broadcast(self, what: str, tensor: torch.Tensor, source: int = 0) -> None:
        """Gives all processes the tensor of one, in place."""
        self.run(what, lambda: dist.broadcast(tensor, source, group=self._group_of(tensor)))

    def all_gather(self, what: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Puts the parts of all processes, of one size, behind each other; the own one may lie there already."""
        self.run(what, lambda: dist.all_gather_single(whole, part, group=self._group_of(part)))

    def run(self, what: str, call: Callable[[], Result]) -> Result:
        """Runs a collective operation.

        Args:
            what: What it is for, for the message.
            call: Runs it.

        Raises:
            DistributedError: If another process does not take part in time.
        """
        try:
            return call()
        except RuntimeError as error:
            raise DistributedError(f"rank {self.rank} of {self.size} waited in vain for {what}: {error}") from error

    def leave_note(self, error: BaseException) -> None:
        """Leaves a note that a step of this process has raised, for the messages of the others."""

    def _group_of(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.control if tensor.device.type == "cpu" else self.group
        return group
