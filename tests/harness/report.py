"""Writes the page at the end of a run: what ran, how long, what was skipped and why; and tables for the docs."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.sections import write_section

from .import_map import ROOT
from .step import Step

PAGE = ROOT / "docs" / "reference" / "tests.md"
# The commands that sample by a seed.
SAMPLED = ("quick", "gate", "flakes")
# Maximum number of files in the table of files.
_MOST = 25


def page(command: str, ended: Sequence[Step], seed: str) -> str:
    """Returns the page of a run."""
    parts = [f"# make {'test' if command == 'gate' else command}", *_failures(ended)]
    parts += [
        f"Sampled with SEED={seed}." if command in SAMPLED else "Nothing was sampled.",
        steps(ended),
    ]
    if command != "quick":
        parts.append(files(ended))
    return "\n\n".join([*parts, _skipped(ended)]) + "\n"


def steps(ended: Sequence[Step]) -> str:
    """Returns the table of the steps."""
    rows = []
    for one in ended:
        outcomes = Counter(test["outcome"] for test in one.tests)
        counts = [outcomes[kind] or "" for kind in ("passed", "skipped", "failed")]
        result = "failed" if one.failed else "skipped" if one.skipped else "passed"
        rows.append((one.name, result, f"{one.seconds:.0f} s", *counts))
    rows.append(("all", "", f"{sum(one.seconds for one in ended):.0f} s", "", "", ""))
    return table(("step", "result", "time", "tests passed", "skipped", "failed"), rows)


def files(ended: Iterable[Step]) -> str:
    """Returns the table of the files that take longest."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for test in (test for one in ended for test in one.tests):
        file = test["test"].partition("::")[0]
        seconds[file] += test["seconds"]
        tests[file] += 1
    longest = seconds.most_common()
    others = [name for name, _ in longest[_MOST:]]
    rows = [(f"`{name}`", tests[name], f"{value:.0f} s") for name, value in longest[:_MOST]]
    rows.append((f"{len(others)} others", sum(map(tests.get, others)), f"{sum(map(seconds.get, others)):.0f} s"))
    return table(("file", "tests", "time"), rows)


def write(ended: Sequence[Step]) -> None:
    """Writes the tables into docs/reference/tests.md, between their marks."""
    machine = f"Measured by `make everything` on {platform.machine()}, Python {platform.python_version()}."
    write_section(PAGE, "make everything", "\n\n".join([machine, steps(ended), files(ended)]))


def _failures(ended: Iterable[Step]) -> Iterator[str]:
    """Yields what failed, with the command that repeats it."""
    for one in ended:
        failed = [test["test"] for test in one.tests if test["outcome"] == "failed"]
        for test in failed:
            yield f"FAILED {test}\n  {one.line(test)}"
        if one.failed and not failed:
            why = f"exit code {one.code}" if one.code else "it ran no test"
            yield f"FAILED {one.name}: {why}\n  {one.line()}"


def _skipped(ended: Iterable[Step]) -> str:
    rows: list[tuple[object, ...]] = [("all", one.name, one.skipped) for one in ended if one.skipped]
    rows += [("all", one.name, _GONE) for one in ended if one.code and not one.failed]
    reasons = Counter(
        (one.name, test.get("reason", "").removeprefix("Skipped: "))
        for one in ended
        for test in one.tests
        if test["outcome"] == "skipped"
    )
    rows += [(count, name, reason) for (name, reason), count in reasons.most_common()]
    return table(("skipped", "step", "why"), rows) if rows else "Nothing was skipped."


_GONE = "the tests that reached the changed files no longer exist: run `make reach` to measure again"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
