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
from .reach import ENGINES

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


def tests(folder: Path, name: str, *options: str, environment: Mapping[str, str] | None = None) -> Step:
    """Returns a step that runs tests.

    Args:
        folder: Where it leaves what its tests cost.
        name: What it is called.
        options: Options of pytest.
        environment: Variables that differ.
    """
    record = folder / f"{name.replace(' ', '_')}.jsonl"
    command = python("pytest", "-n", str(WORKERS), "--record", str(record), *options, "tests")
    return Step(name, command, environment or {}, record)


def quick(folder: Path, given: argparse.Namespace) -> list[Step]:
    """What a change can affect, in at most three minutes."""
    changed, measured = choose.changed_files(given.since), choose.Measured.read()
    print(f"{len(changed)} files have changed: {', '.join(changed[:8])}{', ...' * (len(changed) > 8)}", flush=True)
    common = ("-m", "not slow and not torture", "--seed", given.seed, "--until", str(time.time() + QUICK_SECONDS))
    affected = choose.Affected.by(changed, choose.last_failed(), measured)
    on_stock = choose.Affected(
        frozenset().union(*(measured.reach_on_stock.get(path, ()) for path in changed)), fills=False
    )
    steps = []
    # The stock engine first, as the other tests take what time is left.
    for name, chosen, environment in (("tests on stock", on_stock, STOCK), ("tests", affected, {})):
        if chosen.fills or chosen.certain:
            path = folder / f"{name.replace(' ', '_')}.json"
            path.write_text(chosen.to_text())
            steps.append(tests(folder, name, *common, "--affected", str(path), environment=environment))
    return [*LINTERS, *steps]


def gate(folder: Path, given: argparse.Namespace) -> list[Step]:
    """Every test function, of large parametrizations a sample."""
    chosen = ("--gate", "--seed", given.seed)
    return [
        *LINTERS,
        tests(folder, "tests", "-m", "not slow and not torture", *chosen),
        tests(folder, "tests on stock", "-m", "engine and not slow and not torture", *chosen, environment=STOCK),
    ]


def everything(folder: Path, given: argparse.Namespace) -> list[Step]:
    """All there is, with no export of an earlier run, in child processes as users have them."""
    cold = {"ORT_TRAINER_CACHE": str(folder / "exports")}
    return [
        *LINTERS,
        tests(folder, "tests", "-m", "not torture", "--isolated", environment=cold),
        tests(folder, "tests on stock", "-m", "engine and not torture", "--isolated", environment=cold | STOCK),
        tests(folder, "torture", "-m", "torture", "--isolated", "-n0", environment=cold),
        Step("Python 3.12", (str(ROOT / "tests" / "python312.sh"),)),
        Step("browser", ("make", "test-browser")),
    ]


def reach(folder: Path, given: argparse.Namespace) -> list[Step]:
    """The tests of both engines under coverage, from whose contexts ``measured.json`` is written."""
    settings = str(ROOT / "tests" / "harness" / "coverage.ini")
    watched = {"ORT_TRAINER_CACHE": str(folder / "exports"), "COVERAGE_PROCESS_START": settings}
    places = [folder / name.replace(" ", "_") for name in ENGINES]
    for place in places:
        place.mkdir()
    first, second = (watched | {"REACH_FOLDER": str(place)} for place in places)
    return [
        tests(folder, ENGINES[0], "-m", "not torture", "--reach", environment=first),
        tests(folder, ENGINES[1], "-m", "engine and not torture", "--reach", environment=second | STOCK),
        Step("measured.json", python("tests.harness.reach", *(["--write"] if given.write else []))),
    ]


def main() -> int:
    """Runs the steps of a command; returns 1 if one has failed."""
    commands = {"quick": quick, "gate": gate, "everything": everything, "reach": reach}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=commands)
    parser.add_argument("--since", default="", help="a commit: what has changed since counts (quick)")
    parser.add_argument("--seed", default=choose.commit(), help="draws the sample (default: the commit)")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/contributing.md")
    given = parser.parse_args()
    folder = BUILD / given.command
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ended = [_run(step) for step in commands[given.command](folder, given)]
    page = report.page(given.command, ended, given.seed)
    (folder / "page.md").write_text(page)
    print(page)
    if given.write and given.command == "everything":
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
