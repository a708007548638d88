"""Child processes that do one thing and exit without running the parent's clean-up."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # of prctl(2)


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


def end(child: int) -> None:
    """Ends a child process, if it has not ended, and forgets it."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):  # a script may wait for all its children
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def end_with_parent() -> None:
    """Lets this process, a forked child, end with its parent (on Linux), and not handle signals as the script does."""
    import ctypes

    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
