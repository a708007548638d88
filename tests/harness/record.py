"""Records where the time of tests goes: the seconds of each test, and how many went into exports, steps and processes.

``--record FILE`` enables it, and writes a JSON line for each test to the file; ``report`` makes tables of them.
"""

from __future__ import annotations

import functools
import json
import math
import resource
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests import processes

# What is counted: an export that is made or found in the cache, a step of a trainer, a fork of ``processes.py``.
CAUSES = ("exports", "steps", "forks")
# What is known of each test: wall-clock seconds, and CPU seconds of this process and of new interpreters.
COSTS = ("seconds", "processor", "interpreters", *CAUSES, *(f"{cause}_count" for cause in CAUSES))
# CPU seconds, including children, beyond which a test must become smaller or be marked ``slow``. They are about 30 on a
# quiet and fast machine: where others compute on the same core, a test takes twice as many, and the same machine takes
# twice as long on some days as on others.
LIMIT = 120.0


class Recorder:
    """A pytest plugin that measures in every worker, and writes in the process that receives all reports."""

    def __init__(self, path: Path, writes: bool, limit: float) -> None:
        self._path, self._writes, self._limit = path, writes, limit
        self._seconds = dict.fromkeys(CAUSES, 0.0)
        self._counts = dict.fromkeys(CAUSES, 0)
        self._exporting = 0.0  # CPU seconds of children that export
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
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        item.stash[_BEFORE] = self._now()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            before = item.stash[_BEFORE]
            report.costs = {key: round(value - before[key], 4) for key, value in self._now().items()}
            used = sum(report.costs[key] for key in ("processor", "interpreters", "exporting", "forked"))
            report.costs["slow"] = any(map(item.get_closest_marker, ("slow", "torture")))
            if report.passed and used > self._limit and not report.costs["slow"]:
                report.outcome = "failed"
                report.longrepr = (
                    f"{item.nodeid} took {used:.0f} s of CPU time, but at most {LIMIT:.0f} s are allowed: make it "
                    "smaller, or mark it slow, so that only `make everything` runs it"
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
        # xdist's own phase: the worker crashed, so no more reports follow.
        crashed = report.when == "???"  # type: ignore[comparison-overlap]
        if report.when == "teardown" or crashed:
            known.update(dict.fromkeys(COSTS, 0) if crashed else report.costs)
            with self._path.open("a") as file:
                file.write(json.dumps(known) + "\n")


_BEFORE = pytest.StashKey[dict[str, float]]()


def _children() -> float:
    """Returns the CPU seconds of child processes that have ended: exports, new interpreters."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def start(config: pytest.Config) -> None:
    """Registers the plugin if ``--record`` is given."""
    path = config.getoption("record")
    if not path:
        return
    limit = math.inf if config.getoption("reach") else LIMIT  # coverage takes its time, too
    recorder = Recorder(Path(path), not hasattr(config, "workerinput"), limit)
    from ort_trainer.export.torch.builder import GraphBuilder
    from ort_trainer.train.loop import TrainingLoop

    recorder.measure(GraphBuilder, "_build", "exports")
    recorder.measure(TrainingLoop, "_step", "steps")
    recorder.measure(processes, "run", "forks")
    config.pluginmanager.register(recorder)
