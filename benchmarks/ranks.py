"""Contenders with several processes: launches them, and measures what their steps wait for and send.

A launcher starts the ranks and forwards the requests of turns.py, so that all do the same at the same time; rank 0
answers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turns import Profile, Training, memory

__all__ = ["JOINT", "Rank", "bytes_sent", "launch"]

JOINT = ("meet", "reduce", "spread")
"""The methods of a strategy (ort_trainer/train/strategy.py) in which a step is with the other processes."""

# From struct tcp_info in linux/tcp.h: bytes sent, without headers; available since Linux 4.19.
_TCP_INFO, _BYTES_SENT = 11, 200


def launch(command: Sequence[str], size: int) -> None:
    """Runs ranks until stdin ends, and ends all of them if one fails.

    Args:
        command: The command that each rank runs; it must call ``turns.serve``.
        size: The number of ranks.
    """
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port = opened.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=None if rank == 0 else subprocess.DEVNULL,
            text=True,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]
    os.dup2(2, 1)  # closes the pipe of answers, so that its reader notices when rank 0 is gone

    def watch(rank: subprocess.Popen[str]) -> None:
        if rank.wait():
            for other in ranks:
                other.kill()
            os._exit(1)

    watchers = [threading.Thread(target=watch, args=(rank,), daemon=True) for rank in ranks]
    for watcher in watchers:
        watcher.start()
    for line in sys.stdin:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(line)
            rank.stdin.flush()
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.close()
    for watcher in watchers:
        watcher.join()


def bytes_sent() -> int:
    """Returns the bytes that this process has sent over its TCP connections, without headers. Needs Linux."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # another thread may have closed it
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as opened:
                if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM:
                    info = opened.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
                    total += struct.unpack_from("Q", info, _BYTES_SENT)[0]
    return total


@contextlib.contextmanager
def _timed(owner: Any, name: str, times: list[float]) -> Iterator[None]:
    """Times the calls of a method of an object."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            times.append(time.perf_counter() - begin)

    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)


@dataclass(frozen=True)
class Rank(Training):
    """The training of a rank.

    Attributes:
        strategy: The trainer's strategy, if it is an ORTTrainer.
        describe: Returns additional figures of the steps.
    """

    strategy: Any = None
    describe: Callable[[], Mapping[str, Any]] = field(default=dict)

    def profile(self, steps: int) -> Profile:
        """Returns the bytes that steps send, their peak memory, and their communication times in seconds per step.

        The last process to arrive does not wait: the shortest meeting is the time of the messages, and the excess of
        the others is their waiting for the slowest process.
        """
        times: dict[str, list[float]] = {name: [] for name in JOINT}
        total: list[float] = []
        with contextlib.ExitStack() as stack:
            for name in JOINT if self.strategy is not None else ():
                stack.enter_context(_timed(self.strategy, name, times[name]))
            before = bytes_sent()
            memory("VmHWM", reset=True)
            for _ in range(steps):
                begin = time.perf_counter()
                self.step()
                total.append(time.perf_counter() - begin)
            sent = (bytes_sent() - before) / steps
        rows = [total, *(times[name] or [0.0] * steps for name in JOINT)]
        ranks = _gather([sent, memory("VmHWM"), *(value for row in rows for value in row)])
        # The first step includes waiting for ranks that got the request later.
        columns = [[rank[2 + part * steps : 2 + (part + 1) * steps][1:] for rank in ranks] for part in range(4)]
        step, meeting, reduction, spread = columns
        messages = [min(values) for values in zip(*meeting, strict=True)]
        waits = [statistics.fmean(values) - min(values) for values in zip(*meeting, strict=True)]
        return {
            "sent": [rank[0] for rank in ranks],
            "peak": max(rank[1] for rank in ranks),
            "step": _typical(step),
            "messages": statistics.median(messages),
            "wait": statistics.median(waits),
            "reduce": _typical(reduction),
            "spread": _typical(spread),
            **self.describe(),
        }


def _typical(ranks: Sequence[Sequence[float]]) -> float:
    """Returns the median over the steps of the mean over the ranks."""
    return statistics.median(statistics.fmean(values) for values in zip(*ranks, strict=True))


def _gather(own: list[float]) -> list[list[float]]:
    """Returns the numbers of all ranks."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return [own]
    found = torch.empty(dist.get_world_size() * len(own), dtype=torch.float64)
    dist.all_gather_single(found, torch.tensor(own, dtype=torch.float64))
    return found.view(-1, len(own)).tolist()
