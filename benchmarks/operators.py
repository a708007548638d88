"""Compares PyTorch's test samples of every operator with PyTorch, forward and backward.

It writes docs/reference/operators.md. Run it with ``make operators``; it takes about half an hour. Workers write their
findings to ``build/operators.jsonl``, one line per operator, and a run continues where the last one stopped;
``--fresh`` starts over. ``--only NAME`` prints the findings for some operators and writes nothing. If an operator
crashes or hangs a worker, that is its finding, and a new worker continues.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import os
import queue
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FOUND = ROOT / "build" / "operators.jsonl"
# Samples in one graph.
TOGETHER = 12
AGREES, UNTRANSLATED, REFUSED, WRONG, OPEN, SKIPPED = (
    "agrees", "no translation", "refused", "wrong", "left open", "skipped"
)  # fmt: skip
_NO_TRANSLATION = (
    "has no ONNX translation",
    "gives complex numbers",
    "depends on the values of tensors, which a graph",
)

Finding = dict[str, Any]
"""``operator``, ``counts`` (outcome -> number of samples) and ``messages`` (outcome, sample and edge case, what)."""


class Inspection:
    """All samples of an operator."""

    def __init__(self, name: str, limit: int) -> None:
        self.name, self.limit = name, limit
        self.counts: collections.Counter[str] = collections.Counter()
        self.messages: list[tuple[str, str, str]] = []

    def finding(self) -> Finding:
        """Compares all samples."""
        import operator_samples

        op = operator_samples.operators()[self.name]
        if op.name in operator_samples.RANDOM:
            self._note(SKIPPED, "all", "random by nature")
        else:
            calls = []
            try:
                calls = list(operator_samples.samples(op, self.limit))
            except Exception as error:
                self._note(SKIPPED, "all", f"PyTorch has no samples: {error}")
            for start in range(0, len(calls), TOGETHER):
                self._inspect(calls[start : start + TOGETHER])
        return {"operator": self.name, "counts": dict(self.counts), "messages": self.messages}

    def _note(self, outcome: str, sample: str, message: str) -> None:
        self.counts[outcome] += 1
        if outcome != AGREES:
            self.messages.append((outcome, sample, message))

    def _inspect(self, calls: Sequence[tuple[int, Any]]) -> None:
        """Compares samples in one graph; if that fails, each in its own graph."""
        before, noted = self.counts.copy(), len(self.messages)
        try:
            self._compare(calls)
        except Exception as error:
            self.counts, self.messages = before, self.messages[:noted]
            if len(calls) > 1:
                for call in calls:
                    self._inspect([call])
            else:
                self._note(_outcome(error), f"{calls[0][0]}", _line(error))

    def _compare(self, calls: Sequence[tuple[int, Any]]) -> None:
        import torch
        from operator_samples import EDGES, edge_values, open_question

        from tests.export.against_pytorch import Comparison, difference

        comparison = Comparison([call for _, call in calls])
        for edge in ("", *EDGES):
            if edge:
                draw = torch.Generator().manual_seed(1)
                parameters = comparison.module.named_parameters()
                comparison.set({name: edge_values(p, edge, draw) for name, p in parameters if name != "anchor"})
            try:
                ours: Any = comparison.ours()
            except Exception as error:
                if len(calls) > 1:
                    raise
                ours = error
            for place, (number, _) in enumerate(calls):
                if edge and not comparison.module.named(place):
                    continue
                sample = f"{number}{edge and ', '}{edge}"
                question = open_question(self.name, edge)
                if question is not None and not question[0]:
                    self._note(OPEN, sample, question[1])  # PyTorch may even crash
                    continue
                try:
                    theirs = comparison.theirs(place)
                except Exception as error:
                    self._note(SKIPPED, sample, f"PyTorch: {_line(error)}")
                    continue
                if isinstance(ours, Exception):
                    self._note(_outcome(ours), sample, _line(ours))
                    continue
                what = difference(ours[place], theirs, values_only=question is not None)
                self._note(AGREES if what is None else WRONG, sample, what or "")


def _outcome(error: Exception) -> str:
    from tests.export.against_pytorch import NotComparable

    if isinstance(error, NotComparable):
        return SKIPPED
    return UNTRANSLATED if any(part in str(error) for part in _NO_TRANSLATION) else REFUSED


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return f"{type(error).__name__}: {text}"[:400]


def work(limit: int) -> None:
    """Reads operators from stdin and writes the findings."""
    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for line in sys.stdin:
        answers.write(json.dumps(Inspection(line.strip(), limit).finding()) + "\n")
        answers.flush()


class Worker:
    """A process that inspects operators, and is replaced when one of them ends it."""

    def __init__(self, limit: int, timeout: float) -> None:
        self._limit, self._timeout = limit, timeout
        self._process: subprocess.Popen[str] | None = None

    def inspect(self, operator: str) -> Finding:
        """Returns the finding for an operator, even if it ends the process."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        ended = threading.Timer(self._timeout, process.kill)
        ended.start()
        start = time.perf_counter()
        process.stdin.write(f"{operator}\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        ended.cancel()
        if answer:
            return {**json.loads(answer), "seconds": round(time.perf_counter() - start, 1)}
        self._process = None
        code = process.wait()
        hung = time.perf_counter() - start >= self._timeout
        what = f"took more than {self._timeout:.0f} s" if hung else f"the process ended with {code}"
        return {"operator": operator, "counts": {SKIPPED if hung else WRONG: 1},
                "messages": [(SKIPPED if hung else WRONG, "all", what)]}  # fmt: skip

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "ORT_TRAINER_EXPORT_IN_PROCESS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--work", "--limit", str(self._limit)]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


def inspect_all(names: Sequence[str], limit: int, timeout: float, jobs: int) -> Iterator[Finding]:
    """Inspects operators in several processes; yields findings as they arrive."""
    todo: queue.Queue[str] = queue.Queue()
    done: queue.Queue[Finding] = queue.Queue()
    for name in names:
        todo.put(name)

    def run() -> None:
        worker = Worker(limit, timeout)
        while True:
            try:
                done.put(worker.inspect(todo.get_nowait()))
            except queue.Empty:
                return worker.close()

    for _ in range(jobs):
        threading.Thread(target=run, daemon=True).start()
    for _ in names:
        yield done.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="an expression that matches the names of the operators; nothing is written")
    parser.add_argument("--limit", type=int, default=8, help="samples of an operator, evenly spread")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for an operator")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run found")
    parser.add_argument("--found", type=Path, default=FOUND, help="where the findings are kept")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.limit)
        return
    import operator_report
    import operator_samples

    names = list(operator_samples.operators())
    if arguments.only is not None:
        chosen = [name for name in names if re.search(arguments.only, name)]
        for finding in inspect_all(chosen, arguments.limit, arguments.timeout, arguments.jobs):
            show(finding, everything=True)
        return
    if arguments.fresh:
        arguments.found.unlink(missing_ok=True)
    arguments.found.parent.mkdir(parents=True, exist_ok=True)
    known = read(arguments.found)
    rest = [name for name in names if name not in known]
    with arguments.found.open("a") as file:
        for finding in inspect_all(rest, arguments.limit, arguments.timeout, arguments.jobs):
            file.write(json.dumps(finding) + "\n")
            file.flush()
            show(finding)
    operator_report.write(list(read(arguments.found).values()), arguments.limit)


def read(path: Path) -> dict[str, Finding]:
    """Returns earlier findings by operator."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {finding["operator"]: finding for finding in map(json.loads, lines)}


def show(finding: Finding, everything: bool = False) -> None:
    print(f"{finding['operator']}: {finding['counts']} {finding.get('seconds', '')}", flush=True)
    shown: set[str] = set()
    for outcome, sample, message in finding["messages"]:
        if (everything or outcome == WRONG) and message[:25] not in shown:
            shown.add(message[:25])
            print(f"    {outcome} [{sample}] {message[:200]}", flush=True)


if __name__ == "__main__":
    main()
