"""Changes one operator or constant of the package at a time, and checks that the gate detects the change.

Needs the coverage data that `make reach` writes to build/. A mutant counts if the tests of its own room detect it on
the first engine, without those marked slow; the gate must then detect it with its sample of all tests.

    python benchmarks/mutants.py --count 40 --seed 1 --write
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sections import write_section

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.harness import choose, report  # noqa: E402
from tests.harness.reach import ENGINES, Reached  # noqa: E402

FOLDER = ROOT / "build" / "mutants"
# Tests that take this many times their time under coverage, plus a minute, hang: the mutant is detected.
PATIENCE = 3
# The number of tests of other rooms to run, the shortest first.
OTHERS = 60
# The number of mutants drawn together: a long one keeps one processor busy while the others share the other one.
AT_ONCE = 8
# The replacements of operators.
_OPERATORS = ("+ -", "- +", "* +", "/ *", "// *", "| &", "& |", "< <=", "<= <", "> >=", ">= >", "== !=", "!= ==")
_OTHER = dict(pair.split() for pair in _OPERATORS) | {"and": "or", "or": "and", "in": "not in", "not in": "in"}
_OTHER |= {"is": "is not", "is not": "is"}
_OPERATOR = re.compile("|".join(sorted(map(re.escape, _OTHER), key=len, reverse=True)))


@dataclass(frozen=True)
class Mutant:
    """A change of one line.

    Attributes:
        path: The file, relative to the root.
        line: The number of the line.
        column, end: The range of the line to replace.
        text: The replacement.
    """

    path: str
    line: int
    column: int
    end: int
    text: str

    @property
    def room(self) -> str:
        """The folder or module of the package."""
        return Path(self.path).parts[1].removesuffix(".py")

    def source(self) -> list[str]:
        """Returns the original lines of the file."""
        return (ROOT / self.path).read_text().splitlines(keepends=True)

    def apply(self, root: Path) -> None:
        """Changes the file in a copy of the tree."""
        lines = self.source()
        line = lines[self.line - 1].encode()
        lines[self.line - 1] = (line[: self.column] + self.text.encode() + line[self.end :]).decode()
        (root / self.path).write_text("".join(lines))

    def __str__(self) -> str:
        before = self.source()[self.line - 1].encode()[self.column : self.end].decode()
        return f"`{before.strip()}` becomes `{self.text.strip()}`"


def mutants_of(path: str, lines: set[int]) -> Iterator[Mutant]:
    """Yields the mutants of some lines of a file."""
    source = (ROOT / path).read_text()
    table = [line.encode() for line in source.splitlines()]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.lineno in lines and node.lineno == node.end_lineno:
            if isinstance(node.value, bool):
                yield Mutant(path, node.lineno, node.col_offset, node.end_col_offset or 0, str(not node.value))
            elif isinstance(node.value, (int, float)):
                yield Mutant(path, node.lineno, node.col_offset, node.end_col_offset or 0, repr(node.value + 1))
        for left, right in _operands(node):
            if left.end_lineno == right.lineno and right.lineno in lines:
                start = left.end_col_offset or 0
                found = _OPERATOR.search(table[right.lineno - 1][start : right.col_offset].decode())
                if found:
                    yield Mutant(path, right.lineno, start + found.start(), start + found.end(), _OTHER[found[0]])


def _operands(node: ast.AST) -> Iterable[tuple[ast.expr, ast.expr]]:
    """Returns the pairs of operands between which an operator stands."""
    if isinstance(node, ast.BinOp):
        return [(node.left, node.right)]
    if isinstance(node, ast.Compare):
        return itertools.pairwise([node.left, *node.comparators])
    return itertools.pairwise(node.values) if isinstance(node, ast.BoolOp) else []


class Hunt:
    """Runs tests over mutants.

    Args:
        reached: The lines that each test reaches on the first engine.
        seed: The seed of the gate's sample.
    """

    def __init__(self, reached: Reached, seed: str) -> None:
        self._costs = reached.tests
        usual = sorted(reached.usual, key=lambda test: reached.tests[test]["seconds"])
        self._gate = set(choose.gate(usual, seed, choose.Measured.read()))
        self._tests: dict[tuple[str, int], list[str]] = {}
        for test in usual:
            for line in reached.lines.get(test, ()):
                self._tests.setdefault(line, []).append(test)
        newest = max((ROOT / path).stat().st_mtime for path, _ in self._tests)
        if newest > reached.measured_at:
            raise SystemExit("files of the package have changed since `make reach`, which must measure them first")
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        self._trees = [FOLDER / str(number) for number in range(2)]
        for tree in self._trees:
            shutil.rmtree(tree, ignore_errors=True)
            for name in filter(lambda name: (ROOT / name).exists(), files.splitlines()):
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, tree / name)

    def lines(self) -> list[tuple[str, int]]:
        """Returns the lines of functions that tests reach."""
        return sorted(self._tests)

    def judge(self, mutant: Mutant) -> tuple[str, str] | None:
        """Returns a test of the room and one of the gate that detect a mutant; None if no test of the room does.

        The second is empty if the gate does not detect it.
        """
        tree = self._trees.pop()
        try:
            mutant.apply(tree)
            noticed = self._judge(mutant, tree)
            shutil.copy(ROOT / mutant.path, tree / mutant.path)
            anyway = self._failing([test for test in dict.fromkeys(noticed or ()) if test in self._costs], tree)
            if anyway:
                raise RuntimeError(f"{anyway} fails without a mutant, too")
            return noticed
        finally:
            shutil.copy(ROOT / mutant.path, tree / mutant.path)
            self._trees.append(tree)

    def _judge(self, mutant: Mutant, tree: Path) -> tuple[str, str] | None:
        tests = self._tests[mutant.path, mutant.line]
        own = [test for test in tests if _is_of(test, mutant)]
        found = self._failing([test for test in own if test in self._gate], tree)
        if found:
            return found, found
        found = self._failing([test for test in own if test not in self._gate], tree)
        if not found:
            return None
        others = [test for test in tests if test in self._gate and test not in own][:OTHERS]
        return found, self._failing(others, tree)

    def _failing(self, tests: Sequence[str], tree: Path) -> str:
        """Returns the first test that fails; empty if none does."""
        if not tests:
            return ""
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        environment["ORT_TRAINER_CACHE"] = str(ROOT / "build" / "tests" / "reach" / "exports")
        path = tree / "chosen.pickle"
        path.write_bytes(pickle.dumps(choose.Affected(frozenset(tests), fills=False)))
        files = sorted({test.partition("::")[0] for test in tests})
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--affected", str(path)]
        command = [sys.executable, "-m", "pytest", *options, *files]
        limit = 60 + PATIENCE * sum(self._costs[test]["seconds"] for test in tests)
        with subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that its tests have started
                return "a test that ran on"
        if process.returncode in (0, 5):  # 5: the measured tests no longer exist
            return ""
        if "ImportError while loading conftest" in output:
            return "the import"
        failed = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - |$)", output, re.MULTILINE)
        if failed is None:
            raise RuntimeError(f"pytest ended with {process.returncode}:\n{output}")
        return failed[1]


def _is_of(test: str, mutant: Mutant) -> bool:
    """Returns whether a test is one of the mutant's room."""
    parts = Path(test.partition("::")[0]).parts
    return parts[1] in (mutant.room, f"test_{mutant.room}.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="how many mutants that count")
    parser.add_argument("--seed", type=int, default=1, help="draws the mutants")
    parser.add_argument("--write", action="store_true", help="write the table into docs/reference/tests.md")
    given = parser.parse_args()
    hunt, draw = Hunt(Reached(ENGINES[0]), choose.commit()), random.Random(given.seed)
    lines = hunt.lines()
    rows: list[tuple[str, str, str, str]] = []
    tried, known = 0, set[Mutant]()
    with ThreadPoolExecutor(2) as pool:
        while len(rows) < given.count:
            drawn: list[Mutant] = []
            while len(drawn) < AT_ONCE:
                path, line = draw.choice(lines)
                found = [mutant for mutant in mutants_of(path, {line}) if mutant not in known]
                if found:
                    drawn.append(draw.choice(found))
                    known.add(drawn[-1])
            for mutant, noticed in zip(drawn, pool.map(hunt.judge, drawn), strict=True):
                tried += 1
                place = f"`{mutant.path.removeprefix('ort_trainer/')}:{mutant.line}`"
                print(place, mutant, noticed, flush=True)
                if noticed is not None and len(rows) < given.count:
                    room, gate_test = (f"`{test}`" if test else "no" for test in noticed)
                    rows.append((place, str(mutant), room, gate_test))
    gate = sum(row[3] != "no" for row in rows)
    head = f"Of {tried} mutants the tests of their rooms notice {len(rows)}; of these the gate notices {gate}."
    text = f"{head}\n\n{report.table(('line', 'change', 'a test of the room', 'a test of the gate'), rows)}"
    print(text)
    if given.write:
        write_section(report.PAGE, "mutants", text)


if __name__ == "__main__":
    main()
