"""The processes that train together: PyTorch's process groups, with errors that name the missing rank."""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..core.errors import DistributedError
from ..core.interrupts import insisted
from .missing import Notes, find_missing, stay

Result = TypeVar("Result")
# torch 2.13 has new names for both, and warns of the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# The interval of a wait after which signals are handled, and the number of intervals between checks of the notes.
_SLICE, _SLICES = timedelta(seconds=0.2), 5


class Processes:
    """Two groups of all processes: one for small messages on the CPU, and one for tensors.

    After a failed operation the groups are unusable, because gloo closes its connections: every later operation fails
    at once. PyTorch itself ends a process whose NCCL operation times out; but the processes meet on gloo before each
    one, which detects a missing process.

    Args:
        device: Where training runs.
        timeout: Seconds that a process waits for the others.

    Attributes:
        size: The number of processes.
        rank: The rank of this process.
        control: The group for messages.
        group: The group for tensors.
        trainers: For each trainer, in the order in which they were made, what identifies the weights that each process
            gave it, by rank.
    """

    def __init__(self, device: torch.device, timeout: float) -> None:
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self.timeout = timeout
        self.trainers: list[list[float]] = []
        limit = timedelta(seconds=timeout)
        try:
            self.control = dist.new_group(backend="gloo", timeout=limit)
            # Messages on the CPU need not wait for queued work of a GPU.
            self.group = self.control if device.type == "cpu" else dist.new_group(backend="nccl", timeout=limit)
        except RuntimeError as error:
            raise DistributedError(
                f"rank {self.rank} of {self.size} waited in vain for the start of the other processes: {error}"
            ) from error
        self._notes = Notes(self.control, "start")
        self._has_raised = False
        self._failure = ""
        _living().add(self)
        start = "the start of the other processes"
        begin = self.exchange(start, [time.time()])[0][0]
        self._notes = Notes(self.control, str(begin))

    def exchange(self, what: str, values: Sequence[float]) -> list[list[float]]:
        """Returns the numbers of all processes, by rank; each must pass the same count."""
        row = torch.tensor(values, dtype=torch.float64)
        gathered = torch.empty(self.size * len(values), dtype=torch.float64)
        self.all_gather(what, gathered, row)
        rows: list[list[float]] = gathered.view(self.size, -1).tolist()
        return rows

    def gather(self, what: str, data: bytes) -> list[bytes]:
        """Returns the data of all processes, by rank."""
        sizes = [int(size) for (size,) in self.exchange(what, [len(data)])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = torch.empty(self.size * len(padded), dtype=torch.uint8)
        self.all_gather(what, gathered, padded)
        rows = gathered.view(self.size, -1).numpy()
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def all_reduce(self, what: str, tensor: torch.Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """Reduces a tensor over the processes, in place; by default, sums it."""
        group = self.group_of(tensor)
        self.finish(what, group, lambda: dist.all_reduce(tensor, operation, group=group, async_op=True))

    def broadcast(self, what: str, tensor: torch.Tensor, source: int = 0) -> None:
        """Sends the tensor of one process to all, in place."""
        group = self.group_of(tensor)
        self.finish(what, group, lambda: dist.broadcast(tensor, source, group=group, async_op=True))

    def all_gather(self, what: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Concatenates the equally sized parts of all processes; ``part`` may already lie in ``whole``."""
        group = self.group_of(part)
        self.finish(what, group, lambda: all_gather(whole, part, group=group, async_op=True))

    def finish(self, what: str, group: dist.ProcessGroup, start: Callable[[], Any]) -> None:
        """Runs a collective operation to completion.

        Args:
            what: What this process waits for, for the message.
            group: The group of the operation.
            start: Starts the operation and returns its work; or returns work that was started before.

        Raises:
            DistributedError: As for :meth:`run`.
        """
        self.run(what, lambda: self._wait(start(), in_slices=group is self.control))

    def run(self, what: str, call: Callable[[], Result]) -> Result:
        """Runs or starts a collective operation.

        Args:
            what: What this process waits for, for the message.
            call: Runs or starts the operation.

        Raises:
            DistributedError: If another process does not take part in time; the message names it.
        """
        if self._failure:
            raise DistributedError(f"{self._failure}. The process groups are unusable now: restart all processes")
        if self._has_raised:  # the script handled the error and went on
            self._notes.leave("raised", {})
            self._has_raised = False
        begin = time.monotonic()
        try:
            return call()
        except DistributedError:  # from a nested operation
            raise
        except RuntimeError as error:
            # A group's destructor waits for pending operations, and would keep the process from exiting.
            for group in (self.control, self.group):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            self._failure = f"rank {self.rank} of {self.size} waited in vain for {what}"
            if insisted():
                self._failure += " and was interrupted twice"
                self._notes.leave("raised", {"error": "KeyboardInterrupt"})
                self._notes.end()
            else:
                seconds = time.monotonic() - begin
                reason = find_missing(self._notes, what, seconds, min(5.0, self.timeout), str(error))
                self._failure += f" ({seconds:.1f} s of at most {self.timeout:g}, distributed.timeout): {reason}"
            raise DistributedError(self._failure) from error

    def leave_note(self, error: BaseException) -> None:
        """Leaves a note that a step of this process raised, for the error messages of the others."""
        if not self._failure and not isinstance(error, DistributedError):
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self._notes.leave("raised", {"error": text if len(text) < 1000 else f"{text[:1000]}..."})
            self._has_raised = True

    def ended_by(self, error: BaseException) -> None:
        """Tells the others, who may be waiting, that an error ends this process."""
        if not self._failure and not isinstance(error, DistributedError):
            self.leave_note(error)
            self._notes.end()
            stay(self._notes, [rank for rank in range(self.size) if rank != self.rank])

    def group_of(self, tensor: torch.Tensor) -> dist.ProcessGroup:
        """Returns the group in which a tensor is sent."""
        group: dist.ProcessGroup = self.control if tensor.device.type == "cpu" else self.group
        return group

    def _may_wait(self, count: int) -> bool:
        """Returns whether to go on waiting after a number of slices; not if interrupted, or if another has given up."""
        return not (insisted() or (count % _SLICES == 0 and self._notes.ended()))

    def _wait(self, work: Any, in_slices: bool) -> None:
        """Waits in slices, and gives up early on an interrupt or a failure elsewhere, which gloo does not notice."""
        for count in itertools.count(1):
            if not in_slices:
                break
            try:
                work.wait(_SLICE)
                return
            except RuntimeError:
                if work.is_completed():
                    break
                if not self._may_wait(count):
                    raise
        work.wait()  # for a GPU this does not block: later work on the GPU waits


@functools.cache
def _living() -> weakref.WeakSet[Processes]:
    """Returns the groups that are told of an error outside the trainer which ends this process."""
    living: weakref.WeakSet[Processes] = weakref.WeakSet()
    show = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        for processes in list(living):
            processes.ended_by(error)

    sys.excepthook = tell
    return living
