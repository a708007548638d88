"""Measures runs of training graphs, operator by operator.

A graph of programs is compiled again, to a function that reads the clock after each step. A graph of ONNX Runtime's
kernels runs in a second session with ONNX Runtime's own profiler, which can't be enabled for an existing session. Both
compute the same results as without measuring, bit for bit.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch

from ..engine.ort import profiling
from ..engine.programs.compiler import LoadedCall
from ..engine.programs.program import GETITEM
from ..engine.programs.runner import ProgramRunner
from ..engine.runner import GraphRunner, Plan, SessionRunner
from ..step import RandomInput, Step
from ..step.origins import FUSED, Origins

if TYPE_CHECKING:
    from ..engine.ort import RunOptions

# Events of ONNX Runtime's profiler: the suffix of those of kernels, and the name of those of runs.
_KERNEL = "_kernel_time"
_RUN = "model_run"


@dataclass(frozen=True)
class Operation:
    """One call of one operator. Times are nanoseconds of ``time.perf_counter_ns``.

    Attributes:
        name: PyTorch's or ONNX's name of the operator.
        start: When it started.
        duration: How long it took.
        module: Path of the module that it belongs to, or ``FUSED``; None for work outside the graph, and in graphs
            that know no modules.
        backward: Whether it belongs to the backward pass.
        is_part: Whether it is part of another call of the same operator and not counted as a call.
        thread: The operating system's number of its thread; 0 for the caller's.
    """

    name: str
    start: int
    duration: int
    module: str | None = None
    backward: bool = False
    is_part: bool = False
    thread: int = 0


@dataclass
class TimedRun:
    """One run of a graph.

    Attributes:
        graph: The graph.
        start: When it started, in nanoseconds.
        end: When it ended.
        marks: The times that a graph of programs reads: at the start of each program, and after each step.
        operations: Its operations; available after :meth:`Timing.collect`.
        is_complete: Whether all operations are known: ONNX Runtime's profiler records at most a million events.
    """

    graph: Step
    start: int
    end: int = 0
    marks: list[int] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    is_complete: bool = False


@dataclass
class MeasuredStep:
    """One training step. Times are nanoseconds of ``time.perf_counter_ns``.

    Attributes:
        start: When the step started.
        end: When it ended.
        runs: Its graph runs.
        updates: Start and end of its weight updates.
        set_up: Start and end of one-time work in it.
    """

    start: int
    end: int = 0
    runs: list[TimedRun] = field(default_factory=list)
    updates: list[tuple[int, int]] = field(default_factory=list)
    set_up: list[tuple[int, int]] = field(default_factory=list)

    @property
    def duration(self) -> int:
        """Duration of the step without one-time work."""
        return self.end - self.start - sum(end - start for start, end in self.set_up)


class Timing:
    """Runs graphs and records their times.

    Attributes:
        step: The current step, which gets the runs and the work that only measuring causes.
        folder: A folder for files of ONNX Runtime's profiler, which :meth:`collect` removes.
        modules: Path and class name of the modules in the graphs; available after :meth:`collect`.
    """

    def __init__(self) -> None:
        self.step = MeasuredStep(0)
        self.modules: dict[str, str] = {}
        self._runners: dict[GraphRunner, _TimedRunner] = {}
        self._plans: dict[int, tuple[Plan, Plan]] = {}
        self.folder = tempfile.mkdtemp(prefix="ort_trainer_profile_")
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def plan(self, plan: Plan) -> Plan:
        """Returns a plan for the same run that records its times here.

        If it is measured for the first time, all of the step until now is set-up, because the plan may be new.
        """
        if id(plan) not in self._plans:
            timed = self._runners.get(plan.runner)
            if timed is None:
                timed = self._runners[plan.runner] = _TIMED[type(plan.runner)](plan.runner, self)
            self._plans[id(plan)] = (
                plan,
                dataclasses.replace(plan, runner=timed, bindings={}, function=timed.function(plan)),
            )
            self.step.set_up.append((self.step.start, perf_counter_ns()))
        return self._plans[id(plan)][1]

    def collect(self) -> None:
        """Fills in the operations of all runs; afterwards no run can be measured."""
        for runner in self._runners.values():
            runner.collect(origins := Origins.from_text(runner.step.origins))
            self.modules.update(origins.modules)
        self._remove()


class _TimedRunner(GraphRunner):
    """A second runner of a graph, on the same tensors."""

    def __init__(self, runner: GraphRunner, timing: Timing) -> None:
        vars(self).update(vars(runner))
        self._timing = timing
        self._current: TimedRun
        self._runs: list[TimedRun] = []
        self._draw = self._timed_draw

    def run(
        self, plan: Plan, batch: Mapping[str, torch.Tensor], **arguments: Any
    ) -> tuple[dict[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        """Runs the graph once; see the base class."""
        run = self._current = TimedRun(self.step, perf_counter_ns())
        results = super().run(plan, batch, **arguments)  # type: ignore[safe-super] # it is a mixin
        run.end = perf_counter_ns()
        self._runs.append(run)
        self._timing.step.runs.append(run)
        return results

    def _timed_draw(
        self, wanted: Sequence[tuple[RandomInput, tuple[int, ...]]], generator: torch.Generator | None
    ) -> list[torch.Tensor]:
        """Draws the random numbers of a run, and records how long that takes."""
        start = perf_counter_ns()
        drawn = self._memory.draw(wanted, generator)
        self._current.operations.append(Operation("random numbers", start, perf_counter_ns() - start))
        return drawn

    def function(self, plan: Plan) -> Callable[..., Any] | None:
        """Returns the function of a measured plan."""
        return plan.function

    def collect(self, origins: Origins) -> None:
        """Fills in the operations of the runs; ``origins`` are those of the graph."""
        raise NotImplementedError


def _place(origins: Origins, node: str, step: int = 0) -> tuple[str | None, bool]:
    """Returns the module of an operation, and whether it belongs to the backward pass."""
    if not origins.modules:
        return None, False
    place = origins.place(node, step)
    return (FUSED, False) if place is None else (place.module, place.backward)


class _TimedPrograms(_TimedRunner, ProgramRunner):
    """Runs a graph of programs."""

    def function(self, plan: Plan) -> Callable[..., Any]:
        """Returns the function of a measured plan."""
        timed = self.compiled(plan.results, timed=True)
        return lambda values: timed(values, self._current.marks.append)

    def collect(self, origins: Origins) -> None:
        """Fills in the operations of the runs."""
        for run in self._runs:
            times = iter(run.marks)
            for call in self.calls:
                run.operations += _operations(call, times, origins)
            run.is_complete = True


def _operations(call: LoadedCall, marks: Iterator[int], origins: Origins) -> Iterator[Operation]:
    """Yields the operations of a call of a program, from the times at its start and after each step."""
    names: list[str] = []
    start = next(marks)
    for step, (target, args, _) in enumerate(call.program.steps):
        is_part = target == GETITEM
        names.append(names[args[0]["v"]] if is_part else target.rpartition(".")[0])
        end = next(marks)
        yield Operation(names[step], start, end - start, *_place(origins, call.name, step), is_part)
        start = end
    for step, _ in call.program.results:
        # Values between programs must be contiguous; most of them already are.
        end = next(marks)
        yield Operation("aten.contiguous", start, end - start, *_place(origins, call.name, step))
        start = end


class _TimedSession(_TimedRunner, SessionRunner):
    """Runs a graph of ONNX Runtime's kernels, in its own session."""

    def __init__(self, runner: GraphRunner, timing: Timing) -> None:
        super().__init__(runner, timing)
        options, _ = self._settings
        assert options is not None
        with profiling(options, str(Path(timing.folder) / f"{id(self)}")):
            self.inference_session = self._load()
        self._launches: list[tuple[int, TimedRun | None]] = []
        self._is_new = True

    def run(
        self, plan: Plan, batch: Mapping[str, torch.Tensor], **arguments: Any
    ) -> tuple[dict[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        """Runs the graph once; see the base class."""
        self._is_new = not plan.bindings
        return super().run(plan, batch, **arguments)

    def _launch(self, binding: Any, options: RunOptions | None) -> None:
        if self._is_new:
            # The first run of a session requests its memory from the system, so it is repeated for the measurement.
            start = perf_counter_ns()
            self._launches.append((start, None))
            super()._launch(binding, options)
            self._timing.step.set_up.append((start, perf_counter_ns()))
        self._launches.append((perf_counter_ns(), self._current))
        super()._launch(binding, options)

    def collect(self, origins: Origins) -> None:
        """Fills in the operations of the runs from the profiler's file."""
        path = Path(self.inference_session.end_profiling())
        with contextlib.suppress(FileNotFoundError):  # nothing was recorded
            self._fill(json.loads(path.read_bytes()), origins)

    def _fill(self, events: list[dict[str, Any]], origins: Origins) -> None:
        """Fills in the operations of the runs from ONNX Runtime's events, whose times are microseconds."""
        runs = [event for event in events if event["name"] == _RUN]
        starts = [event["ts"] for event in runs]
        nodes: list[list[dict[str, Any]]] = [[] for _ in runs]
        for event in events:
            index = bisect.bisect_right(starts, event.get("ts", 0)) - 1
            # The profiler's limit may cut off the last run: its first kernels are recorded, but not the run itself.
            if event["name"].endswith(_KERNEL) and index >= 0 and event["ts"] <= starts[index] + runs[index]["dur"]:
                nodes[index].append(event)
        # A failed run has an event, too.
        for (start, run), event, inside in zip(self._launches, runs, nodes, strict=False):
            if run is not None:
                run.is_complete = True
                run.operations += [
                    Operation(
                        str(node["args"]["op_name"]),
                        start + (node["ts"] - event["ts"]) * 1000,
                        duration * 1000,
                        *_place(origins, node["name"].removesuffix(_KERNEL)),
                        thread=node["tid"],
                    )
                    for node, duration in _own_times(inside)
                ]


_TIMED: Mapping[type[GraphRunner], type[_TimedRunner]] = {
    ProgramRunner: _TimedPrograms,
    SessionRunner: _TimedSession,
}


def _own_times(events: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields events with their durations, excluding those of nested events: an If or a Loop runs graphs."""
    durations = {id(event): event["dur"] for event in events}
    around: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while around and event["ts"] + event["dur"] > around[-1]["ts"] + around[-1]["dur"]:
            around.pop()
        if around:
            durations[id(around[-1])] -= event["dur"]
        if event["args"]["op_name"] in ("If", "Loop", "Scan"):
            around.append(event)
    for event in events:
        yield event, max(durations[id(event)], 0)
