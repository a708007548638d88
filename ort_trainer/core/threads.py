"""Objects that several threads may call: in turns, or one thread at a time."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from threading import get_ident
from typing import Any

from .errors import PACKAGE

_LOCKS: weakref.WeakSet[Any] = weakref.WeakSet()
_REPLACING = threading.Lock()


def turns() -> Any:
    """Returns a reentrant lock for threads that take turns, which is free in a forked child.

    Reentrant, because a signal handler may call the object that the lock protects.
    """
    lock = threading.RLock()
    _LOCKS.add(lock)
    return lock


def _free_in_child() -> None:
    """Frees the locks held by threads of the parent, which the child does not have."""
    for lock in _LOCKS:
        if lock.acquire(blocking=False):
            lock.release()
        else:
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_free_in_child)


class OneThread:
    """Refuses a call while another thread is in one; calls within a call of the same thread are fine.

    Args:
        what: What is called, for the message.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._inside: dict[str, int] = {}

    def enter(self) -> bool:
        """Begins a call; returns whether it is the outermost one of this thread, which has to :meth:`leave`.

        Takes a tenth of a microsecond.

        Raises:
            RuntimeError: If another thread is in a call.
        """
        thread, inside = get_ident(), self._inside
        if inside.get("thread") == thread:
            return False
        if inside.setdefault("thread", thread) != thread:
            self._replace(thread)
        return True

    def leave(self) -> None:
        """Ends the outermost call."""
        self._inside.pop("thread", None)

    def _replace(self, thread: int) -> None:
        """Takes over from a thread that never left: it was interrupted before it could, or the process was forked.

        Raises:
            RuntimeError: If that thread is still in a call.
        """
        with _REPLACING:
            other = self._inside.setdefault("thread", thread)
            # A thread with this package on its stack is still in a call.
            frame = sys._current_frames().get(other)
            while other != thread and frame is not None:
                if frame.f_code.co_filename.startswith(PACKAGE):
                    names = [running.name for running in threading.enumerate() if running.ident == other]
                    raise RuntimeError(
                        f"{self._what} is in use by another thread, {', '.join(map(repr, names)) or other}: only one "
                        "thread at a time may call it. Nothing has changed. Let the threads wait for each other, with "
                        "a threading.Lock of yours, or give each its own"
                    )
                frame = frame.f_back
            self._inside["thread"] = thread
