"""``make fuzz``: draws cases until the time is over, shrinks what fails, and says where the scripts are."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import random
import re
import sys
import time
from pathlib import Path

from ..harness.import_map import ROOT
from .compare import BAD, Outcome
from .program import source, uses_layers
from .recipe import Recipe, draw
from .script import script
from .shrink import shrink
from .worker import Worker

__all__ = ["Fuzzer", "main"]

BUILD = ROOT / "build" / "fuzz"


class Fuzzer:
    """Trains cases, and keeps what fails.

    Args:
        folder: Where the scripts go; None to write none.
        worker: Who trains.

    Attributes:
        counts: (way, outcome) -> number of cases.
        failures: A line for each failure of its own cause.
        refusals: What was refused -> number of cases, and the first seed.
    """

    def __init__(self, folder: Path | None, worker: Worker | None = None) -> None:
        self.worker = Worker() if worker is None else worker
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.failures: list[str] = []
        self.refusals: dict[str, list[int]] = {}
        self.cases = 0
        self._folder = folder
        self._causes: set[tuple[object, ...]] = set()

    def take(self, recipe: Recipe, text: str | None = None) -> None:
        """Compares a case; shrinks a failure of a new cause, and writes its script."""
        outcomes = self.worker.compare(recipe, text)
        self.cases += 1
        for way, outcome in outcomes.items():
            self.counts[way, outcome.kind] += 1
            if outcome.kind == "equal" and outcome.text.startswith("in PyTorch"):
                self.counts[way, "equal, in PyTorch"] += 1
            if outcome.kind in ("refused", "dropped", "PyTorch's own") or outcome.text.startswith("in PyTorch"):
                cause = f"{way} {outcome.kind}: {re.sub(r'[0-9]+', '#', outcome.text)[:160]}"
                self.refusals.setdefault(cause, []).append(recipe.seed)
            if outcome.kind in BAD:
                self._failed(recipe, way, outcome)

    def _failed(self, recipe: Recipe, way: str, outcome: Outcome) -> None:
        if outcome.kind == "raw error" and (way, *outcome.signature) in self._causes:
            return
        self._causes.add((way, *outcome.signature))
        if way == "case":  # PyTorch itself crashes
            small = recipe
        else:
            small = dataclasses.replace(recipe, ways=(way,))
            last = {small: outcome}

            def fails(candidate: Recipe) -> bool:
                found = self.worker.compare(candidate).get(way, Outcome("equal"))
                last[candidate] = found
                return found.signature == outcome.signature

            small = shrink(small, fails, 10 if "compiled" in way else 50)
            outcome = last[small]
        parts = (*sorted({*uses_layers(small)}), *(kind for _, kind, _ in small.settings), *dict(small.options))
        parts = (*parts, *(str(what[-1] if len(what) == 1 else what[1:]) for _, what in small.changes))
        cause = (way, outcome.kind, parts, outcome.place)
        if cause in self._causes:
            return
        self._causes.add(cause)
        line = f"CASE={recipe.seed} {way}, {outcome.kind}: {', '.join(parts) or small.loss}: {outcome.text[:200]}"
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"{recipe.seed}_{way.replace(' ', '_')}.py"
            path.write_text(script(small, "pytorch" if way == "case" else way, outcome))
            line += f" ({path})"
        self.failures.append(line)
        print(line, flush=True)

    def summary(self) -> str:
        """Returns what ran, and what came out."""
        ways = list(dict.fromkeys(way for way, _ in self.counts))
        lines = [f"{self.cases} cases, {self.worker.seconds:.0f} s of processor time"]
        for way in ways:
            found = ", ".join(f"{count} {kind}" for (name, kind), count in self.counts.items() if name == way)
            lines.append(f"  {way}: {found}")
        lines += [f"{len(self.failures)} failures of their own cause", *(f"  {line}" for line in self.failures)]
        return "\n".join(lines)

    def write(self, path: Path, seed: int) -> None:
        """Writes the summary, and below it what was refused or left to PyTorch, most frequent first."""
        refusals = sorted(self.refusals.items(), key=lambda item: -len(item[1]))
        lines = [f"{len(seeds)} {cause} CASE={seeds[0]}" for cause, seeds in refusals]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([f"SEED={seed}", self.summary(), "", *lines, ""]))


def main() -> int:
    """Runs the command; returns 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", default="", help="of the first case; by default a fresh one")
    parser.add_argument("--case", default="", help="repeats one case")
    parser.add_argument("--print", action="store_true", help="print the source text of the case")
    given = parser.parse_args()
    fuzzer = Fuzzer(BUILD)
    if given.case:
        recipe = draw(int(given.case))
        if given.print:
            print(source(recipe))
        for way, outcome in fuzzer.worker.compare(recipe).items():
            print(f"{way}: {outcome.kind} {outcome.text} {outcome.place}", flush=True)
        fuzzer.take(recipe)
    else:
        seed = int(given.seed) if given.seed else random.SystemRandom().randrange(10**8) * 100
        print(f"SEED={seed}", flush=True)
        end = time.monotonic() + 60 * given.minutes
        while time.monotonic() < end:
            fuzzer.take(draw(seed + fuzzer.cases))
            if fuzzer.cases % 20 == 0:
                print(f"{fuzzer.cases} cases", flush=True)
                fuzzer.write(BUILD / f"summary_{seed}.txt", seed)
        fuzzer.write(BUILD / f"summary_{seed}.txt", seed)
        print(fuzzer.summary())
    fuzzer.worker.close()
    return int(bool(fuzzer.failures))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
