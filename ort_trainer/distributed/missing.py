"""Finds out which processes are missing when a collective operation has failed, from notes in the rendezvous store.

The process that holds the store (rank 0, or the launcher) may be gone or hang too, and a store that hangs ignores its
time limits. So every request runs in another thread, which is abandoned after a while.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")
# Seconds to wait for the store's answer.
_PATIENCE = 3.0


class Notes:
    """Notes of the processes of one group.

    Args:
        group: The group.
        prefix: The prefix of the keys, which must differ from that of notes left in the store before a restart.

    Attributes:
        rank, size: The rank in the group, and its size.
        lost: Whether the store does not answer.
    """

    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self._store = dist.PrefixStore(prefix, group.get_group_store())  # type: ignore[attr-defined]
        self.rank, self.size = group.rank(), group.size()
        self.lost = False

    def leave(self, kind: str, note: Mapping[str, Any]) -> None:
        """Leaves a note of this process; replaces an earlier one of the same kind."""
        self._ask(lambda: self._store.set(f"{kind}/{self.rank}", json.dumps(note)), None)

    def end(self) -> None:
        """Records that this process has given up, so that no other waits for it."""
        self._ask(lambda: self._store.set("end", ""), None)

    def ended(self) -> bool:
        """Returns whether any process has given up."""
        return self._ask(lambda: bool(self._store.check(["end"])), False)

    def read(self, kind: str) -> dict[int, dict[str, Any]]:
        """Returns the notes of a kind, by rank."""

        def notes() -> dict[int, dict[str, Any]]:
            keys = {rank: f"{kind}/{rank}" for rank in range(self.size)}
            return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

        return self._ask(notes, {})

    def _ask(self, call: Callable[[], Result], otherwise: Result) -> Result:
        """Returns the result of a call to the store; ``otherwise`` if the store does not answer."""
        answers: list[Result] = []

        def ask() -> None:
            try:
                answers.append(call())
            except RuntimeError:  # the connection is broken
                self.lost = True

        if not self.lost:
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            thread.join(_PATIENCE)
            self.lost = self.lost or thread.is_alive()
        return answers[0] if answers else otherwise


# The usual remedy when processes do not meet.
ADVICE = (
    "All processes must call the same methods in the same order; if their numbers of batches differ, in trainer.join()"
)

# Seconds that rank 0, which may hold the store, waits for the others to read the notes.
_STAY = 2.0
# Seconds by which the clocks of machines may differ.
_SKEW = 0.5


def find_missing(notes: Notes, what: str, seconds: float, patience: float, error: str) -> str:
    """Returns why an operation failed, for a message.

    Each process in which it failed leaves a note; processes without one are missing.

    Args:
        notes: The notes of the processes.
        what: What this process waited for.
        seconds: How long this process waited.
        patience: Seconds for the others to leave their notes.
        error: PyTorch's error message.
    """
    notes.leave("waited", {"for": what, "from": time.time() - seconds, "to": time.time()})
    notes.end()
    end = time.monotonic() + patience
    while True:
        waited, raised = notes.read("waited"), notes.read("raised")
        raised = {rank: note for rank, note in raised.items() if note and rank not in waited}
        if notes.lost or len(waited) + len(raised) == notes.size or time.monotonic() > end:
            break
        time.sleep(0.05)
    if notes.lost:
        return (
            "the rendezvous store does not answer either, so rank 0 or the launcher has ended or hangs: see its "
            f"output. {ADVICE}"
        )
    notes.leave("seen", {})
    stay(notes, waited)
    return _reason(notes, waited, raised, error)


def stay(notes: Notes, readers: Collection[int]) -> None:
    """Keeps rank 0 alive until other ranks have read the notes, which may end with its process."""
    end = time.monotonic() + _STAY
    while notes.rank == 0 and time.monotonic() < end and not set(readers) <= set(notes.read("seen")):
        time.sleep(0.05)


def _reason(
    notes: Notes, waited: Mapping[int, Mapping[str, Any]], raised: Mapping[int, Mapping[str, Any]], error: str
) -> str:
    """Returns what the notes of all processes say: who raised, came too late, left no note, or did something else."""
    given_up = min(note["to"] for note in waited.values())
    late = {rank: note["from"] - given_up for rank, note in waited.items() if note["from"] - given_up > _SKEW}
    if notes.rank in late:
        return f"it arrived {late[notes.rank]:.1f} s after the others had given up"
    silent = [rank for rank in range(notes.size) if rank not in waited and rank not in raised]
    parts = [f"rank {rank} raised {note['error']}" for rank, note in sorted(raised.items())]
    parts += [f"rank {rank} arrived {delay:.1f} s too late" for rank, delay in sorted(late.items())]
    if silent:
        ranks = f"rank {silent[0]} has" if len(silent) == 1 else f"ranks {silent} have"
        parts.append(f"{ranks} ended, or hangs, or does something else: see its output. {ADVICE}")
    if not parts and len({note["for"] for note in waited.values()}) > 1:
        does = ", ".join(f"rank {rank} waited for {note['for']}" for rank, note in sorted(waited.items()))
        parts.append(f"the processes do different things at the same time: {does}. {ADVICE}")
    return "; ".join(parts) or f"no rank is missing, but PyTorch reports: {error}"
