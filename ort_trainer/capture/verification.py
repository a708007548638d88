"""Which runs of a graph are repeated in PyTorch: the option ``debug.verify_every``."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import logging
import math
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from ..core import epochs
from ..core.errors import VerificationError, warn
from ..engine.programs.collectives import COLLECTIVES
from ..fx.operator_table import has_users_operators
from ..step import Step

_log = logging.getLogger(__name__)

_EVERY = 256
"""Runs after which one is repeated at the latest, if time allows."""
_FIRST = 100
"""The number of first runs, of which the 1st, 2nd, 4th and so on are repeated whatever that takes."""
_COSTS = (0.1, 0.01)
"""The part of the time that other repetitions may take among the first runs, and all later."""
_OF_FREE_MEMORY = 0.1


class Verification:
    """Decides which runs are repeated.

    With ``"auto"``, the first run of each graph is, then runs 2, 4, 8 and so on, but at least every 256th, and the run
    after each :meth:`expect` or beginning of an epoch. From the hundredth run on, all of that only as far as it takes a
    hundredth of the time, and before that, what is expected only as far as it takes a tenth. None is where
    :func:`~ort_trainer.register_operator` has asked for other results than PyTorch's.

    Args:
        every: A number n, to repeat each n-th run, or ``"auto"``.

    Attributes:
        is_automatic: Whether ``every`` is ``"auto"``.
        last: The number of the last run that was equal, 0 for none.
        has_renewed: Whether graphs were made anew, because a run was different.
    """

    def __init__(self, every: int | str) -> None:
        self.is_automatic = every == "auto"
        self._every = 0 if isinstance(every, str) else every
        self.last, self.has_renewed, self._epochs = 0, False, epochs.count
        self._count, self._of_step = 0, dict[int, _Runs]()  # by id
        self._is_expected, self._expected_at = False, 0
        self._began, self._spent, self._last_cost = 0.0, 0.0, 0.0

    @property
    def number(self) -> int:
        """The number of the next run."""
        return self._count + 1

    def expect(self) -> None:
        """Has the next run repeated, as something was changed that graphs may depend on."""
        self._is_expected = True

    def renews(self, error: VerificationError, renew: Callable[[], None]) -> bool:
        """Returns whether graphs are made anew after a first difference, which this says in a warning.

        Args:
            error: What differs.
            renew: Has graphs made anew.
        """
        if not self.is_automatic or self.has_renewed:
            return False
        self.has_renewed = True
        warn(f"{error}\nThe graphs are made anew, once. If that helps, something has changed that is not watched")
        renew()
        return True

    def is_due(self, step: Step) -> bool:
        """Returns whether the next run of a graph is to be repeated; counts it if not.

        Args:
            step: What the graph computes, or its forward pass.
        """
        of_step = self._runs_of(step)
        runs = of_step.count + 1
        if self.is_automatic:
            self._is_expected |= epochs.count != self._epochs
            self._epochs = epochs.count
            is_early, is_power = self._count < _FIRST, runs & (runs - 1) == 0
            if self._count in (0, _FIRST):
                self._began, self._spent = time.process_time(), 0.0
            self._is_expected |= is_power or self._count - self._expected_at >= _EVERY
            is_due = runs == 1 or (is_early and is_power) or (self._is_expected and self._affords(_COSTS[not is_early]))
            # Processes have clocks and memory of their own: one that repeats a step alone would wait for the others.
            if is_due and (not of_step.can_be_repeated or has_users_operators() or _communicates(step)):
                of_step.can_be_repeated = is_due = False
        else:
            is_due = (self._count + 1) % self._every == 0
        if not is_due:
            self._count += 1
            of_step.count = runs
        return is_due

    def _affords(self, cost: float) -> bool:
        """Returns whether one more repetition takes no larger part of the time than given."""
        # Of the processor's time, as a run's pauses are not its own.
        return (time.process_time() - self._began) * cost >= self._spent + self._last_cost

    def passed(self, step: Step, began: float) -> None:
        """Counts a run that was repeated and is valid.

        Args:
            step: What its graph computes.
            began: When its repetition began; see ``time.process_time``.
        """
        self._count += 1
        self._runs_of(step).count += 1
        self.last, self._is_expected, self._expected_at = self._count, False, self._count
        self._last_cost = time.process_time() - began
        self._spent += self._last_cost

    def give_up(self, step: Step, error: Exception) -> None:
        """Repeats no further runs of a graph, as PyTorch raises an error."""
        _log.info("runs are not compared with PyTorch, which can't run them: %s", error)
        self._runs_of(step).can_be_repeated = False

    def _runs_of(self, step: Step) -> _Runs:
        # A run that was due may end with the graph of another branch, or with one that was made anew.
        of_step = self._of_step.get(id(step))
        if of_step is None or of_step.step() is not step:  # one that is gone may have had this address
            of_step = self._of_step[id(step)] = _Runs(weakref.ref(step))
        return of_step


@dataclasses.dataclass
class _Runs:
    """How often a graph has run, and whether PyTorch can repeat it."""

    step: weakref.ref[Step]
    count: int = 0
    can_be_repeated: bool = True


def _communicates(step: Step) -> bool:
    """Returns whether a step has operations of several processes together."""
    return any(f'"{COLLECTIVES}.' in text for text in step.program_texts)


def spare_memory(device: torch.device) -> float:
    """Returns how many bytes a repetition may take beside its inputs and results: a tenth of the free memory.

    Args:
        device: Where it runs.
    """
    if device.type == "cuda":
        return _OF_FREE_MEMORY * torch.cuda.mem_get_info(device)[0]
    return _OF_FREE_MEMORY * min(_free_of_machine(), _free_of_container())


def _free_of_machine() -> float:
    try:
        return _fields("/proc/meminfo")["MemAvailable:"] * 1024.0
    except OSError:  # not Linux
        return math.inf


def _free_of_container() -> float:
    root = "/sys/fs/cgroup/memory"
    try:
        limit, used = (float(Path(f"{root}.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        return limit - used + _fields(f"{root}.stat").get("inactive_file", 0)  # the kernel drops these if it needs room
    except (OSError, ValueError):  # there is no limit
        return math.inf


def _fields(path: str) -> dict[str, int]:
    lines = map(str.split, Path(path).read_text(encoding="ascii").splitlines())
    return {name: int(value) for name, value, *_ in lines}


@contextlib.contextmanager
def repeating() -> Iterator[None]:
    """Drops what this thread prints, logs and warns of in the context, as all of it was said before.

    The garbage collector rests meanwhile: looking through all objects of the process, because of those of the
    repetition, takes longer than the repetition.
    """
    handle: Any = logging.Logger.callHandlers
    mine = threading.get_ident()

    def handled(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.thread != mine:
            handle(logger, record)

    with (
        _collector_resting(),
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch.object(logging.Logger, "callHandlers", handled),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _collector_resting() -> Iterator[None]:
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def parts_of(result: Any, is_part: Callable[[Any], bool]) -> list[Any]:
    """Returns the parts of a nested result.

    Args:
        result: The result.
        is_part: Says of a container whether it is a part itself, instead of what it contains.
    """
    return tree_leaves(result, is_leaf=is_part)
