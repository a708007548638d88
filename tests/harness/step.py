"""A step of a run: a command, where its tests leave what they cost, and what has become of it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .import_map import ROOT

__all__ = ["BUILD", "STOCK", "Ended", "Step", "last_failed_in", "pytest_step", "python"]

BUILD = ROOT / "build" / "tests"
STOCK = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / ".stock"), os.environ.get("PYTHONPATH")]))}
WORKERS = 2
_NO_TESTS = 5
"""The exit code of pytest where it has found none of the tests that it was to run."""


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: What it is called on the page.
        command: Its words.
        environment: Variables that differ from this process's.
        folder: Where it leaves files.
        repeats: The words that repeat one of its tests, if it has tests.
        needs_all: Whether it is left out where an earlier step has failed.
        may_be_empty: Whether its tests may all be gone.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path = BUILD
    repeats: Sequence[str] = ()
    needs_all: bool = False
    may_be_empty: bool = False

    @property
    def place(self) -> Path:
        """A folder of its own, within that of all steps."""
        return self.folder / self.name.replace(" ", "_")

    def file(self, ending: str) -> Path:
        """Returns a file of this step; ``jsonl`` has a line for each test, and ``skipped`` why the step did nothing."""
        return self.folder / f"{self.place.name}.{ending}"

    def line(self, test: str = "") -> str:
        """Returns what a shell takes to run the step, or one of its tests, once more."""
        command = [*self.repeats, test] if test else self.command
        return shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), *command])


@dataclass(frozen=True)
class Ended:
    """What has become of a step.

    Attributes:
        step: The step.
        code: Its exit code.
        seconds: How long it took.
        skipped: Why it did nothing; empty if it did something.
    """

    step: Step
    code: int
    seconds: float
    skipped: str = ""

    @property
    def failed(self) -> bool:
        """Whether it has failed."""
        return bool(self.code) and not (self.step.may_be_empty and self.code == _NO_TESTS)

    @cached_property
    def tests(self) -> list[dict[str, Any]]:
        """What its tests cost."""
        path = self.step.file("jsonl")
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
        folder: Where it leaves files.
        name: What it is called.
        options: Options of pytest that choose tests and workers.
        isolated: Whether exports run in child processes.
        may_be_empty: Whether its tests may all be gone.
        environment: Variables that differ.
    """
    environment = environment or {}
    # What failed last is another matter on the other engine.
    common = ["-o", f"cache_dir={last_failed_in(environment).relative_to(ROOT)}", *["--isolated"] * isolated]
    record = str(Step(name, (), folder=folder).file("jsonl"))
    command = python("pytest", "-n", str(WORKERS), "--record", record, *common, *options, "tests")
    return Step(name, command, environment, folder, python("pytest", "-n1", *common), may_be_empty=may_be_empty)


def last_failed_in(environment: Mapping[str, str]) -> Path:
    """Returns pytest's folder in which it notes what has failed on an engine."""
    return ROOT / ".pytest_cache" / ("stock" if STOCK.items() <= environment.items() else "first")
