"""Requests to stop, which come as signals and which a loop sees after the step that runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

from ..errors import shown

__all__ = ["StopSignals"]


class StopSignals:
    """A context in which signals are requests: it is true once one has come, and the loop ends where that suits it.

    The second Ctrl-C insists: it does what it would do without the context, which is to raise a ``KeyboardInterrupt``.
    Signals that the process ignores stay ignored. Behind the context the handlers are those of before, and the object
    still says whether a signal has come.

    Args:
        signals: Their names: ``SIGTERM`` is what schedulers of jobs and containers send before they kill, ``SIGINT`` is
            Ctrl-C.

    Attributes:
        signals: The names.
        signal: The name of the first that has come; None before.

    Raises:
        TypeError, ValueError: If there is no such signal, or none that can be handled.
        RuntimeError: On entering in a thread besides the main one, as Python handles signals there alone.

    Example:
        >>> with StopSignals() as stop:
        ...     for x, y in batches:
        ...         trainer.train_step(x, y)
        ...         if stop:
        ...             trainer.save_checkpoint("last.ortckpt", overwrite=True)
        ...             break
    """

    def __init__(self, signals: Iterable[str] = ("SIGTERM", "SIGINT")) -> None:
        self.signals = _names(signals)
        self._numbers = {_number(name) for name in self.signals}
        self._before: dict[int, Any] = {}
        self._process, self._pressed = 0, False
        self.signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> StopSignals:
        if self._numbers and threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "StopSignals was entered in another thread, but Python handles signals in the main thread alone: enter "
                "it there, and ask the object here"
            )
        self._process = os.getpid()
        for number in self._numbers:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        child, interrupt = os.getpid() != self._process, number == signal.SIGINT
        if child and interrupt:
            return  # Ctrl-C reaches workers of a DataLoader too, which the loop still needs
        if child or (interrupt and self._pressed):
            signal.signal(number, self._before.pop(number))
            signal.raise_signal(number)
            return
        self._pressed |= interrupt
        self.signal = self.signal or signal.Signals(number).name


def _names(signals: Iterable[str]) -> list[str]:
    if isinstance(signals, str) or not isinstance(signals, Iterable):
        raise TypeError(f"signals must be a list of names such as ['SIGTERM'], but {shown(signals)} was given")
    return list(signals)


def _number(name: str) -> int:
    """Returns the number of a signal that a process may handle."""
    known = {each.name for each in signal.Signals} - {"SIGKILL", "SIGSTOP"}
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"{shown(name)} is no signal that can be handled; 'SIGTERM', 'SIGINT', 'SIGUSR1' and 'SIGHUP' are some"
        )
    return int(signal.Signals[name])
