"""Chooses which tests run: by lot for the gate, or what a change can affect.

The choice is based on ``tests/measured.json``, which ``make reach`` writes: how long tests take, and which of them
together reach each file of the package.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import import_map
from .import_map import ROOT, TESTS

MEASURED = TESTS / "measured.json"
# A test of s seconds runs in a gate with the probability LOT / sqrt(s): one of a second in two gates of ten, one of ten
# seconds in every sixteenth. Of all ways to spend the same time, this one finds a fault after the fewest gates on
# average, if every test is equally likely to find it: it minimizes the sum of 1 / p for a given sum of p * s.
LOT = 0.2
# What reaches files that have changed in this many seconds before a commit always runs.
RECENT = 24 * 60 * 60
# Path prefix outside the package and the tests -> tests that a change there can affect; the longest prefix wins.
_BESIDE: Mapping[str, Sequence[str]] = {
    ".ci": (),
    ".devcontainer": (),
    ".github": (),
    "CHANGELOG.md": ("tests/test_docs.py", "tests/test_package.py"),
    "Makefile": ("tests/test_docs.py", "tests/test_package.py"),
    "README.md": ("tests/test_docs.py",),
    "SECURITY.md": ("tests/test_docs.py",),
    "benchmarks": ("tests/test_benchmarks.py", "tests/test_docs.py", "tests/fuzz/test_population.py"),
    "c": ("tests/api/test_histories.py",),
    "constraints.txt": ("tests/test_package.py",),
    "docs": ("tests/test_docs.py",),
    "examples": ("tests/test_examples.py", "tests/test_cookbook.py", "tests/test_recipes.py"),
    "examples/browser": (),
    "examples/c": (),
    "examples/cpp": (),
    "js": ("tests/api/test_histories.py",),
    "noxfile.py": ("tests/test_harness.py",),
    "pyproject.toml": ("tests/test_package.py",),
    "schemas": ("tests/options/test_options.py", "tests/options/test_model_desc.py", "tests/test_docs.py"),
}


@dataclass(frozen=True)
class Measured:
    """What ``make reach`` has measured.

    Attributes:
        seconds: Test functions of which a case takes longer than a few hundredths of a second -> its seconds.
        reach: File of the package, relative to the root -> tests that together reach it, best first.
        reach_on_stock: The same on the stock engine, for files that the tests on the first one do not reach enough of.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    reach: Mapping[str, Sequence[str]] = field(default_factory=dict)
    reach_on_stock: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def read(cls) -> Measured:
        """Reads the file."""
        return cls(**json.loads(MEASURED.read_text()))

    def to_text(self) -> str:
        """Returns the text of the file."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    def runs(self, test: str, seed: str) -> bool:
        """Whether a lot, which depends only on the test and the seed, says that a test runs."""
        return _draw(test, seed) * math.sqrt(self.seconds.get(function_of(test), 0)) < LOT


def function_of(test: str) -> str:
    """Returns the test function of a case: its identifier without parameters."""
    return test.partition("[")[0]


def gate(tests: Sequence[str], seed: str, measured: Measured, certain: Collection[str] = ()) -> list[str]:
    """Returns the tests that the gate runs: those that a lot chooses, and those that a change certainly affects.

    Args:
        tests: Identifiers of all tests.
        seed: Seed of the lots, such as a commit.
        measured: How long tests take.
        certain: Tests that reach changed files.
    """
    return [test for test in tests if test in certain or measured.runs(test, seed)]


@dataclass(frozen=True)
class Affected:
    """What a change can affect.

    Attributes:
        certain: Tests that reach the changed files.
        failed: Tests that failed last.
        changed: Test files that have changed, or that read changed files outside the package and the tests.
        distance: File that imports a changed one -> number of imports in between; 0 for the changed ones.
        fills: Whether a case of every test function follows.
    """

    certain: frozenset[str]
    failed: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()
    distance: Mapping[str, int] = field(default_factory=dict)
    fills: bool = True

    @classmethod
    def by(cls, changed: Collection[str], failed: Collection[str], measured: Measured) -> Affected:
        """Returns what a change can affect.

        Args:
            changed: The changed files, relative to the root.
            failed: Tests that failed last.
            measured: Which tests reach which file.
        """
        certain = frozenset().union(*(measured.reach.get(path, ()) for path in changed))
        near = {path for path in changed if path.startswith("tests/")}.union(*map(_readers, changed))
        paths = [ROOT / path for path in changed if path.endswith(".py") and (ROOT / path).exists()]
        files = [*import_map.FILES, *TESTS.rglob("*.py")]
        distance = {str(path.relative_to(ROOT)): count for path, count in import_map.dependents(paths, files).items()}
        return cls(certain, frozenset(failed), frozenset(near), distance)

    def rank(self, test: str) -> int:
        """Returns 0 for a test that failed last, 1 for one that the change certainly affects, and 2 for all others."""
        if test in self.failed:
            return 0
        return 1 if test in self.certain or test.partition("::")[0] in self.changed else 2

    def chosen(self, tests: Sequence[str], seed: str, measured: Measured) -> list[str]:
        """Returns the tests to run, in this order, while there is time.

        First come those that failed, then the certain ones, then a case of each function, nearest to a change first.

        Args:
            tests: Identifiers of all tests.
            seed: Decides which case of a function is taken, and which of equally near files comes first.
            measured: How long tests take.
        """
        each = set(_one_each(tests, seed)) if self.fills else set()

        def runs(test: str) -> bool:
            known = test in each or test in self.certain or test in self.failed
            return known or (self.rank(test) == 1 and measured.runs(test, seed))

        def order(test: str) -> tuple[int, int, float]:
            file = test.partition("::")[0]
            return self.rank(test), self.distance.get(file, len(import_map.FILES)), _draw(file, seed)

        return sorted(filter(runs, tests), key=order)


def _readers(path: str) -> Sequence[str]:
    """Returns the test files that read a file outside the package and the tests."""
    places = [place for place in _BESIDE if path == place or path.startswith(f"{place}/")]
    return _BESIDE[max(places, key=len)] if places else ()


def _one_each(tests: Iterable[str], seed: str) -> list[str]:
    """Returns one case of each function."""
    cases: defaultdict[str, list[str]] = defaultdict(list)
    for test in tests:
        cases[function_of(test)].append(test)
    return [min(found, key=lambda test: _draw(test, seed)) for found in cases.values()]


def _draw(text: str, seed: str) -> float:
    """Returns a pseudo-random number from 0 to 1 that depends only on the text and the seed."""
    return int.from_bytes(hashlib.sha256(f"{seed} {text}".encode()).digest()[:8], "big") / 2**64


def last_failed(cache: Path) -> list[str]:
    """Returns the tests that failed last, from pytest's cache folder."""
    path = cache / "v" / "cache" / "lastfailed"
    return list(json.loads(path.read_text())) if path.exists() else []


def commit() -> str:
    """Returns the commit that is checked out, or "" without git."""
    return _git("rev-parse", "HEAD", must=False).strip()


def recent_base() -> str:
    """Returns the commit of this branch a day before the one that is checked out; "" if none is known."""
    time = _git("log", "-1", "--format=%ct", must=False).strip()
    before = f"--before={int(time) - RECENT}" if time else ""
    return before and _git("rev-list", "-1", "--first-parent", before, "HEAD", must=False).strip()


def changed_files(since: str = "") -> list[str]:
    """Returns the files of the working tree that differ from a commit, relative to the root.

    Args:
        since: The commit; by default, where this branch left ``main`` (the server's, if it is known).

    Raises:
        SystemExit: If git fails, such as for an unknown commit.
    """
    if not since:
        known = [name for name in ("main@{upstream}", "main") if _git("rev-parse", "--verify", "-q", name, must=False)]
        since = _git("merge-base", "HEAD", known[0]).strip() if known else "HEAD"
    changed = _git("diff", "--name-only", "--no-renames", since, "--").splitlines()
    return sorted({*changed, *_git("ls-files", "--others", "--exclude-standard").splitlines()})


def _git(*args: str, must: bool = True) -> str:
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=must)
        return "" if done.returncode else done.stdout
    except FileNotFoundError as error:
        if must:
            raise SystemExit("git is needed to find the changed files, but is not installed") from error
        return ""
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"git {' '.join(args)}: {error.stderr.strip()}") from error
