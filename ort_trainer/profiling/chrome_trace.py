"""Writes measured steps as a trace: JSON for ``chrome://tracing`` and https://ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core.atomic import atomic_path
from ..step.origins import Origin, parent_of
from .figures import GraphOrigins, MeasuredStep
from .timing import TimedRun

_PROCESS = 1
_MAIN = 1


def write_trace(path: Path, steps: Sequence[MeasuredStep], origins: GraphOrigins) -> None:
    """Writes a trace of steps, which contain runs of the graph, which contain modules, which contain operators.

    Args:
        path: The file.
        steps: The steps, whose runs have been collected.
        origins: Origins of their graphs.

    Raises:
        OSError: If the file can't be written.
    """
    events = list(_events(steps, origins))
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


def _event(
    name: str, category: str, start: int, end: int, track: int = _MAIN, arguments: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start,
        "dur": end - start,
        "pid": _PROCESS,
        "tid": track,
        "args": arguments or {},
    }


def _events(steps: Sequence[MeasuredStep], origins: GraphOrigins) -> Iterator[dict[str, Any]]:
    """Yields the events with their times in nanoseconds, outer events before inner ones."""
    for number, step in enumerate(steps, start=1):
        yield _event(f"train_step {number}", "step", step.start, step.end)
        for start, end in step.set_up:
            yield _event("set-up of the measurement, not counted", "set-up", start, end)
        for run in step.runs:
            yield _event("forward and backward pass", "run", run.start, run.end)
            yield from _run_events(run, origins)
        for start, end in step.updates:
            yield _event("optimizer update", "update", start, end)


def _run_events(run: TimedRun, origins: GraphOrigins) -> Iterator[dict[str, Any]]:
    """Yields the modules and the operators of a run; consecutive operators of a module make one event of it."""
    graph_origins = origins.of(run.graph)
    tracks: dict[int, int] = {0: _MAIN}
    around: list[dict[str, Any]] = []
    calls = [operation for operation in run.operations if not operation.is_part]
    for operation in sorted(calls, key=lambda operation: operation.start):
        # The session's threads in order of first use; the first is the caller's.
        track = tracks.setdefault(operation.thread, _MAIN if len(tracks) == 1 else len(tracks))
        end = operation.start + operation.duration
        place = graph_origins.place(operation.node, operation.step) if operation.node else None
        if track == _MAIN:
            yield from _enter(around, _scopes(place), operation.start)
            for event in around:
                event["dur"] = end - event["ts"]
        arguments = {} if place is None else {"module": place.module, "pass": _pass(place)}
        yield _event(operation.name, "operator", operation.start, end, track, arguments)


def _pass(place: Origin) -> str:
    return "backward" if place.backward else "forward"


def _scopes(place: Origin | None) -> list[str]:
    """Returns the scopes around a place, outermost first: the pass, and the paths of the modules."""
    if place is None:
        return []
    paths = [place.module]
    while (above := parent_of(paths[-1])) is not None:
        paths.append(above)
    return [_pass(place), *filter(None, reversed(paths))]


def _enter(around: list[dict[str, Any]], scopes: Sequence[str], start: int) -> Iterator[dict[str, Any]]:
    """Leaves and enters scopes for the next operator; yields the events of those that it enters.

    Args:
        around: Events of the current scopes, outermost first; the list is changed here, and the caller extends the
            events' durations.
        scopes: The scopes of the next operator.
        start: When it starts.
    """
    shared = 0
    while shared < min(len(around), len(scopes)) and around[shared]["name"] == scopes[shared]:
        shared += 1
    del around[shared:]
    for name in scopes[shared:]:
        around.append(_event(name, "module", start, start))
        yield around[-1]
