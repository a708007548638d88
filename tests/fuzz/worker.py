"""Who trains a case? A child process, whose end or silence is an outcome like others."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from .compare import Outcome, compare
from .recipe import Recipe

__all__ = ["Worker"]

# Cases of one process; afterwards another one begins with empty caches.
_CASES = 40
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.warm", "tests.fuzz.compare"])
_ENVIRONMENT = {
    "ORT_TRAINER_EXPORT_IN_PROCESS": "1",
    "ORT_TRAINER_PROGRESS": "0",
    "ORT_TRAINER_CACHE": "off",
    "OMP_NUM_THREADS": "1",
}


class Worker:
    """Compares cases, one after the other, in a child process that is replaced when it ends.

    Args:
        patience: Seconds without an answer for one way, after which it counts as a hang.

    Attributes:
        seconds: Processor seconds of all cases.
    """

    def __init__(self, patience: float = 120) -> None:
        self.seconds = 0.0
        self._patience = patience
        self._process: Any = None
        self._ends: Connection | None = None
        self._cases = 0

    def compare(self, recipe: Recipe, text: str | None = None) -> dict[str, Outcome]:
        """Returns the outcomes of a case, ``crash`` included.

        Args:
            recipe: The case.
            text: Its source text, if it is another one.
        """
        if self._process is None or self._cases >= _CASES:
            self._start()
        self._cases += 1
        assert self._ends is not None
        self._ends.send((recipe.to_text(), text))
        way, end = "case", time.monotonic() + self._patience
        while True:
            try:
                if not self._ends.poll(max(0.0, end - time.monotonic())):
                    self.close()
                    return {way: Outcome("crash", f"no answer in {self._patience:g} seconds")}
                answer = self._ends.recv()
            except (EOFError, ConnectionResetError):
                self._process.join(10)
                code = self._process.exitcode
                self.close()
                return {way: Outcome("crash", f"the process ended with {code}")}
            if isinstance(answer, str):
                # A C++ compiler has its turn for each graph.
                way, end = answer, time.monotonic() + self._patience * (5 if "compiled" in answer else 1)
            else:
                outcomes, seconds = answer
                self.seconds += seconds
                return {name: Outcome(*values) for name, values in outcomes.items()}

    def _start(self) -> None:
        self.close()
        self._ends, other = _FORKS.Pipe()
        with mock.patch.dict(os.environ, _ENVIRONMENT):
            self._process = _FORKS.Process(target=_answer, args=(other, _ENVIRONMENT), daemon=True)
            self._process.start()
        other.close()
        self._cases = 0

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
        if self._ends is not None:
            self._ends.close()
            self._ends = None


def _answer(ends: Connection, environment: dict[str, str]) -> None:
    """Answers each case with its ways, as they begin, and its outcomes."""
    import torch

    os.environ.update(environment)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    while True:
        try:
            recipe, text = ends.recv()
        except EOFError:
            return
        start = time.process_time()
        found = compare(Recipe.from_text(recipe), text, ends.send)
        outcomes = {way: (outcome.kind, outcome.text, outcome.place) for way, outcome in found.items()}
        ends.send((outcomes, time.process_time() - start))
