"""Shows the stage of an export on a terminal, in one line that is cleared at the end."""

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
    """The progress line. A forked child reports its stages through a pipe, so only one process writes to the terminal.

    Args:
        what: The name of what is exported.
        shown: Whether to show the line.
    """

    def __init__(self, what: str, shown: bool) -> None:
        self.shown = shown
        self._what = what
        self._stream = sys.stderr  # kept, because the export redirects sys.stderr for a while
        self._start = time.perf_counter()
        self._stages: list[str] = []
        self._owner = os.getpid()
        self._pipe = os.pipe() if shown else None
        if self._pipe is not None:
            os.set_blocking(self._pipe[0], False)

    def stage(self, name: str) -> None:
        """Reports that a stage has begun; called in the process that exports."""
        if self._pipe is not None:
            os.write(self._pipe[1], f"{name}\n".encode())
            if os.getpid() == self._owner:
                self.draw()

    def draw(self) -> None:
        """Redraws the line; called in the process that shows it, at any time."""
        if self._pipe is None:
            return
        with contextlib.suppress(BlockingIOError):
            self._stages += os.read(self._pipe[0], 4096).decode().split()
        seconds = time.perf_counter() - self._start
        line = f"exporting {self._what}: {', '.join(dict.fromkeys(self._stages))}, {seconds:.1f} s"
        width = os.get_terminal_size(self._stream.fileno()).columns or 80  # some terminals report 0
        self._stream.write(_TO_LINE_START + line[: width - 1] + _CLEAR_TO_LINE_END)
        self._stream.flush()

    def close(self) -> None:
        """Clears the line."""
        if self._pipe is not None:
            self.draw()  # the final state, for logs of the terminal, which keep overwritten lines
            self._stream.write(_TO_LINE_START + _CLEAR_TO_LINE_END)
            self._stream.flush()
            for end in self._pipe:
                os.close(end)
            self._pipe = None


@contextlib.contextmanager
def showing_progress(what: str) -> Iterator[Progress]:
    """Yields a line, shown only on a terminal, and not if ``ORT_TRAINER_PROGRESS`` is 0 or warnings are not logged."""
    wanted = os.environ.get("ORT_TRAINER_PROGRESS", "") not in ("0", "off") and _log.isEnabledFor(logging.WARNING)
    try:
        seen = sys.stderr.isatty()
    except (AttributeError, ValueError):  # no stream, as under pythonw, or a closed one
        seen = False
    progress = Progress(what, wanted and seen)
    try:
        yield progress
    finally:
        progress.close()
