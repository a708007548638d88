"""Finds out which processes are missing when an operation of all has failed."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from .notes import Notes

__all__ = ["ADVICE", "find_missing"]

# The usual reasons why processes do not meet.
ADVICE = (
    "All processes must call the same methods, in the same order; where they have different numbers of batches, in "
    "trainer.join()"
)

# Seconds that the process of rank 0, which may hold the store, stays for the others to read their notes.
_STAY = 2.0
# Seconds by which clocks of machines may differ.
_SKEW = 0.5


def find_missing(notes: Notes, what: str, seconds: float, patience: float, error: str) -> str:
    """Returns why an operation has failed, for a message.

    Each process in which it has failed leaves a note; those that leave none are missing.

    Args:
        notes: The notes of the processes.
        what: For what this process has waited.
        seconds: How long this process has waited.
        patience: Seconds for the others to leave their notes.
        error: What PyTorch says.
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
            "the store by which the processes found each other does not answer either, so rank 0, or the "
            f"launcher, has ended or hangs: see its output. {ADVICE}"
        )
    notes.leave("seen", {})
    _stay(notes, waited)
    return _reason(notes, waited, raised, error)


def _stay(notes: Notes, waited: Collection[int]) -> None:
    """Keeps the process of rank 0, with which the notes may go, until the others have read them."""
    end = time.monotonic() + _STAY
    while notes.rank == 0 and time.monotonic() < end and not set(waited) <= set(notes.read("seen")):
        time.sleep(0.05)


def _reason(
    notes: Notes, waited: Mapping[int, Mapping[str, Any]], raised: Mapping[int, Mapping[str, Any]], error: str
) -> str:
    given_up = min(note["to"] for note in waited.values())
    late = {rank: note["from"] - given_up for rank, note in waited.items() if note["from"] - given_up > _SKEW}
    if notes.rank in late:
        return f"it came {late[notes.rank]:.1f} s after the others had given up"
    silent = [rank for rank in range(notes.size) if rank not in waited and rank not in raised]
    parts = [f"rank {rank} raised {note['error']}" for rank, note in sorted(raised.items())]
    parts += [f"rank {rank} came {delay:.1f} s too late" for rank, delay in sorted(late.items())]
    if silent:
        ranks = f"rank {silent[0]} has" if len(silent) == 1 else f"ranks {silent} have"
        parts.append(f"{ranks} ended, or hangs, or does something else: see the output of that process. {ADVICE}")
    if not parts and len({note["for"] for note in waited.values()}) > 1:
        does = ", ".join(f"rank {rank} waited for {note['for']}" for rank, note in sorted(waited.items()))
        parts.append(f"the processes do different things at the same time: {does}. {ADVICE}")
    return "; ".join(parts) or f"no rank is missing, but PyTorch says: {error}"
