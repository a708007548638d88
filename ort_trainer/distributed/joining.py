"""Processes that run out of data early: PyTorch's ``Join``, with the trainer as its ``Joinable``."""

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
    """Wraps a RuntimeError of a following process, to tell it from Join's own errors."""


class _Hook(JoinHook):
    def __init__(self, follow: Callable[[], Any]) -> None:
        self._follow = follow

    def main_hook(self) -> None:
        """Takes part in the next operation of the processes that still have data."""
        try:
            self._follow()
        except RuntimeError as error:
            raise _Raised from error


class Joining(Joinable):
    """The trainer in one ``trainer.join()`` context.

    Args:
        processes: The processes that train.
        follow: Takes part in the next operation of the processes that still have data.
    """

    def __init__(self, processes: Processes, follow: Callable[[], Any]) -> None:
        super().__init__()
        self._processes, self._follow = processes, follow
        self._context = Join([self])

    def notify(self) -> None:
        """Notifies the processes without data of a coming operation."""
        work = Join.notify_join_context(self)
        if work is not None:
            self._processes.finish("the processes in trainer.join()", self._processes.control, lambda: work)

    def finish(self) -> None:
        """Follows the other processes until none has data left."""
        try:
            with warnings.catch_warnings():  # Join changes the warning filters
                self._processes.run("the processes with data left", lambda: self._context.__exit__(None, None, None))
        except _Raised as raised:
            assert raised.__cause__ is not None
            raise raised.__cause__ from None

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook that a process without data runs."""
        return _Hook(self._follow)

    @property
    def join_device(self) -> torch.device:
        """The device of Join's messages."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group for Join's messages."""
        group: dist.ProcessGroup = self._processes.control
        return group
