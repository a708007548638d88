"""Writes measured steps as a trace: JSON for ``chrome://tracing`` and https://ui.perfetto.dev."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.atomic import atomic_path
from ..step.origins import FUSED, with_parents
from .timing import MeasuredStep, Operation, TimedRun

_PROCESS = 1
_MAIN = 1


def write_trace(path: Path, steps: Sequence[MeasuredStep]) -> None:
    """Writes a trace of steps, which contain runs of the graph, which contain modules, which contain operators.

    Args:
        path: The file.
        steps: The steps, whose runs have been collected.

    Raises:
        OSError: If the file can't be written.
    """
    events = list(_events(steps))
    first = min(event["ts"] for event in events)
    for event in events:
        event["ts"] = (event["ts"] - first) / 1000  # the format has microseconds
        event["dur"] /= 1000
    names = [("process_name", 0, "ort_trainer"), ("thread_name", _MAIN, "train_step")]
    named: list[dict[str, Any]] = [
        {"name": kind, "ph": "M", "pid": _PROCESS, "tid": track, "args": {"name": name}} for kind, track, name in names
    ]
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps({"traceEvents": named + events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _event(name: str, category: str, start: int, end: int, track: int = _MAIN, **arguments: str) -> dict[str, Any]:
    place = {"pid": _PROCESS, "tid": track}
    return {"name": name, "cat": category, "ph": "X", "ts": start, "dur": end - start, **place, "args": arguments}


def _events(steps: Sequence[MeasuredStep]) -> Iterator[dict[str, Any]]:
    """Yields the events with their times in nanoseconds, outer events before inner ones."""
    for number, step in enumerate(steps, start=1):
        yield _event(f"train_step {number}", "step", step.start, step.end)
        for start, end in step.set_up:
            yield _event("set-up of the measurement, not counted", "set-up", start, end)
        for run in step.runs:
            yield _event("forward and backward pass", "run", run.start, run.end)
            yield from _run_events(run)
        for start, end in step.updates:
            yield _event("optimizer update", "update", start, end)


def _run_events(run: TimedRun) -> Iterator[dict[str, Any]]:
    """Yields the modules and the operators of a run."""
    calls = sorted((each for each in run.operations if not each.is_part), key=lambda operation: operation.start)
    tracks: dict[int, int] = {0: _MAIN}
    for operation in calls:
        # The session's threads in order of first use; the first is the caller's.
        tracks.setdefault(operation.thread, _MAIN if len(tracks) == 1 else len(tracks))
    yield from _module_events([operation for operation in calls if tracks[operation.thread] == _MAIN])
    for operation in calls:
        scopes = _scopes(operation)
        place = {"module": operation.module or "", "pass": scopes[0]} if scopes else {}
        end = operation.start + operation.duration
        yield _event(operation.name, "operator", operation.start, end, tracks[operation.thread], **place)


def _module_events(calls: Sequence[Operation]) -> Iterator[dict[str, Any]]:
    """Yields the passes and the modules, outermost first; consecutive operators of one make one event of it."""
    scopes = [_scopes(operation) for operation in calls]
    for depth in range(1, max(map(len, scopes), default=0) + 1):
        for scope, group in itertools.groupby(range(len(calls)), key=lambda at: scopes[at][:depth]):
            if len(scope) == depth:
                inside = [calls[at] for at in group]
                yield _event(scope[-1], "module", inside[0].start, inside[-1].start + inside[-1].duration)


def _scopes(operation: Operation) -> list[str]:
    """Returns the scopes around an operator, outermost first: the pass, and the paths of the modules."""
    if operation.module is None or operation.module == FUSED:
        return []
    paths = [path for path in with_parents(operation.module) if path]
    return ["backward" if operation.backward else "forward", *reversed(paths)]
