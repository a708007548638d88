"""What may fail in one process: then all of them raise, and none goes on as if it had been done."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..errors import DistributedError
from .strategy import Meeting, Strategy
from .window import Share

__all__ = ["check_done", "together"]

Result = TypeVar("Result")


def together(strategy: Strategy, kind: str, action: Callable[[], Result]) -> Result:
    """Does something in all processes, or in some of them, and waits until it is done everywhere.

    Args:
        strategy: How the processes work together; all of them call this at the same place.
        kind: What is done, as in ``Meeting``.
        action: Does it; in processes that have nothing to do it just returns.

    Returns:
        What the action has returned here.

    Raises:
        Exception: What the action has raised here.
        DistributedError: If it has raised in other processes only.
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
    """Finds out whether all processes have done it.

    Args:
        strategy: How the processes work together.
        meeting: After which all of them call this.
        failure: What has gone wrong here; the caller raises it.

    Raises:
        DistributedError: If nothing has gone wrong here, but elsewhere.
    """
    texts = [text.decode().strip() for text in strategy.gather(f" {failure}".encode())]
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    if failures and not failure:
        raise DistributedError(f"{meeting.kind!r} has failed in another process, {'; '.join(failures)}")
