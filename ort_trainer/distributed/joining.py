"""A process that runs out of data early: PyTorch's own ``Join``, with the trainer as what joins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from .processes import Processes

__all__ = ["Joining"]


class _Hook(JoinHook):
    def __init__(self, follow: Callable[[], None]) -> None:
        self._follow = follow

    def main_hook(self) -> None:
        """Does what the processes that still have data do next."""
        self._follow()


class Joining(Joinable):
    """The trainer in one :meth:`context`."""

    def __init__(self, processes: Processes, follow: Callable[[], None]) -> None:
        super().__init__()
        self._processes, self._follow = processes, follow

    def context(self) -> Join:
        """Returns the context."""
        return Join([self])

    def notify(self) -> None:
        """Tells the processes without data that something is to be done."""
        work = Join.notify_join_context(self)
        if work is not None:
            self._processes.run("the other processes", work.wait)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns what a process without data does."""
        return _Hook(self._follow)

    @property
    def join_device(self) -> torch.device:
        """The device of messages."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group for messages."""
        group: dist.ProcessGroup = self._processes.control
        return group
