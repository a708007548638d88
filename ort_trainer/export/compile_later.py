"""Compiles loops in a child process while training goes on, and keeps the choice that steps then make.

::

    export -> steps on PyTorch's kernels ---> steps in turns -> steps on the faster kernels
        |                                 ^                       |
        '-> child process: loops ---------'                       '-> cache of exports
"""

from __future__ import annotations

import dataclasses
import logging
import os
import select
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from ..capture.isolation import can_isolate
from ..core.errors import ExportError
from ..core.forked import end, end_with_parent, forked
from ..kernels.loops.compiler import missing_compiler
from ..step import Step
from ..step.cache import Export, export_cache

_log = logging.getLogger(__name__)
# Of four parts of a busy core it gets one.
_NICENESS = 5
# Each takes the memory of an export.
_MOST = 2
# What a graph for other kernels must have in common with the one that it replaces.
_INTERFACE = (
    *("inputs", "outputs", "left", "loss", "state", "gradients", "random", "loss_scale"),
    *("buffer_updates", "input_updates"),
)


def objection() -> str:
    """Returns why nothing can be compiled while training goes on; "" if it can."""
    if not can_isolate():
        return (
            "an export can't run in a child process here, which needs Linux, the main thread, no CUDA, and no "
            "ORT_TRAINER_EXPORT_IN_PROCESS"
        )
    if len(os.sched_getaffinity(0)) == 1:
        return "there is one core only, which trains"
    return missing_compiler()


class Compilation:
    """A graph that a child process of low priority exports for other kernels.

    Args:
        step: The graph for the kernels that train until then, or the forward pass of a call.
        backward: The backward passes of a call.
        export: Exports the other one; called in the child.

    Attributes:
        step: As given.
    """

    def __init__(self, step: Step, backward: Sequence[Step], export: Callable[[], Export]) -> None:
        self.step, self._backward = step, backward
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the child writes

        def answer(writer: int) -> None:
            end_with_parent()
            os.nice(_NICENESS)
            os.environ["ORT_TRAINER_EXPORT_IN_PROCESS"] = "1"  # no further processes
            torch.set_num_threads(1)
            try:
                text = b"+" + export().to_bytes()
            except Exception as error:
                text = b"-" + (" ".join(str(error).split()) or type(error).__name__).encode()
            self._file.write(text)
            self._file.flush()
            os.write(writer, b"+")  # all of it is there

        self._child, self._reader = forked(answer)
        self._ended = select.poll()
        self._ended.register(self._reader)
        self._end = weakref.finalize(self, _end, os.getpid(), self._child, self._reader)

    def result(self) -> tuple[Step, Sequence[Step]] | None:
        """Returns the graph, and the backward passes of a call; None as long as the child works.

        Raises:
            ExportError: If the graph can't be exported, or can't take the other one's place.
        """
        if not self._ended.poll(0):
            return None
        is_whole = os.read(self._reader, 1) == b"+"
        self._end()
        with self._file:
            self._file.seek(0)
            answer = self._file.read() if is_whole else b""
        if answer[:1] != b"+":
            raise ExportError(answer[1:].decode() or "the process that compiled has died")
        self._export = Export.from_bytes(answer[1:])
        step = dataclasses.replace(self._export.step, kept=self.step.kept)
        differing = [name for name in _INTERFACE if getattr(step, name) != getattr(self.step, name)]
        if [_gradients(each) for each in self._export.backward] != [_gradients(each) for each in self._backward]:
            differing.append("backward passes")
        if differing or step.assumptions:
            raise ExportError(f"the compiled graph has other {', '.join(differing) or 'branches'}")
        return step, self._export.backward

    def chosen(self, won: bool, seconds: tuple[float, float]) -> None:
        """Logs the choice, and keeps it with the export, for later processes.

        Args:
            won: Whether the graph of this compilation is the faster one.
            seconds: The time of a step's or call's passes on PyTorch's kernels, and with loops.
        """
        own, others = (1000 * each for each in seconds)
        winner = "compiled loops" if won else "PyTorch's kernels"
        what = "call" if self._backward else "step"
        why = f"a {what}'s passes took {own:.4g} ms on PyTorch's kernels, and {others:.4g} ms with compiled loops"
        _log.info("%s: training goes on with %s", why, winner)
        self._keep(won, f"{winner}, as {why}")

    def _keep(self, won: bool, why: str) -> None:
        cache, key = export_cache(), Path(self.step.kept).stem
        if cache is None or not key:
            return
        export = self._export
        if not won:
            data, _ = cache.load(key)
            if data is None:  # evicted meanwhile
                return
            try:
                export = Export.from_bytes(data)
            except ValueError:  # damaged meanwhile, which the next process says
                return
        chosen = dataclasses.replace(export.step, measured=why)
        problem = cache.store(key, dataclasses.replace(export, step=chosen).to_bytes())
        if problem:
            _log.warning("the choice of kernels is not kept: %s", problem)


Take = Callable[[Compilation, Step, Sequence[Step]], None]


class Compilations:
    """The graphs that are being compiled while training goes on.

    Attributes:
        running: Those that have not been taken.
    """

    def __init__(self) -> None:
        self.running: list[tuple[Compilation, Take]] = []

    def begin(self, begin: Callable[[], Compilation | None], take: Take) -> None:
        """Begins one, if not too many are running.

        Args:
            begin: Begins it; returns None if there is nothing to compile.
            take: Takes it with its graphs when it has ended.
        """
        if len(self.running) >= _MOST:
            _log.info("this graph stays on PyTorch's kernels: others are being compiled already")
            return
        compilation = begin()
        if compilation is not None:
            self.running.append((compilation, take))

    def take(self) -> None:
        """Lets graphs that were compiled meanwhile be taken."""
        running, self.running = self.running, []
        for compilation, take in running:
            try:
                result = compilation.result()
                if result is None:
                    self.running.append((compilation, take))
                else:
                    take(compilation, *result)
            except (ExportError, RuntimeError, ValueError) as error:
                _log.info("training stays on PyTorch's kernels: %s", error)


def _gradients(step: Step) -> tuple[Any, ...]:
    """Returns which gradients a backward pass takes and returns."""
    return [*step.tangents], {*step.gradients}, {*step.input_gradients}


def _end(owner: int, child: int, reader: int) -> None:
    """Ends the child, in the process that began it."""
    if os.getpid() == owner:
        os.close(reader)
        end(child)
