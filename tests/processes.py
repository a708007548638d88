"""Processes that start in milliseconds: forks of a process that has imported PyTorch and this package.

A new interpreter needs four seconds of CPU time until it can train. This is for tests that need processes, but not new
interpreters; no exit handlers run in them.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest import mock

from .harness.contexts import now_runs

_ROOT = Path(__file__).parents[1]
processor_seconds = 0.0
"""CPU seconds of all processes so far that ended by themselves, including their children."""
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.warm"])


@dataclass(frozen=True)
class Call:
    """A call of a module's function in a separate process.

    Attributes:
        function: The function.
        args: Its arguments.
        environment: Environment variables of the process; None for those of this one.
    """

    function: Callable[..., object]
    args: tuple[Any, ...] = ()
    environment: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Ended:
    """The result of a process.

    Attributes:
        code: Its exit code: 1 after an exception, -N if signal N killed it.
        output: Its output on both streams.
    """

    code: int | None
    output: str


def run(calls: Sequence[Call], timeout: float = 120) -> list[Ended]:
    """Runs all calls in parallel, and returns when all processes have ended.

    Args:
        calls: The calls.
        timeout: Seconds for all calls, after which remaining processes are killed.
    """
    # The server imports from this folder; its libraries read the other variable when they are loaded.
    with mock.patch.dict(os.environ, PYTHONPATH=_with_root(), OMP_NUM_THREADS="1"):
        ensure_running()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(number)) for number in range(len(calls))]
        started = [
            _FORKS.Process(target=_make, args=(call, dict(call.environment or os.environ), output))
            for call, output in zip(calls, outputs, strict=True)
        ]
        try:
            for process in started:
                process.start()
            end = time.monotonic() + timeout
            for process in started:
                process.join(max(0.0, end - time.monotonic()))
        finally:
            for process in started:
                if process.pid is not None:
                    process.kill()
                    process.join()
        global processor_seconds
        processor_seconds += sum(float(_used(output).read_text()) for output in outputs if _used(output).exists())
        return [
            Ended(process.exitcode, output.read_text(errors="replace") if output.exists() else "")
            for process, output in zip(started, outputs, strict=True)
        ]


def _with_root() -> str:
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(_ROOT)]))


def _used(output: Path) -> Path:
    """Returns the file in which a process writes its CPU seconds."""
    return output.with_suffix(".seconds")


def _make(call: Call, environment: dict[str, str], output: Path) -> None:
    """Runs a call in its process."""
    with output.open("wb", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    if "COVERAGE_PROCESS_START" in environment:
        now_runs(environment.get("PYTEST_CURRENT_TEST", ""))
    try:
        call.function(*call.args)
    finally:
        _used(output).write_text(str(sum(os.times()[:4])))
