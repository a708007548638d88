"""Where the time of tests goes: for each test its seconds, and what of them went into exports, steps and processes.

Active with ``--record FILE``, to which a JSON line is written for each test; ``report`` makes tables of them.
"""

from __future__ import annotations

import functools
import json
import math
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# What is counted: an export that is made or found, a step of a trainer, a fork of ``processes.py``.
CAUSES = ("exports", "steps", "forks")
# Processor seconds of a test, with its children, that ask for a smaller test or the mark ``slow``.
LIMIT = 30.0


class Recorder:
    """A plugin of pytest, in every worker, which measures, and in the process that hears of all tests, which writes."""

    def __init__(self, path: Path, writes: bool, limit: float) -> None:
        self._path, self._writes, self._limit = path, writes, limit
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._counts = dict.fromkeys(CAUSES, 0)
        self._tests: dict[str, dict[str, Any]] = {}
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    def measure(self, owner: Any, name: str, cause: str) -> None:
        """Measures every call of a function; calls within a measured call count for the inner one."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            self._counts[cause] += 1
            start, inner = time.perf_counter(), sum(self._seconds.values())
            try:
                return function(*args, **kwargs)
            finally:
                inner = sum(self._seconds.values()) - inner
                self._seconds[cause] += time.perf_counter() - start - inner

        setattr(owner, name, measured)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        item.stash[_BEFORE] = self._now()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            before = item.stash[_BEFORE]
            report.costs = {key: round(value - before[key], 4) for key, value in self._now().items()}
            used = report.costs["processor"] + report.costs["children"]
            report.costs["slow"] = any(map(item.get_closest_marker, ("slow", "torture")))
            if report.passed and used > self._limit and not report.costs["slow"]:
                report.outcome = "failed"
                report.longrepr = (
                    f"{item.nodeid} took {used:.0f} s of a processor, and {LIMIT:.0f} are allowed: make it smaller, or "
                    "mark it slow, and only `make everything` runs it"
                )
        return report

    def _now(self) -> dict[str, float]:
        now = {"seconds": time.perf_counter(), "processor": time.process_time(), "children": _children()}
        for cause in CAUSES:
            now[cause] = self._seconds[cause]
            now[f"{cause}_count"] = self._counts[cause]
        return now

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._writes:
            return
        known = self._tests.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed"})
        if report.skipped:
            known["outcome"] = "skipped"
            known["reason"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        elif report.failed:
            known["outcome"] = "failed"
        if report.when == "teardown":
            known.update(report.costs)
            with self._path.open("a") as file:
                file.write(json.dumps(known) + "\n")


_BEFORE = pytest.StashKey[dict[str, float]]()


def _children() -> float:
    """Seconds of a processor that children took, of which an end is known; exports among them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start(config: pytest.Config) -> None:
    """Registers the plugin where it is asked for."""
    path = config.getoption("record")
    if not path:
        return
    limit = math.inf if config.getoption("reach") else LIMIT  # coverage takes its time, too
    recorder = Recorder(Path(path), not hasattr(config, "workerinput"), limit)
    from ort_trainer.sources.torch.builder import GraphBuilder
    from ort_trainer.training.loop import TrainingLoop
    from tests import processes

    recorder.measure(GraphBuilder, "_build", "exports")
    recorder.measure(TrainingLoop, "step", "steps")
    recorder.measure(processes, "run", "forks")
    config.pluginmanager.register(recorder)
