"""Finds out which processes are missing when a collective operation has failed."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from .notes import Notes

__all__ = ["ADVICE", "find_missing"]

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
    _stay(notes, waited)
    return _reason(notes, waited, raised, error)


def _stay(notes: Notes, waited: Collection[int]) -> None:
    """Keeps rank 0 alive until the others have read the notes, which may be lost with it."""
    end = time.monotonic() + _STAY
    while notes.rank == 0 and time.monotonic() < end and not set(waited) <= set(notes.read("seen")):
        time.sleep(0.05)


def _reason(
    notes: Notes, waited: Mapping[int, Mapping[str, Any]], raised: Mapping[int, Mapping[str, Any]], error: str
) -> str:
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
