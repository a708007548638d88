"""Times runs of training graphs, operator by operator.

A graph of programs is run by the same session; its programs have a second form that reads the clock behind each step.
A graph of ONNX Runtime's kernels is run by a second session, which ONNX Runtime's own profiler watches: a session that
was made without it can't be watched later. Both compute what is computed without them, bit for bit.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import json
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch

from ..graph import TrainingGraph
from .aten.bridge import Call, execute, prepare_timed
from .aten.program import GETITEM, Program
from .aten.runner import KernelRunner
from .engine import profiling
from .runner import GraphRunner, Plan

__all__ = ["Operation", "TimedRun", "Timing"]

_KERNEL = "_kernel_time"
_RUN = "model_run"


@dataclass(frozen=True)
class Operation:
    """One call of one operator. Times are nanoseconds of ``time.perf_counter_ns``.

    Attributes:
        name: The operator, as PyTorch or ONNX calls it.
        start: When it began.
        duration: How long it took.
        node: Name of the graph's node that it belongs to; empty for what is done beside the graph.
        step: Which step of the node's program it is.
        is_part: Whether it belongs to another call of the operator that its name says, so that it does not count.
        thread: The thread that it ran on, as a number of the operating system; 0 for the caller's.
    """

    name: str
    start: int
    duration: int
    node: str = ""
    step: int = 0
    is_part: bool = False
    thread: int = 0


@dataclass
class TimedRun:
    """One run of a graph.

    Attributes:
        graph: The graph.
        start: When it began, in nanoseconds.
        end: When it ended.
        operations: What was done in it; known after :meth:`Timing.collect`.
        is_complete: Whether all of it is known: ONNX Runtime's profiler remembers a million events.
    """

    graph: TrainingGraph
    start: int
    end: int = 0
    operations: list[Operation] = field(default_factory=list)
    is_complete: bool = False


class Timing:
    """Runs graphs in a way that leaves their times.

    Attributes:
        runs: The runs that came to their end, in order. Whoever takes them out empties the list.
        set_up: Begin and end of what runs took only because they are timed, in nanoseconds; likewise.
    """

    def __init__(self) -> None:
        self.runs: list[TimedRun] = []
        self.set_up: list[tuple[int, int]] = []
        self._runners: dict[GraphRunner, _TimedRunner] = {}
        self._plans: dict[int, tuple[Plan, Plan]] = {}
        self._folder = tempfile.mkdtemp(prefix="ort_trainer_profile_")
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def plan(self, plan: Plan, since: int) -> Plan:
        """Returns a plan for the same run whose times are left here.

        Args:
            plan: From ``StepSession.plan``.
            since: When the caller began to look for the plan. Where it has not been timed before, everything since then
                is set-up: it may have been made just now.
        """
        if id(plan) not in self._plans:
            timed = self._runners.get(plan.runner)
            if timed is None:
                kind = _TimedKernels if isinstance(plan.runner, KernelRunner) else _TimedSession
                timed = self._runners[plan.runner] = kind(plan.runner, self, self._folder)
            self._plans[id(plan)] = plan, dataclasses.replace(plan, runner=timed, bindings={})
            self.set_up.append((since, perf_counter_ns()))
        return self._plans[id(plan)][1]

    def collect(self) -> None:
        """Fills in the operations of all runs; no run can be timed after it."""
        for runner in self._runners.values():
            runner.collect()
        self._remove()


class _TimedRunner(GraphRunner):
    """A second runner of a graph, on the same tensors."""

    def __init__(self, runner: GraphRunner, timing: Timing, folder: str) -> None:
        vars(self).update(vars(runner))
        self._timing = timing
        self._folder = folder
        self._current: TimedRun

    def run(
        self, plan: Plan, batch: Mapping[str, torch.Tensor], **given: Any
    ) -> tuple[dict[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        """Runs the graph once; see the base class."""
        run = self._current = TimedRun(self.graph, perf_counter_ns())
        found = super().run(plan, batch, **given)
        run.end = perf_counter_ns()
        self._timing.runs.append(run)
        return found

    def _draw(self, plan: Plan, generator: torch.Generator | None) -> list[torch.Tensor]:
        start = perf_counter_ns()
        drawn = super()._draw(plan, generator)
        if drawn:
            self._current.operations.append(Operation("random numbers", start, perf_counter_ns() - start))
        return drawn

    def collect(self) -> None:
        """Fills in the operations of the runs."""
        raise NotImplementedError


class _TimedKernels(_TimedRunner, KernelRunner):
    """Runs a graph of programs."""

    def __init__(self, runner: GraphRunner, timing: Timing, folder: str) -> None:
        super().__init__(runner, timing, folder)
        self._programs = {key: Program.from_text(text) for key, text in self.graph.programs.items()}
        prepare_timed(self._programs)
        self._calls: list[tuple[TimedRun, list[Call]]] = []

    def _execute(self, feeds: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        calls: list[Call] = []
        found = execute(self._session, feeds, self.graph.loss, calls)
        self._calls.append((self._current, calls))
        return found

    def collect(self) -> None:
        """Fills in the operations of the runs."""
        for run, calls in self._calls:
            for node, key, marks in calls:
                run.operations += _operations(self._programs[key], node, marks)
            run.is_complete = True


def _operations(program: Program, node: str, marks: list[int]) -> Iterator[Operation]:
    names: list[str] = []
    for step, (target, args, _) in enumerate(program.steps):
        is_part = target == GETITEM
        names.append(names[args[0]["v"]] if is_part else target.rpartition(".")[0])
        yield Operation(names[step], marks[step], marks[step + 1] - marks[step], node, step, is_part)
    for (step, _), start, end in zip(program.results, marks[len(names) :], marks[len(names) + 1 :], strict=False):
        # What goes from one program to the next lies in memory without gaps; mostly it does so already.
        yield Operation("aten.contiguous", start, end - start, node, step)


class _TimedSession(_TimedRunner):
    """Runs a graph of ONNX Runtime's kernels, in a session of its own."""

    def __init__(self, runner: GraphRunner, timing: Timing, folder: str) -> None:
        super().__init__(runner, timing, folder)
        with profiling(self._settings[1], str(Path(folder) / f"{id(self)}")):
            self.inference_session = self._load()
        self._launches: list[tuple[int, TimedRun | None]] = []
        self._is_new = True

    def run(
        self, plan: Plan, batch: Mapping[str, torch.Tensor], **given: Any
    ) -> tuple[dict[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        """Runs the graph once; see the base class."""
        self._is_new = not plan.bindings
        return super().run(plan, batch, **given)

    def _launch(self, binding: Any) -> None:
        if self._is_new:
            # The first run of a session gets its memory from the system. What it computes is computed again.
            start = perf_counter_ns()
            self._launches.append((start, None))
            super()._launch(binding)
            self._timing.set_up.append((start, perf_counter_ns()))
        self._launches.append((perf_counter_ns(), self._current))
        super()._launch(binding)

    def collect(self) -> None:
        """Fills in the operations of the runs, from the file that the profiler writes."""
        path = Path(self.inference_session.end_profiling())
        with contextlib.suppress(FileNotFoundError):  # nothing was noted
            events = json.loads(path.read_text())
            self._fill(events)

    def _fill(self, events: list[dict[str, Any]]) -> None:
        runs = [event for event in events if event["name"] == _RUN]
        starts = [event["ts"] for event in runs]
        nodes: list[list[dict[str, Any]]] = [[] for _ in runs]
        for event in events:
            index = bisect.bisect_right(starts, event.get("ts", 0)) - 1
            # Behind the last run there may be the beginning of one whose end the profiler has no room for.
            if event["name"].endswith(_KERNEL) and index >= 0 and event["ts"] <= starts[index] + runs[index]["dur"]:
                nodes[index].append(event)
        # One that failed has its event as well.
        for (start, run), event, inside in zip(self._launches, runs, nodes, strict=False):
            if run is not None:
                run.is_complete = True
                run.operations += [
                    Operation(
                        str(node["args"]["op_name"]),
                        start + (node["ts"] - event["ts"]) * 1000,
                        duration * 1000,
                        node["name"].removesuffix(_KERNEL),
                        thread=node["tid"],
                    )
                    for node, duration in _own_times(inside)
                ]


def _own_times(events: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields events with their durations, without those of events within: an If or a Loop runs graphs."""
    own = {id(event): event["dur"] for event in events}
    around: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while around and event["ts"] + event["dur"] > around[-1]["ts"] + around[-1]["dur"]:
            around.pop()
        if around:
            own[id(around[-1])] -= event["dur"]
        if event["args"]["op_name"] in ("If", "Loop", "Scan"):
            around.append(event)
    for event in events:
        yield event, max(own[id(event)], 0)
