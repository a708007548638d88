"""The page at the end of a run: what ran, how long, what was skipped and why; and its tables for the documentation."""

from __future__ import annotations

import json
import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.sections import write_section

from .import_map import ROOT
from .record import CAUSES

PAGE = ROOT / "docs" / "contributing.md"
# How many files, functions or reasons a table has.
_MOST = 25


@dataclass(frozen=True)
class Ended:
    """What has become of a step.

    Attributes:
        name: Its name.
        code: Its exit code.
        seconds: How long it took.
        record: The file with a line for each of its tests, if it has tests.
        stock: Whether it ran on the stock engine.
    """

    name: str
    code: int
    seconds: float
    record: Path | None
    stock: bool

    @cached_property
    def tests(self) -> list[dict[str, Any]]:
        """The lines of the record."""
        if self.record is None or not self.record.exists():
            return []
        return [json.loads(line) for line in self.record.read_text().splitlines()]


def page(command: str, ended: Sequence[Ended], seed: str) -> str:
    """Returns the page of a run."""
    parts = [f"# make {'test' if command == 'gate' else command}", *_failures(ended)]
    sampled = command in ("gate", "quick")
    parts += [f"Sampled with SEED={seed}." if sampled else "Nothing was sampled.", steps(ended), causes(ended)]
    if command != "quick":
        parts.append(files(ended))
    return "\n\n".join([*parts, _skipped(ended)]) + "\n"


def steps(ended: Sequence[Ended]) -> str:
    """Returns the table of the steps."""
    rows = []
    for step in ended:
        outcomes = Counter(test["outcome"] for test in step.tests)
        counts = [outcomes[kind] or "" for kind in ("passed", "skipped", "failed")]
        rows.append((step.name, "failed" if step.code else "passed", f"{step.seconds:.0f} s", *counts))
    rows.append(("all", "", f"{sum(step.seconds for step in ended):.0f} s", "", "", ""))
    return table(("step", "result", "time", "tests passed", "skipped", "failed"), rows)


def causes(ended: Sequence[Ended]) -> str:
    """Returns the table of what the time of tests went into."""
    rows = []
    for step in ended:
        if not step.tests:
            continue
        total = {key: sum(test[key] for test in step.tests) for key in _COSTS}
        # Exports in child processes are among the children, and so are counted as exports alone.
        own = total["seconds"] - total["exports"] - total["steps"] - total["forks"]
        interpreters = sum(max(0.0, test["children"] - test["exports"]) for test in step.tests)
        rows.append(
            (
                step.name,
                f"{total['seconds']:.0f} s",
                f"{total['exports']:.0f} s ({total['exports_count']})",
                f"{total['forks']:.0f} s ({total['forks_count']})",
                f"{interpreters:.0f} s",
                f"{total['steps']:.0f} s ({total['steps_count']})",
                f"{max(0.0, own - interpreters):.0f} s",
            )
        )
    head = ("step", "tests", "exports", "forked processes", "interpreters", "training steps", "the rest")
    return table(head, rows)


def files(ended: Iterable[Ended]) -> str:
    """Returns the table of the files that take longest."""
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for step in ended:
        for test in step.tests:
            found = sums[test["test"].partition("::")[0]]
            found["tests"] += 1
            for key in _COSTS:
                found[key] += test[key]
    longest = sorted(sums.items(), key=lambda item: -item[1]["seconds"])
    rows = [
        (f"`{name}`", found["tests"], f"{found['seconds']:.0f} s", found["exports_count"], f"{found['exports']:.0f} s")
        for name, found in longest[:_MOST]
    ]
    others = [found for _, found in longest[_MOST:]]
    rest = {key: sum(found[key] for found in others) for key in ("tests", *_COSTS)}
    label = f"{len(others)} others"
    rows.append((label, rest["tests"], f"{rest['seconds']:.0f} s", rest["exports_count"], f"{rest['exports']:.0f} s"))
    return table(("file", "tests", "time", "exports", "of exports"), rows)


def write(ended: Sequence[Ended]) -> None:
    """Writes the tables into the page for contributors, between their marks."""
    machine = f"Measured by `make everything` on {platform.machine()}, Python {platform.python_version()}."
    write_section(PAGE, "make everything", "\n\n".join([machine, steps(ended), causes(ended), files(ended)]))


_COSTS = ("seconds", "children", *CAUSES, *(f"{cause}_count" for cause in CAUSES))


def _failures(ended: Iterable[Ended]) -> Iterator[str]:
    """Yields what has failed, with the command that repeats it."""
    for step in ended:
        engine = "PYTHONPATH=.stock " if step.stock else ""
        failed = [test["test"] for test in step.tests if test["outcome"] == "failed"]
        for test in failed:
            yield f"FAILED {test}\n  {engine}.venv/bin/python -m pytest '{test}'"
        if step.code and not failed:
            yield f"FAILED {step.name}: exit code {step.code}"


def _skipped(ended: Iterable[Ended]) -> str:
    reasons = Counter(
        (step.name, test.get("reason", "").removeprefix("Skipped: "))
        for step in ended
        for test in step.tests
        if test["outcome"] == "skipped"
    )
    rows = [(count, name, reason) for (name, reason), count in reasons.most_common()]
    return table(("skipped", "step", "why"), rows) if rows else "No test was skipped."


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
