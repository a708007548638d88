"""Shows on a terminal which stage an export is in, on one line that goes away when it is done."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator

__all__ = ["Progress", "showing_progress"]

_log = logging.getLogger(__name__)
_TO_LINE_START, _CLEAR_TO_LINE_END = "\r", "\x1b[K"


class Progress:
    """The line. A forked child tells its stages through a pipe, so that one process alone writes to the terminal.

    Args:
        what: What is exported.
        shown: Whether there is anyone to see it.
    """

    def __init__(self, what: str, shown: bool) -> None:
        self.shown = shown
        self._what = what
        self._stream = sys.stderr  # which is redirected for a while
        self._start = time.perf_counter()
        self._stages: list[str] = []
        self._owner = os.getpid()
        self._pipe = os.pipe() if shown else None
        if self._pipe is not None:
            os.set_blocking(self._pipe[0], False)

    def stage(self, name: str) -> None:
        """Says that a stage has begun; called where the export runs."""
        if self._pipe is not None:
            os.write(self._pipe[1], f"{name}\n".encode())
            if os.getpid() == self._owner:
                self.draw()

    def draw(self) -> None:
        """Rewrites the line; called in the process that shows it, as often as it likes."""
        if self._pipe is None:
            return
        with contextlib.suppress(BlockingIOError):
            self._stages += os.read(self._pipe[0], 4096).decode().split()
        seconds = time.perf_counter() - self._start
        line = f"exporting {self._what}: {', '.join(dict.fromkeys(self._stages))}, {seconds:.1f} s"
        width = os.get_terminal_size(self._stream.fileno()).columns or 80  # some terminals don't know
        self._stream.write(_TO_LINE_START + line[: width - 1] + _CLEAR_TO_LINE_END)
        self._stream.flush()

    def close(self) -> None:
        """Takes the line away."""
        if self._pipe is not None:
            self.draw()  # for a terminal that keeps what is overwritten, such as a log of it
            self._stream.write(_TO_LINE_START + _CLEAR_TO_LINE_END)
            self._stream.flush()
            for end in self._pipe:
                os.close(end)
            self._pipe = None


@contextlib.contextmanager
def showing_progress(what: str) -> Iterator[Progress]:
    """Gives a line that is shown on a terminal, unless ``ORT_TRAINER_PROGRESS`` is 0 or warnings are not logged."""
    wanted = os.environ.get("ORT_TRAINER_PROGRESS", "") not in ("0", "off") and _log.isEnabledFor(logging.WARNING)
    try:
        seen = sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is no stream, as under pythonw, or it is closed
        seen = False
    progress = Progress(what, wanted and seen)
    try:
        yield progress
    finally:
        progress.close()
