"""Contenders that take turns: times training steps on a machine whose speed varies.

Each contender is a separate process, because the thread pools of two runtimes disturb each other. While one computes a
short block of steps, the others sleep on a pipe; there are several rounds. The comparison uses the medians of the
blocks of a round, so a slow minute affects all contenders alike.

The processes communicate in lines. They print ``{"startup": seconds, "loss": number}`` after their first step, then
read requests: ``steps 12`` returns the times of the steps, their mean loss and the peak memory; ``profile 10`` returns
where the time of a step goes. This file must run with only the standard library, because contenders may have their own
environments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Contender", "Profile", "Result", "Training", "measure", "memory", "ratio", "serve"]

Profile = dict[str, Any]
"""``milliseconds`` of a step, those in ``products``, ``optimizer`` and ``overhead``, and ``operators``: names and
milliseconds."""


@dataclasses.dataclass(frozen=True)
class Training:
    """The training in a contender's process.

    Attributes:
        step: Runs one training step and returns the loss.
        trainer: The trainer, if it is an ORTTrainer.
        accumulation: Calls of ``step`` per weight update.
        is_settled: Returns whether it trains as later processes will; a process ends when it does.
    """

    step: Callable[[], Any]
    trainer: Any = None
    accumulation: int = 1
    is_settled: Callable[[], bool] = lambda: True

    def profile(self, steps: int) -> Profile | None:
        """Returns where the time of a step goes; None if the trainer can't tell."""
        if not hasattr(self.trainer, "profile"):
            return None
        windows = -(-steps // self.accumulation)
        profile = self.trainer.profile(steps=windows * self.accumulation, trace=None)
        while not profile.done:
            self.step()
        parts = {name: getattr(profile, name) for name in ("milliseconds", "products", "optimizer", "overhead")}
        return {**parts, "operators": [(row.name, row.milliseconds) for row in profile.operators]}


def serve(make: Callable[[], Training]) -> None:
    """Runs a contender's process: trains as requested on stdin.

    Args:
        make: Builds the model and the trainer. Import its modules before, because imports are not part of the measured
            start-up.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers

    def answer(content: Any) -> None:
        print(json.dumps(content), file=answers, flush=True)

    begin = time.perf_counter()
    training = make()
    loss = training.step()
    answer({"startup": time.perf_counter() - begin, "loss": float(loss)})
    for line in sys.stdin:
        request, count = line.split()
        if request == "profile":
            answer({"profile": training.profile(int(count))})
            continue
        times, losses = [], []
        for _ in range(int(count)):
            begin = time.perf_counter()
            loss = training.step()
            times.append(time.perf_counter() - begin)
            losses.append(float(loss))
        own, children = memory("VmHWM"), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        answer({"times": times, "loss": statistics.fmean(losses), "own": own, "peak": max(own, children)})
    while not training.is_settled():
        training.step()


@dataclasses.dataclass(frozen=True)
class Contender:
    """How the process of a contender is started.

    Attributes:
        command: The command, which must call :func:`serve`.
        environment: Additional environment variables.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Result:
    """The results of a contender: seconds and megabytes.

    Attributes:
        starts: The start-up times: with empty caches, then of later processes.
        rounds: The times of each round.
        losses: The loss of the first step, and the mean loss of each block.
        own: The peak resident memory of the process alone, since it was last reset; 0 if it does not say it.
        peak: The peak resident memory of the process or its children.
        profile: Where the time of a step goes, if requested and available.
    """

    starts: list[float] = dataclasses.field(default_factory=list)
    rounds: list[list[float]] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    own: float = 0.0
    peak: float = 0.0
    profile: Profile | None = None

    @property
    def times(self) -> list[float]:
        """All times."""
        return [value for part in self.rounds for value in part]

    @property
    def median(self) -> float:
        """The median step."""
        return statistics.median(self.times)


class _Died(Exception):
    """A process ended before it answered; the message is its last output."""


class _Process:
    def __init__(self, contender: Contender, caches: str) -> None:
        # A full, unread pipe would block a process that prints many warnings.
        self._said = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - open as long as the process runs
        self._process = subprocess.Popen(
            contender.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={
                **os.environ,
                "ORT_TRAINER_CACHE": f"{caches}/exports",
                "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
                **contender.environment,
            },
        )

    def ask(self, request: str = "") -> Any:
        """Returns the answer to a request; without a request, the process's first message."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            if request:
                self._process.stdin.write(f"{request}\n")
                self._process.stdin.flush()
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        status = self._process.wait()
        self._said.seek(0)
        raise _Died(_reason(self._said.read()) or f"status {status}")

    def end(self) -> None:
        """Waits for the process to end."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._said.close()


def _reason(said: str) -> str:
    """Returns the line that explains why a process died: the last error, rather than later log lines."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Died)\b", line)]
    return (errors or lines or [""])[-1]


def measure(
    contenders: Mapping[str, Contender],
    steps: int,
    rounds: int,
    starts: int = 2,
    profiled: int = 0,
    needed: str = "",
) -> tuple[dict[str, Result], dict[str, str]]:
    """Measures contenders in turns.

    Args:
        contenders: Contenders by name, in the order of their turns.
        steps: The number of steps of a block.
        rounds: The number of blocks of each contender, after a warm-up block.
        starts: How often each is started; the last process is the one that trains.
        profiled: The number of steps to profile after all times are taken. None by default.
        needed: The contender without which the others' results are useless.

    Returns:
        The results by name, and the reasons why contenders died.

    Raises:
        SystemExit: If the needed contender died.
    """
    processes: dict[str, _Process] = {}
    found: dict[str, Result] = {}
    died: dict[str, str] = {}

    def ask(name: str, request: str = "") -> Any:
        try:
            return processes[name].ask(request)
        except _Died as error:
            print(f"{name} died: {error}", file=sys.stderr)
            died[name] = str(error)
            processes.pop(name).end()
            if name == needed:
                raise SystemExit(f"{name} died, which the others are compared with") from None
            return None

    def end_all() -> None:
        for process in processes.values():
            process.end()

    with contextlib.ExitStack() as stack:
        stack.callback(end_all)
        for name, contender in contenders.items():
            caches = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            found[name] = Result()
            for number in range(starts):
                if number:
                    processes.pop(name).end()
                processes[name] = _Process(contender, caches)
                answer = ask(name)
                if answer is None:
                    break
                found[name].starts.append(answer["startup"])
                found[name].losses = [answer["loss"]]
        for number in range(rounds + 1):
            for name in list(processes):
                block = ask(name, f"steps {steps}")
                if block is None:
                    continue
                found[name].own, found[name].peak = block.get("own", 0.0), block["peak"]
                found[name].losses.append(block["loss"])
                if number > 0:  # the first round warms up
                    found[name].rounds.append(block["times"])
        finished = {name: found[name] for name in processes}
        for name in list(processes) if profiled else ():
            answer = ask(name, f"profile {profiled}")
            found[name].profile = answer and answer["profile"]
    return finished, {name: why for name, why in died.items() if name not in finished}


def memory(field: str, reset: bool = False) -> float:
    """Returns a figure of this process in MB; needs Linux.

    Args:
        field: Its name in /proc/self/status: ``VmRSS`` is the resident memory, ``VmHWM`` its peak.
        reset: Whether to reset the peak.
    """
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) / 1024


def ratio(theirs: Result, ours: Result) -> tuple[float, float, float]:
    """Returns how many times faster ours is, with a 95 % interval from a bootstrap over the rounds."""
    pairs = [statistics.median(a) / statistics.median(b) for a, b in zip(theirs.rounds, ours.rounds, strict=True)]
    draw = random.Random(0)
    resampled = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(2000))
    return statistics.median(pairs), resampled[49], resampled[1949]
