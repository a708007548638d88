"""A process that runs out of data early: PyTorch's own ``Join``, with the trainer as what joins."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from .processes import Processes

__all__ = ["Joining"]


class _Raised(Exception):
    """An error of what a process without data does, which is none of Join's own messages."""


class _Hook(JoinHook):
    def __init__(self, follow: Callable[[], Any]) -> None:
        self._follow = follow

    def main_hook(self) -> None:
        """Does what the processes that still have data do next."""
        try:
            self._follow()
        except RuntimeError as error:
            raise _Raised from error


class Joining(Joinable):
    """The trainer in one context.

    Args:
        processes: Who trains.
        follow: Does once what the processes that still have data do next.
    """

    def __init__(self, processes: Processes, follow: Callable[[], Any]) -> None:
        super().__init__()
        self._processes, self._follow = processes, follow
        self._context = Join([self])

    def notify(self) -> None:
        """Tells the processes without data that something is to be done."""
        work = Join.notify_join_context(self)
        if work is not None:
            self._processes.finish("the processes in trainer.join()", self._processes.control, lambda: work)

    def finish(self) -> None:
        """Does what the others do, until none has data left."""
        try:
            with warnings.catch_warnings():  # whose filters it changes
                self._processes.run("the processes with data left", lambda: self._context.__exit__(None, None, None))
        except _Raised as raised:
            assert raised.__cause__ is not None
            raise raised.__cause__ from None

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
