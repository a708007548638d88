"""Delays signals while state changes, so that Ctrl-C finds a step either complete or not begun."""

from __future__ import annotations

# The C module below ``signal``, whose functions convert every result to an Enum, which takes 20 microseconds a step,
# and whose import takes as long as this package's.
import _signal  # type: ignore[import-not-found]
import threading
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

# Signals whose handlers commonly raise: Ctrl-C, time limits, what a job scheduler sends before it kills, Windows's
# Ctrl-Break, and the end of a child, for which PyTorch's DataLoader raises if the child was one of its workers.
_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK", "SIGCHLD")
_SIGNALS = tuple(int(getattr(_signal, name)) for name in _NAMES if hasattr(_signal, name))
# The signals that are delayed now.
_held: list[int] = []


def insisted() -> bool:
    """Returns whether a delayed signal has arrived twice: the user does not want to wait."""
    return len(set(_held)) < len(_held)


class uninterrupted:
    """A context whose block completes before any signal handler runs.

    Python runs handlers between two bytecodes of the main thread, so a ``KeyboardInterrupt`` could come between the
    backward pass and the weight update, or between an update and its counter. Inside the context, handlers written in
    Python wait for the end of the block, and then run in the order of their signals. Other threads are never
    interrupted.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Any:
        self.hold()

    def hold(self) -> None:
        """Makes signals wait for :meth:`release`."""
        self._waiting: list[tuple[int, FrameType | None]] = []
        self._holding = True
        if threading.get_ident() != threading.main_thread().ident:
            return
        try:
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):  # not the system's default, which ends the process
                    self._handlers[number] = handler
                    _signal.signal(number, self._remember)
        except BaseException:
            self.release()
            raise

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._holding:
            self._waiting.append((number, frame))
            _held.append(number)
        else:  # it arrived while handlers were being restored
            self._handlers[number](number, frame)

    def release(self) -> None:
        """Runs the handlers of signals that have waited; does nothing if none is held."""
        if not self._handlers:
            return
        raised = None
        while self._handlers:
            try:
                self._holding = False
                for number, handler in self._handlers.items():
                    _signal.signal(number, handler)
                break
            except BaseException as error:  # raised by a handler that just ran: still restore the others
                raised = error
        try:
            if raised is not None:
                raise raised
        finally:
            _held.clear()
            waiting, self._waiting, handlers, self._handlers = self._waiting, [], self._handlers, {}
            if waiting:
                _deliver(waiting, handlers)


def _deliver(waiting: Sequence[tuple[int, FrameType | None]], handlers: Mapping[int, Any]) -> None:
    """Runs the handlers of signals that have waited, in the order of their arrival."""
    if waiting:
        (number, frame), *others = waiting
        try:
            handlers[number](number, frame)
        finally:  # run the other handlers even if this one raises
            _deliver(others, handlers)
