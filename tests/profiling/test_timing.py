"""How events of ONNX Runtime's profiler become operations; the tests of profiles cover the rest of timing."""

from __future__ import annotations

from typing import Any

from ort_trainer.profiling import timing
from ort_trainer.profiling.timing import TimedRun
from ort_trainer.step.origins import Origin, Origins


def event(name: str, ts: int, dur: int, operator: str = "") -> dict[str, Any]:
    return {"name": name, "ts": ts, "dur": dur, "tid": 7, "args": {"op_name": operator}}


def node(operator: str, ts: int, dur: int) -> dict[str, Any]:
    return event(f"{operator}_1_kernel_time", ts, dur, operator)


def session(launches: list[tuple[int, TimedRun | None]]) -> Any:
    made = object.__new__(timing._TimedSession)
    made._launches = launches
    return made


def test_events_go_to_their_runs() -> None:
    """The second launch failed or was a warm-up; the profiler has lost the end of the last one."""
    runs = [TimedRun(None, 0) for _ in range(3)]
    events = [event("session_initialization", 1, 50)]
    events += [node("Add", 102, 3), event("Add_1_fence_before", 102, 1), event("model_run", 100, 10)]
    events += [node("Mul", 201, 3), event("model_run", 200, 10)]
    events += [node("Sub", 304, 2), node("Exp", 306, 1), event("model_run", 300, 10), node("Div", 400, 1)]
    origins = Origins.of({"Add_1": [Origin("layer", True)]}, [("", "Model"), ("layer", "Linear")])
    session([(5_000_000, runs[0]), (6_000_000, None), (7_000_000, runs[1]), (8_000_000, runs[2])])._fill(
        events, origins
    )
    assert [[operation.name for operation in run.operations] for run in runs[:2]] == [["Add"], ["Sub", "Exp"]]
    assert [run.is_complete for run in runs] == [True, True, False]
    (add,) = runs[0].operations
    assert (add.start, add.duration, add.thread) == (5_002_000, 3000, 7)
    assert (add.module, add.backward) == ("layer", True) and runs[1].operations[0].module == "(fused)"


def test_what_runs_a_graph_counts_without_it() -> None:
    events = [node("Add", 101, 2), node("Mul", 103, 2), node("If", 100, 10), node("Exp", 110, 4)]
    assert [own for _, own in timing._own_times(events)] == [2, 2, 6, 4]
