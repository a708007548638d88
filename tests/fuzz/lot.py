"""What machines that draw programs share: running a program here and in PyTorch, judging, shrinking, a command."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import linecache
import logging
import os
import random
import re
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

import ort_trainer
from ort_trainer.module.fallback import Fallback

from .compare import BAD, REPORTED, Outcome, explodes

__all__ = ["drawn", "judge", "main", "running", "shrink", "without_one"]

_NAME = "drawn"
_PACKAGE = f"{Path(ort_trainer.__file__).parent}{os.sep}"
# PyTorch runs the program, so none of these is of the program. The others, PyTorch's exporters raise themselves.
_MISTAKES = (AssertionError, AttributeError, IndexError, KeyError, NameError, TypeError)
_EXPLAINED = re.compile(f"could not capture Net: (AttributeError|NameError):|{REPORTED}")


class _Case(Protocol):
    def source(self) -> str: ...
    def smaller(self) -> Iterator[Any]: ...


_C = TypeVar("_C", bound=_Case)


@contextlib.contextmanager
def running(text: str) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Executes a program; gives its global variables, and the warnings of the context, once that has ended."""
    linecache.cache["<drawn>"] = (len(text), None, text.splitlines(True), "<drawn>")
    module, found = types.ModuleType(_NAME), list[str]()
    sys.modules[_NAME] = module
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(text, "<drawn>", "exec"), vars(module))
        yield vars(module), found
    found += [str(warning.message) for warning in caught]


def judge(theirs: Callable[[], Any], ours: Callable[[], Any], tolerance: float) -> Outcome:
    """Returns what becomes of a program.

    Args:
        theirs: Runs it in PyTorch, and returns pairs of a name and a value.
        ours: Runs it here, and returns such pairs, and why PyTorch ran a part of it.
        tolerance: Of floating-point numbers.
    """
    try:
        expected = theirs()
    except Exception as error:
        return Outcome("dropped", f"{type(error).__name__}: {error}")
    reasons: list[Exception] = []
    run: Any = Fallback.run

    def noted(fallback: Fallback, why: Exception, *rest: Any) -> Any:
        reasons.append(why)
        return run(fallback, why, *rest)

    try:
        with mock.patch.object(Fallback, "run", noted):
            found, reason = ours()
    except Exception as error:
        return _of_error(error)
    for outcome in map(_of_error, reasons):
        if outcome.kind == "raw error" and outcome.place.startswith(_PACKAGE):
            return outcome
    for (name, mine), (_, other) in zip(found, expected, strict=True):
        if not _is_same(mine, other, tolerance):
            losses = [value.abs().item() for key, value in expected if key.startswith("loss")]
            if losses and explodes(losses):
                return Outcome("chaotic")
            return Outcome("wrong", f"{name}: {mine} for {other} {reason}")
    return Outcome("in PyTorch" if reason else "equal", reason)


def _of_error(error: Exception) -> Outcome:
    """Returns ``refused`` for an error that the package raises, or that PyTorch's kernels raise within it."""
    last, text = traceback.extract_tb(error.__traceback__)[-1], f"{type(error).__name__}: {error}"
    is_mistake = isinstance(error, _MISTAKES) and not (last.line or "").startswith("raise ")
    refused = last.filename.startswith(_PACKAGE) and not is_mistake and not _EXPLAINED.search(text)
    return Outcome("refused" if refused else "raw error", text, last.filename)


def _is_same(mine: Any, other: Any, tolerance: float) -> bool:
    if isinstance(mine, FakeTensor):  # a capture has left it
        return False
    if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
        size = other.double().abs().nan_to_num().max().item() if other.numel() else 0
        near = {"rtol": tolerance, "atol": tolerance * max(0.1, size), "equal_nan": True}
        same = (mine.shape, mine.dtype) == (other.shape, other.dtype)
        return same and torch.allclose(mine.double(), other.double(), **near)
    return type(mine) is type(other) and bool(mine == other)


def shrink(case: _C, outcome: Outcome, compare: Callable[[_C], Outcome]) -> _C:
    """Returns the smallest case found that fails in the same way."""
    for smaller in case.smaller():
        if compare(smaller).signature == outcome.signature:
            return shrink(smaller, outcome, compare)
    return case


def drawn(
    draw: Callable[[int], _C], compare: Callable[[_C], Outcome], seed: int, seconds: float = 20.0
) -> Iterator[tuple[int, Outcome]]:
    """Yields cases by their seeds, with what becomes of them: a hundred, or as many as begin in a processor time."""
    start = time.process_time()
    for case in range(seed, seed + 100):
        if time.process_time() - start > seconds:
            break
        yield case, compare(draw(case))


def main(
    text: str | None, draw: Callable[[int], _C], compare: Callable[[_C], Outcome], small: tuple[str, ...] = BAD
) -> int:
    """Runs the command of a machine; returns 1 if something is wrong, or raises an error that is not the package's own.

    Args:
        text: What the command does.
        draw: Returns the case with a seed.
        compare: Returns what becomes of a case.
        small: The outcomes that are shrunk. Of others, refusals are counted by their text.
    """
    os.environ.update({"ORT_TRAINER_EXPORT_IN_PROCESS": "1", "ORT_TRAINER_PROGRESS": "0", "ORT_TRAINER_CACHE": "off"})
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**8) * 1000)
    parser.add_argument("--case", type=int, help="repeats one case")
    given = parser.parse_args()
    if given.case is not None:
        print(draw(given.case).source(), compare(draw(given.case)))
        return 0
    print(f"SEED={given.seed}", flush=True)
    counts, refusals = collections.Counter[str](), collections.Counter[str]()
    end = time.monotonic() + 60 * given.minutes
    while time.monotonic() < end:
        seed = given.seed + counts.total()
        outcome = compare(draw(seed))
        counts[outcome.kind] += 1
        if outcome.kind in small:
            case = shrink(draw(seed), outcome, compare)
            print(f"--case {seed} {outcome.kind}: {compare(case).text[:300]}\n    {case}", flush=True)
        elif outcome.kind == "refused":
            refusals[re.sub(r"'[^']*'|[0-9]+", "#", outcome.text)[:150]] += 1
    for refusal, count in refusals.most_common():
        print(f"refused {count}: {refusal}")
    print(f"{counts.total()} cases:", ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return int(any(counts[kind] for kind in BAD))


def without_one(case: Any, lists: dict[str, int]) -> Iterator[Any]:
    """Yields a case without one line each of some fields, of which each keeps at least so many lines."""
    for name, least in lists.items():
        lines = getattr(case, name)
        for at in reversed(range(len(lines) if len(lines) > least else 0)):
            yield dataclasses.replace(case, **{name: lines[:at] + lines[at + 1 :]})
