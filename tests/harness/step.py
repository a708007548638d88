"""A step of a run: a command, where the costs of its tests are recorded, and its outcome."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from .import_map import ROOT

__all__ = ["BUILD", "STOCK", "Step", "last_failed_in", "pytest_step", "python"]

BUILD = ROOT / "build" / "tests"
STOCK = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / ".stock"), os.environ.get("PYTHONPATH")]))}
WORKERS = 2


@dataclass
class Step:
    """One command.

    Attributes:
        name: Its name on the page.
        command: The command's words.
        environment: Variables that differ from this process's.
        folder: Where it writes files.
        repeats: The words that repeat one of its tests, if it has tests.
        needs_all: Whether to skip it if an earlier step failed.
        may_be_empty: Whether it is no failure if none of its tests exist.
        code: Its exit code, after it has run.
        seconds: How long it took.
        skipped: Why it did nothing; empty if it did something.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path = BUILD
    repeats: Sequence[str] = ()
    needs_all: bool = False
    may_be_empty: bool = False
    code: int = 0
    seconds: float = 0.0
    skipped: str = ""

    @property
    def place(self) -> Path:
        """Its own folder, within that of all steps."""
        return self.folder / self.name.replace(" ", "_")

    def file(self, ending: str) -> Path:
        """Returns a file of this step; ``jsonl`` has a line per test."""
        return self.folder / f"{self.place.name}.{ending}"

    def line(self, test: str = "") -> str:
        """Returns the shell command that repeats the step, or one of its tests."""
        command = [*self.repeats, test] if test else self.command
        return shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), *command])

    def run(self, after_failure: bool) -> None:
        """Runs the command, unless it needs all earlier steps and one has failed."""
        if self.needs_all and after_failure:
            self.skipped = f"an earlier step failed; to run this one anyway: {self.line()}"
            return
        print(f"== {self.name}", flush=True)
        start = time.perf_counter()
        self.code = subprocess.run(self.command, cwd=ROOT, env={**os.environ, **self.environment}).returncode
        self.seconds = time.perf_counter() - start

    @property
    def failed(self) -> bool:
        """Whether it failed, or skipped all its tests."""
        is_empty = self.code == pytest.ExitCode.NO_TESTS_COLLECTED
        ran_nothing = bool(self.tests) and all(test["outcome"] == "skipped" for test in self.tests)
        return ran_nothing or (bool(self.code) and not (self.may_be_empty and is_empty))

    @cached_property
    def tests(self) -> list[dict[str, Any]]:
        """The costs of its tests."""
        path = self.file("jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def python(*words: str) -> tuple[str, ...]:
    """Returns a command that runs a module with this Python."""
    return (sys.executable, "-m", *words)


def pytest_step(
    folder: Path,
    name: str,
    *options: str,
    isolated: bool = False,
    may_be_empty: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Step:
    """Returns a step that runs tests.

    Args:
        folder: Where it writes files.
        name: Its name.
        options: Options of pytest that choose tests and workers.
        isolated: Whether exports run in child processes.
        may_be_empty: Whether it is no failure if none of its tests exist.
        environment: Variables that differ from this process's.
    """
    environment = environment or {}
    # Each engine has its own list of tests that failed last.
    common = ["-o", f"cache_dir={last_failed_in(environment).relative_to(ROOT)}", *["--isolated"] * isolated]
    record = str(Step(name, (), folder=folder).file("jsonl"))
    command = python("pytest", "-n", str(WORKERS), "--record", record, *common, *options, "tests")
    return Step(name, command, environment, folder, python("pytest", "-n1", *common), may_be_empty=may_be_empty)


def last_failed_in(environment: Mapping[str, str]) -> Path:
    """Returns the folder in which pytest records what failed on an engine."""
    return ROOT / ".pytest_cache" / ("stock" if STOCK.items() <= environment.items() else "first")
