"""Finds which tests reach which lines of the package, from coverage's contexts, and writes ``tests/measured.json``.

Every test that reaches a module also reaches the lines that run when it is imported.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from benchmarks.sections import write_section

from . import choose, report
from .contexts import without_phase
from .import_map import FILES, ROOT, tree
from .step import BUILD, Step

FOLDER = BUILD / "reach"
ENGINES = ("tests", "tests on stock")
# Of shorter tests the seconds are not written: they run in every gate.
SHORT = 0.05
# `make quick` promises 90 % of a changed file's lines; this leaves room for measurements that are a little old.
ENOUGH = 0.97

_KINDS = ((0.97, "at least 97 %"), (0.9, "90 to 97 %"), (0.0, "below 90 %"))

Line = tuple[str, int]


def _test(context: str) -> str:
    """Returns the test of a context; if it names two, as in a process that many tests share, the second one."""
    return without_phase(f"tests/{context.rpartition('|tests/')[2].removeprefix('tests/')}") if context else ""


class Reached:
    """What the tests of one engine reach.

    Args:
        engine: The name of the step that ran them.

    Attributes:
        tests: Name of a test -> its costs.
        measured_at: Time of the measurement, in seconds since 1970.
        lines: Name of a test -> the lines that it reaches; "" -> those that ran before any test.

    Raises:
        SystemExit: If nothing was measured.
    """

    def __init__(self, engine: str) -> None:
        from coverage import CoverageData

        step = Step(engine, (), folder=FOLDER)
        record, combined = step.file("jsonl"), step.place / "data.combined"
        if not record.exists() or not combined.exists():
            raise SystemExit(f"{combined} is missing: run `make reach`, which takes half an hour")
        self.tests = {found["test"]: found for found in map(json.loads, record.read_text().splitlines())}
        self.measured_at = combined.stat().st_mtime
        data = CoverageData(str(combined))
        data.read()
        self.lines: defaultdict[str, set[Line]] = defaultdict(set)
        known = {str(path): str(path.relative_to(ROOT)) for path in FILES}
        for path in data.measured_files():
            if path in known:
                for line, contexts in data.contexts_by_lineno(path).items():
                    for context in contexts:
                        self.lines[_test(context)].add((known[path], line))

    @property
    def usual(self) -> list[str]:
        """The tests that the gate may run: all except slow ones."""
        return [test for test, costs in self.tests.items() if not costs["slow"]]

    def of(self, tests: Iterable[str]) -> set[Line]:
        """Returns the lines that some tests reach, including those that run before any test."""
        found = set().union(self.lines.get("", ()), *(self.lines.get(test, ()) for test in tests))
        return found | {(path, line) for path in {path for path, _ in found} for line in _at_import(path)}

    def all(self) -> set[Line]:
        """Returns the lines that all tests reach."""
        return self.of(self.lines)


@functools.cache
def _at_import(path: str) -> frozenset[int]:
    """Returns the lines of a file that run when it is imported."""
    found: set[int] = set()

    def visit(body: Collection[ast.stmt]) -> None:
        for statement in body:
            nested = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                found.update({statement.lineno, *(decorator.lineno for decorator in statement.decorator_list)})
                found.update(range(statement.lineno, statement.body[0].lineno))
            elif any(nested):
                found.add(statement.lineno)
                for part in nested:
                    visit(part)
            else:
                found.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))

    visit(tree(ROOT / path).body)
    return frozenset(found)


def combine() -> None:
    """Combines the files of all processes into one per engine."""
    from coverage import CoverageData
    from coverage.data import combine_parallel_data

    for engine in ENGINES:
        folder = Step(engine, (), folder=FOLDER).place
        if list(folder.glob("data.*.*")):
            data = CoverageData(str(folder / "data.combined"))
            combine_parallel_data(data, data_paths=[str(path) for path in folder.glob("data.*.*")])


def measure(first: Reached, second: Reached) -> choose.Measured:
    """Returns the measurements that tests are chosen by."""
    reach, on_stock = {}, {}
    bodies, stock_bodies = _bodies(first), _bodies(second)
    for path in sorted(bodies.keys() | stock_bodies.keys()):
        tests, more = bodies.get(path, {}), stock_bodies.get(path, {})
        lines = set().union(*tests.values())
        reach[path] = _cover(lines, tests, first.tests, ENOUGH)
        rest = set().union(*more.values()) - lines
        if len(rest) > (1 - ENOUGH) * len(lines | rest):
            on_stock[path] = _cover(rest, more, second.tests, ENOUGH)
    return choose.Measured(seconds([*first.tests.values(), *second.tests.values()]), reach, on_stock)


def seconds(tests: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns how long a case of each test function takes on average."""
    cases: defaultdict[str, list[float]] = defaultdict(list)
    for test in tests:
        cases[choose.function_of(test["test"])].append(test["seconds"])
    means = {function: round(statistics.fmean(values), 2) for function, values in sorted(cases.items())}
    return {function: mean for function, mean in means.items() if mean > SHORT}


def _bodies(found: Reached) -> dict[str, dict[str, set[Line]]]:
    """Returns the lines of functions by file and test; for files without functions, all their lines."""
    bodies: defaultdict[str, defaultdict[str, set[Line]]] = defaultdict(lambda: defaultdict(set))
    others: defaultdict[str, defaultdict[str, set[Line]]] = defaultdict(lambda: defaultdict(set))
    for test in found.usual:
        for path, line in found.lines.get(test, ()):
            (others if line in _at_import(path) else bodies)[path][test].add((path, line))
    return {**others, **bodies}


def _cover(
    lines: set[Line], tests: Mapping[str, set[Line]], costs: Mapping[str, Mapping[str, Any]], share: float
) -> list[str]:
    """Returns tests that together reach a share of some lines, those with the most lines per second first."""
    left, chosen = set(lines), []
    while len(left) > (1 - share) * len(lines):
        best = max(tests, key=lambda test: len(tests[test] & left) / (costs[test]["seconds"] + 0.1))
        if not tests[best] & left:
            break
        left -= tests[best]
        chosen.append(best)
    return chosen


def tables(first: Reached, second: Reached, measured: choose.Measured, seeds: Collection[str]) -> str:
    """Returns tables of the lines that the gate and `make quick` reach, compared with all tests."""
    whole = first.all() | second.all()
    rows: list[tuple[object, ...]] = [("all tests", f"{len(whole):,}", "")]
    for seed in seeds:
        chosen = [found.of(choose.gate(found.usual, seed, measured)) for found in (first, second)]
        reached = len(whole.intersection(set().union(*chosen)))
        rows.append((f"`make test`, sample {seed}", f"{reached:,}", f"{reached / len(whole):.2%}"))
    shares = {}
    for path in sorted({path for path, _ in whole}):
        own = {line for line in whole if line[0] == path}
        reached = first.of(measured.reach.get(path, ())) | second.of(measured.reach_on_stock.get(path, ()))
        shares[path] = len(own & reached) / len(own)
    counts = Counter(next(text for least, text in _KINDS if share >= least) for share in shares.values())
    below = [f"`{path}` ({share:.0%})" for path, share in shares.items() if share < 0.9]
    return "\n\n".join(
        [
            report.table(("run", "lines of the package", "of those of all tests"), rows),
            report.table(("`make quick` reaches of a changed file's lines", "files"), counts.items()),
            *([f"Below: {', '.join(below)}."] if below else []),
        ]
    )


def main() -> None:
    """Writes ``measured.json``, and the tables in docs/reference/tests.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/reference/tests.md")
    given = parser.parse_args()
    combine()
    first, second = map(Reached, ENGINES)
    measured = measure(first, second)
    choose.MEASURED.write_text(measured.to_text())
    text = tables(first, second, measured, ["1", "2", "3"])
    print(text)
    if given.write:
        write_section(report.PAGE, "make reach", text)


if __name__ == "__main__":
    main()
