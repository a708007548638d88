"""Does something that may hang, crash or take all memory in a child process first."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError
from ..forked import forked

__all__ = ["rehearse"]

# What reading a sound file stays below by far: memory beside a few times its size, and the time for it.
_MEMORY = 256 << 20
_SIZES = 4
_SECONDS = 5
_BYTES_PER_SECOND = 20 << 20
# A child that waits for something uses no time of its own.
_LONGEST_WAIT = 60


def rehearse(function: Callable[[], object], size: int, name: str) -> None:
    """Calls a function in a forked child process with bounds on memory and time; what it returns is lost.

    The library that reads HDF5 is in C, and trusts a file: of damaged ones some let it run for ever, and some let it
    allocate what a length in them says. Where a process can't be forked (on Windows), nothing is done.

    Args:
        function: Reads a file.
        size: Bytes of the file, from which the bounds follow.
        name: What messages call it.

    Raises:
        CheckpointError: If it fails, crashes, or does not come to an end within the bounds.
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
        said = f"reading it takes longer than {seconds} seconds, which its size does not explain"
    elif status < 0:
        said = f"reading it ends the process ({signal.Signals(-status).name})"
    raise CheckpointError(said if name in said else f"{name} is damaged: {said}")


def _wait(child: int, seconds: float) -> int | None:
    """Returns how a child ended, negative for a signal; None for one that is killed as it takes too long."""
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
    import resource  # which Windows does not have

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
