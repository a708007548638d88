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

from tests import processes

# What is counted: an export that is made or found, a step of a trainer, a fork of ``processes.py``.
CAUSES = ("exports", "steps", "forks")
# What is known of each test: seconds by the clock, and of processors in this process and in new interpreters.
COSTS = ("seconds", "processor", "interpreters", *CAUSES, *(f"{cause}_count" for cause in CAUSES))
# Processor seconds of a test, with its children, that ask for a smaller test or the mark ``slow``.
LIMIT = 30.0


class Recorder:
    """A plugin of pytest, in every worker, which measures, and in the process that hears of all tests, which writes."""

    def __init__(self, path: Path, writes: bool, limit: float) -> None:
        self._path, self._writes, self._limit = path, writes, limit
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._counts = dict.fromkeys(CAUSES, 0)
        self._exporting = 0.0  # seconds of a processor in children that export
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
            start, inner, children = time.perf_counter(), sum(self._seconds.values()), _children()
            try:
                return function(*args, **kwargs)
            finally:
                self._exporting += _children() - children if cause == "exports" else 0.0
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
            used = sum(report.costs[key] for key in ("processor", "interpreters", "exporting", "forked"))
            report.costs["slow"] = any(map(item.get_closest_marker, ("slow", "torture")))
            if report.passed and used > self._limit and not report.costs["slow"]:
                report.outcome = "failed"
                report.longrepr = (
                    f"{item.nodeid} took {used:.0f} s of a processor, and {LIMIT:.0f} are allowed: make it smaller, or "
                    "mark it slow, and only `make everything` runs it"
                )
        return report

    def _now(self) -> dict[str, float]:
        now = {
            "seconds": time.perf_counter(),
            "processor": time.process_time(),
            "interpreters": _children() - self._exporting,
            "exporting": self._exporting,
            "forked": processes.processor_seconds,
        }
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
        crashed = report.when == "???"  # and with it a worker, which has nothing more to say
        if report.when == "teardown" or crashed:
            known.update(dict.fromkeys(COSTS, 0) if crashed else report.costs)
            with self._path.open("a") as file:
                file.write(json.dumps(known) + "\n")


_BEFORE = pytest.StashKey[dict[str, float]]()


def _children() -> float:
    """Seconds of a processor that children took, of which an end is known: exports, new interpreters."""
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

    recorder.measure(GraphBuilder, "_build", "exports")
    recorder.measure(TrainingLoop, "step", "steps")
    recorder.measure(processes, "run", "forks")
    config.pluginmanager.register(recorder)
