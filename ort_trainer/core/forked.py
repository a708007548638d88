"""Child processes that do one thing and exit without running the parent's clean-up."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable

__all__ = ["forked"]


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Forks a child process that calls a function and exits.

    Args:
        work: Called in the child with the writing end of a pipe. The child exits with status 0 when it returns, and 1
            when it raises; nothing is printed. It must not wait for threads: the child has only one.

    Returns:
        The child's process ID, and the reading end of the pipe.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns about the missing threads. PyTorch's data loaders fork in the same way.
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
        child = os.fork()
    if child == 0:
        _run_and_exit(work, reader, writer)
    os.close(writer)
    return child, reader


def _run_and_exit(work: Callable[[int], None], reader: int, writer: int) -> None:
    """Runs the function in the child, and exits."""
    status = 1
    try:
        os.close(reader)
        # A collection would run the destructors of the parent's garbage, which wait for threads that don't exist here.
        # The child exits before its own garbage matters.
        gc.freeze()
        gc.disable()
        work(writer)
        status = 0
    finally:
        os._exit(status)
