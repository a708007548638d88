"""Child processes that do one thing, and end without running any clean-up of the parent's."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable

__all__ = ["forked"]


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Forks a child process that does something and ends.

    Args:
        work: Is called in the child with the writing end of a pipe. The child ends with status 0 when it returns, and 1
            when it raises, of which nothing is printed. It may not wait for threads, which the child does not have.

    Returns:
        The child's process number, and the reading end of the pipe.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns of the missing threads. PyTorch's data loaders fork likewise, with the same precaution.
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
        child = os.fork()
    if child == 0:
        _run_and_exit(work, reader, writer)
    os.close(writer)
    return child, reader


def _run_and_exit(work: Callable[[int], None], reader: int, writer: int) -> None:
    """The child's whole life."""
    status = 1
    try:
        os.close(reader)
        # A collection here would run the destructors of the parent's garbage, which wait for threads that are not here.
        # Of what the child makes itself there is nothing to collect before it ends.
        gc.freeze()
        gc.disable()
        work(writer)
        status = 0
    finally:
        os._exit(status)
