"""Calls a function that may hang, crash or use all memory in a child process first."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from ..core.errors import CheckpointError
from ..core.forked import forked

__all__ = ["rehearse"]

# Bounds far above what an intact file needs: additional memory plus a multiple of the file's size, and CPU time.
_MEMORY = 256 << 20
_SIZES = 4
_SECONDS = 5
_BYTES_PER_SECOND = 20 << 20
# Bound on wall-clock time, because a waiting child uses no CPU time.
_LONGEST_WAIT = 60


def rehearse(function: Callable[[], object], size: int, name: str) -> None:
    """Calls a function in a forked child process with bounds on memory and time, and discards its result.

    The HDF5 library is written in C and trusts its files: a damaged file can make it run forever, or allocate any
    amount of memory. Without fork (on Windows), this does nothing.

    Args:
        function: Reads a file.
        size: Size of the file in bytes, from which the bounds follow.
        name: The file's name for messages.

    Raises:
        CheckpointError: If the function fails, crashes, or exceeds the bounds.
    """
    if not hasattr(os, "fork"):
        return
    seconds = _SECONDS + size // _BYTES_PER_SECOND

    def work(writer: int) -> None:
        warnings.simplefilter("ignore")
        try:
            _bound(_MEMORY + _SIZES * size, seconds)
            function()
        except BaseException as error:
            said = str(error) if isinstance(error, CheckpointError) else repr(error)
            os.write(writer, said.encode(errors="replace")[:4000])
            raise

    child, reader = forked(work)
    with os.fdopen(reader, "rb") as stream:
        status = _wait(child, _LONGEST_WAIT + 2 * seconds)
        if status == 0:
            return
        said = stream.read().decode(errors="replace")
    if status is None or -status in (getattr(signal, "SIGXCPU", 0), signal.SIGKILL):
        said = f"reading it takes more than {seconds} seconds, too long for its size"
    elif status < 0:
        said = f"reading it crashes the process ({signal.Signals(-status).name})"
    raise CheckpointError(said if name in said else f"{name} is damaged: {said}")


def _wait(child: int, seconds: float) -> int | None:
    """Returns a child's exit code, negative for a signal; kills it after a timeout and returns None."""
    end, pause = time.monotonic() + seconds, 0.001
    try:
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
    except BaseException:
        _kill(child)
        raise
    _kill(child)
    return None


def _kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def _bound(memory: int, seconds: int) -> None:
    import resource  # here, because Windows does not have it

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, highest = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds if highest < 0 else min(seconds, highest), highest))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory
        _, highest = resource.getrlimit(resource.RLIMIT_AS)
        if highest == resource.RLIM_INFINITY or limit < highest:
            resource.setrlimit(resource.RLIMIT_AS, (limit, highest))
