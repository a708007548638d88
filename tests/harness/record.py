"""Records the seconds and the outcome of each test, and fails tests that take too long.

``--record FILE`` enables it, and writes a JSON line for each test to the file; ``report`` makes tables of them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests import processes

# CPU seconds, including children, beyond which a test must become smaller or be marked ``slow``. They are about 30 on a
# quiet and fast machine: where others compute on the same core, a test takes twice as many, and the same machine takes
# twice as long on some days as on others.
LIMIT = 120.0


class Recorder:
    """A pytest plugin that measures in every worker, and writes in the process that receives all reports."""

    def __init__(self, path: Path, writes: bool, limit: float) -> None:
        self._path, self._writes, self._limit = path, writes, limit
        self._tests: dict[str, dict[str, Any]] = {}
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        item.stash[_BEFORE] = time.perf_counter(), cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            start, before = item.stash[_BEFORE]
            used, slow = cpu_seconds() - before, any(map(item.get_closest_marker, ("slow", "torture")))
            report.costs = {"seconds": round(time.perf_counter() - start, 4), "slow": slow}
            if report.passed and used > self._limit and not slow:
                report.outcome = "failed"
                report.longrepr = (
                    f"{item.nodeid} took {used:.0f} s of CPU time, but at most {LIMIT:.0f} s are allowed: make it "
                    "smaller, or mark it slow, so that only `make everything` runs it"
                )
        return report

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
            known.update({"seconds": 0} if crashed else report.costs)
            with self._path.open("a") as file:
                file.write(json.dumps(known) + "\n")


_BEFORE = pytest.StashKey[tuple[float, float]]()


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process, of its children that have ended, and of forks."""
    return sum(os.times()[:4]) + processes.processor_seconds


def start(config: pytest.Config) -> None:
    """Registers the plugin if ``--record`` is given."""
    path = config.getoption("record")
    if path:
        limit = math.inf if config.getoption("reach") else LIMIT  # coverage takes its time, too
        config.pluginmanager.register(Recorder(Path(path), not hasattr(config, "workerinput"), limit))
