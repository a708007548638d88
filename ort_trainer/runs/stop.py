"""Stop requests by signal, which a loop checks after each step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

from ..core.errors import shown

_CHILD_ENDED = getattr(signal, "SIGCHLD", None)  # not on Windows


class StopSignals:
    """A context that turns signals into stop requests: it is true once one arrived, and the loop decides when to end.

    A second Ctrl-C has its usual effect and raises ``KeyboardInterrupt``. Signals that the process ignores stay
    ignored. After a stop request, the end of a child process raises nothing: a scheduler signals the whole group, and
    PyTorch's ``DataLoader`` would raise for its dead workers wherever the loop is, even while it saves. On exit the
    previous handlers are restored; the object still tells whether a signal arrived.

    Args:
        signals: Signal names: job schedulers and container runtimes send ``SIGTERM`` before they kill a process;
            ``SIGINT`` is Ctrl-C. On Windows nothing sends ``SIGTERM``, and Ctrl-Break is ``SIGBREAK``.

    Attributes:
        signals: The names.
        signal: The name of the first signal that arrived; None before that.

    Raises:
        TypeError, ValueError: If a signal is unknown or can't be handled.
        RuntimeError: When entered outside the main thread, because Python handles signals only there.

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
                "StopSignals was entered outside the main thread, but Python handles signals only there: enter it in "
                "the main thread, and check the object here"
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
        """Handles a signal: records the request to stop, or gives the signal its usual effect."""
        child, interrupt = os.getpid() != self._process, number == signal.SIGINT
        if child and interrupt:
            return  # Ctrl-C also reaches the DataLoader's worker processes, which the loop still needs
        if child or (interrupt and self._pressed):
            signal.signal(number, self._before.pop(number))
            signal.raise_signal(number)
            return
        self._pressed |= interrupt
        if self.signal is None and _CHILD_ENDED is not None and callable(signal.getsignal(_CHILD_ENDED)):
            self._before[_CHILD_ENDED] = signal.signal(_CHILD_ENDED, signal.SIG_DFL)
        self.signal = self.signal or signal.Signals(number).name


def _names(signals: Iterable[str]) -> list[str]:
    if isinstance(signals, str) or not isinstance(signals, Iterable):
        raise TypeError(f"signals must be a list of names such as ['SIGTERM'], but {shown(signals)} was given")
    return list(signals)


def _number(name: str) -> int:
    """Returns the number of a signal that a process can handle."""
    # Windows has few signals, and lists others that can only be sent (CTRL_C_EVENT).
    supported = {each.name for each in signal.Signals if each.name.startswith("SIG")} - {"SIGKILL", "SIGSTOP"}
    if not isinstance(name, str) or name not in supported:
        examples = [each for each in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGBREAK") if each in supported]
        raise ValueError(f"{shown(name)} is not a signal that can be handled, such as {', '.join(map(repr, examples))}")
    return int(signal.Signals[name])
