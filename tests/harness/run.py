"""Runs linters and tests: what is behind ``make quick``, ``make test``, ``make everything`` and ``make reach``.

Every step runs, whatever the others find, and a page at the end says what ran, how long, and what was skipped and why.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import choose, report
from .import_map import ROOT

BUILD = ROOT / "build" / "tests"
STOCK = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / ".stock"), os.environ.get("PYTHONPATH")]))}
# Of the three minutes of `make quick`: what has begun by then may take a while yet.
QUICK_SECONDS = 150
WORKERS = 2


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: What it is called on the page.
        command: Its words.
        environment: Variables that differ from this process's.
        record: Where its tests leave what they cost, if it has tests.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    record: Path | None = None


def python(*words: str) -> tuple[str, ...]:
    """Returns a command that runs a module with this Python."""
    return (sys.executable, "-m", *words)


LINTERS = (
    Step("ruff", python("ruff", "check", ".")),
    Step("format", python("ruff", "format", "--check", ".")),
    Step("mypy", python("mypy")),
)


def tests(
    name: str, marks: str, *options: str, workers: int = WORKERS, environment: Mapping[str, str] | None = None
) -> Step:
    """Returns a step that runs tests.

    Args:
        name: What it is called.
        marks: Which marks they have.
        options: Other options of pytest.
        workers: How many processes run them.
        environment: Variables that differ.
    """
    record = BUILD / f"{name.replace(' ', '_')}.jsonl"
    chosen = ("-m", marks, "--record", str(record), *options)
    return Step(name, python("pytest", "-n", str(workers), *chosen, "tests"), environment or {}, record)


def quick(since: str, seed: str) -> list[Step]:
    """What a change can affect, in at most three minutes."""
    until = time.time() + QUICK_SECONDS
    changed, measured = choose.changed_files(since), choose.Measured.read()
    print(f"{len(changed)} files have changed: {', '.join(changed[:8])}{', ...' * (len(changed) > 8)}", flush=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    path = BUILD / "affected.json"
    path.write_text(choose.Affected.by(changed, choose.last_failed(), measured).to_text())
    options = ("--affected", str(path), "--until", str(until), "--seed", seed)
    return [*LINTERS, tests("tests", "not slow and not torture", *options)]


def gate(since: str, seed: str) -> list[Step]:
    """Every test function, of large parametrizations a sample."""
    chosen = ("--gate", "--seed", seed)
    return [
        *LINTERS,
        tests("tests", "not slow and not torture", *chosen),
        tests("tests on stock", "engine and not slow and not torture", *chosen, environment=STOCK),
    ]


def everything(since: str, seed: str) -> list[Step]:
    """All there is, with no export of an earlier run, in child processes as users have them."""
    shutil.rmtree(BUILD / "exports", ignore_errors=True)
    cold = {"ORT_TRAINER_CACHE": str(BUILD / "exports")}
    return [
        *LINTERS,
        tests("tests", "not torture", "--isolated", environment=cold),
        tests("tests on stock", "engine and not torture", "--isolated", environment=cold | STOCK),
        tests("torture", "torture", "--isolated", workers=0, environment=cold),
        Step("Python 3.12", (str(ROOT / "tests" / "python312.sh"),)),
        Step("browser", ("make", "test-browser")),
    ]


def reach(since: str, seed: str) -> list[Step]:
    """The tests of both engines under coverage, from whose contexts ``measured.json`` is written."""
    shutil.rmtree(BUILD, ignore_errors=True)
    folders = [BUILD / "coverage" / name for name in ("tests", "tests_on_stock")]
    for folder in folders:
        folder.mkdir(parents=True)
    settings = str(ROOT / "tests" / "harness" / "coverage.ini")
    watched = {"ORT_TRAINER_CACHE": str(BUILD / "exports"), "COVERAGE_PROCESS_START": settings}
    first, second = (watched | {"REACH_FOLDER": str(folder)} for folder in folders)
    return [
        tests("tests", "not torture", "--reach", environment=first),
        tests("tests on stock", "engine and not torture", "--reach", environment=second | STOCK),
        Step("measured.json", python("tests.harness.reach")),
    ]


def main() -> int:
    """Runs the steps of a command; returns 1 if one has failed."""
    commands = {"quick": quick, "gate": gate, "everything": everything, "reach": reach}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=commands)
    parser.add_argument("--since", default="", help="a commit: what has changed since counts (quick)")
    parser.add_argument("--seed", default=choose.commit(), help="draws the sample (default: the commit)")
    parser.add_argument("--write", action="store_true", help="write the page's tables into docs/contributing.md")
    given = parser.parse_args()
    ended = [_run(step) for step in commands[given.command](given.since, given.seed)]
    page = report.page(given.command, ended, given.seed)
    (BUILD / f"{given.command}.md").write_text(page)
    print(page)
    if given.write:
        report.write(ended)
    return int(any(step.code for step in ended))


def _run(step: Step) -> report.Ended:
    print(f"== {step.name}", flush=True)
    start = time.perf_counter()
    environment = {**os.environ, **step.environment}
    code = subprocess.run(step.command, cwd=ROOT, env=environment, check=False).returncode
    return report.Ended(step.name, code, time.perf_counter() - start, step.record, STOCK.items() <= environment.items())


if __name__ == "__main__":
    sys.exit(main())
