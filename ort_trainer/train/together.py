"""Actions that may fail in one process: all processes raise then, and none continues as if they had succeeded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..core.errors import DistributedError
from .strategy import Meeting, Strategy
from .window import Share

__all__ = ["check_done", "together"]

Result = TypeVar("Result")


def together(strategy: Strategy, kind: str, action: Callable[[], Result]) -> Result:
    """Runs an action in all processes, and waits until it is done everywhere.

    Args:
        strategy: How the processes work together; all of them call this at the same point.
        kind: The kind of action, as in ``Meeting``.
        action: The action; in processes that have nothing to do it just returns.

    Returns:
        The result of the action here.

    Raises:
        Exception: Whatever the action raised here.
        DistributedError: If it raised in other processes only.
    """
    if strategy.world_size == 1:
        return action()
    try:
        result = action()
    except Exception as error:
        check_done(strategy, strategy.meet(kind, Share(0.0)), f"{type(error).__name__}: {error}")
        raise
    check_done(strategy, strategy.meet(kind, Share(0.0)))
    return result


def check_done(strategy: Strategy, meeting: Meeting, failure: str = "") -> None:
    """Checks that an action succeeded in all processes.

    Args:
        strategy: How the processes work together.
        meeting: The meeting after which all of them call this.
        failure: The error of this process, which the caller raises; empty if it succeeded.

    Raises:
        DistributedError: If this process succeeded, but another failed.
    """
    texts = [text.decode().strip() for text in strategy.gather(f" {failure}".encode())]
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    if failures and not failure:
        raise DistributedError(f"{meeting.kind!r} failed in another process: {'; '.join(failures)}")
