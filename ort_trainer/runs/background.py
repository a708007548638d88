"""Runs one function at a time in a background thread, and keeps its error."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable

__all__ = ["Background"]


class Background:
    """Runs functions in a thread, one at a time, and keeps the error of the last one until :meth:`wait`.

    Python waits for the thread before it exits. An error that was not retrieved by then is printed to stderr.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._errors: list[Exception] = []
        weakref.finalize(self, _report, self._errors)

    def start(self, action: Callable[[], None]) -> None:
        """Runs a function in a thread; call :meth:`wait` for the previous one first."""
        errors = self._errors

        def run() -> None:
            try:
                action()
            except Exception as error:
                errors.append(error)

        self._thread = threading.Thread(target=run, name="ort_trainer checkpoint", daemon=False)
        self._thread.start()

    def wait(self) -> Exception | None:
        """Waits for the function, and returns the exception that it raised; a second call returns None."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._errors.pop() if self._errors else None


def _report(errors: list[Exception]) -> None:
    for error in errors:
        print(f"ort_trainer: a checkpoint was not saved: {type(error).__name__}: {error}", file=sys.stderr)
