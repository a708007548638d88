"""Runs linters and tests for ``make quick``, ``test``, ``everything``, ``reach`` and ``flakes``.

Every step runs even if others fail. A page at the end says what ran, how long, and what was skipped and why.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import choose, report
from .import_map import ROOT
from .reach import ENGINES
from .step import BUILD, STOCK, Step, last_failed_in, pytest_step, python

# After the linters. Less than the three minutes of `make quick`, as what has begun by then takes a while to finish.
QUICK_SECONDS = 120

LINTERS = (
    Step("ruff", python("ruff", "check", ".")),
    Step("format", python("ruff", "format", "--check", ".")),
    Step("mypy", python("mypy")),
)


def quick(folder: Path, given: argparse.Namespace) -> Iterator[Step]:
    """Runs what a change can affect, in at most three minutes."""
    yield from LINTERS
    until = time.time() + QUICK_SECONDS
    changed, measured = choose.changed_files(given.since), choose.Measured.read()
    _print(changed)
    common = ("-m", "not slow and not torture", "--seed", given.seed, "--until", str(until))
    affected = choose.Affected.by(changed, choose.last_failed(last_failed_in({})), measured)
    on_stock = choose.Affected(
        frozenset().union(*(measured.reach_on_stock.get(path, ()) for path in changed)),
        frozenset(choose.last_failed(last_failed_in(STOCK))),
        fills=False,
    )
    # The stock engine comes first, because the other tests take all the time that is left.
    for name, chosen, environment in ((ENGINES[1], on_stock, STOCK), (ENGINES[0], affected, {})):
        if chosen.fills or chosen.certain or chosen.failed:
            path = Step(name, (), folder=folder).file("pickle")
            path.write_bytes(pickle.dumps(chosen))
            options = (*common, "--affected", str(path))
            yield pytest_step(folder, name, *options, environment=environment, may_be_empty=not chosen.fills)


def _print(changed: Sequence[str]) -> None:
    print(f"{len(changed)} files have changed: {', '.join(changed[:8])}{', ...' * (len(changed) > 8)}", flush=True)


def gate(folder: Path, given: argparse.Namespace) -> Iterator[Step]:
    """Runs tests by lot, and those that reach what has changed recently."""
    yield from LINTERS
    base, measured = choose.recent_base(), choose.Measured.read()
    changed = sorted({*choose.changed_files(), *choose.changed_files(base)}) if base else []
    _print(changed)
    for name, mark, reach, environment in (
        (ENGINES[0], "", measured.reach, {}),
        (ENGINES[1], "engine and ", measured.reach_on_stock, STOCK),
    ):
        path = Step(name, (), folder=folder).file("pickle")
        path.write_bytes(pickle.dumps(choose.Affected.by(changed, (), dataclasses.replace(measured, reach=reach))))
        chosen = ("--gate", "--seed", given.seed, "--affected", str(path))
        yield pytest_step(folder, name, "-m", f"{mark}not slow and not torture", *chosen, environment=environment)


def everything(folder: Path, given: argparse.Namespace) -> Iterator[Step]:
    """Runs everything, from an empty export cache, with exports in child processes as users have them."""
    cold = {"ORT_TRAINER_CACHE": str(folder / "exports")}
    yield from LINTERS
    yield pytest_step(folder, ENGINES[0], "-m", "not torture", isolated=True, environment=cold)
    yield pytest_step(folder, ENGINES[1], "-m", "engine and not torture", isolated=True, environment=cold | STOCK)
    yield pytest_step(folder, "torture", "-m", "torture", "-n0", isolated=True, environment=cold)
    yield Step("audit", ("make", "audit"))
    yield Step("wheel", ("make", "dist-test"))
    yield Step("site", ("make", "site"))
    yield Step("javascript", ("make", "test-js"))
    yield Step("C and C++", ("make", "test-c"))
    yield Step("browser", ("make", "test-browser"))


def reach(folder: Path, given: argparse.Namespace) -> Iterator[Step]:
    """Runs the tests of both engines under coverage, and writes ``measured.json`` from its contexts."""
    settings = str(ROOT / "tests" / "harness" / "coverage.ini")
    watched = {"ORT_TRAINER_CACHE": str(folder / "exports"), "COVERAGE_PROCESS_START": settings}
    for name, mark, environment in ((ENGINES[0], "", {}), (ENGINES[1], "engine and ", STOCK)):
        place = Step(name, (), folder=folder).place
        place.mkdir()
        environment = watched | environment | {"REACH_FOLDER": str(place)}
        yield pytest_step(folder, name, "-m", f"{mark}not torture", "--reach", environment=environment)
    yield Step("measured.json", python("tests.harness.reach", *["--write"] * given.write), needs_all=True)


def flakes(folder: Path, given: argparse.Namespace) -> Iterator[Step]:
    """Runs the gate's tests three times in random order, beside two processes that do nothing but compute."""
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            load = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(load.kill)
        for number in range(3):
            options = ("-m", "not slow and not torture", "--gate", "--seed", f"{given.seed} {number}")
            yield pytest_step(folder, f"order {number}", *options, "-p", "randomly", f"--randomly-seed={number}")


COMMANDS: dict[str, Callable[[Path, argparse.Namespace], Iterator[Step]]] = {
    "quick": quick,
    "gate": gate,
    "everything": everything,
    "reach": reach,
    "flakes": flakes,
}


def main() -> int:
    """Runs the steps of a command; returns 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function in COMMANDS.items():
        command = commands.add_parser(name, help=function.__doc__)
        if name == "quick":
            command.add_argument("--since", default="", help="a commit: compare the working tree with it")
        if name in report.SAMPLED:
            command.add_argument("--seed", default=choose.commit(), help="draws the sample (default: the commit)")
        else:
            command.add_argument("--write", action="store_true", help="write the tables into docs/reference/tests.md")
    given = parser.parse_args()
    folder = BUILD / given.command
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ended: list[Step] = []
    for step in COMMANDS[given.command](folder, given):
        step.run(any(earlier.failed for earlier in ended))
        ended.append(step)
    page = report.page(given.command, ended, getattr(given, "seed", ""))
    (folder / "page.md").write_text(page)
    print(page)
    if given.command == "everything" and given.write:
        report.write(ended)
    return int(any(step.failed for step in ended))


if __name__ == "__main__":
    sys.exit(main())
