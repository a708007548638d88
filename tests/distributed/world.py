"""Launches several processes that run cases, once for many cases: starting one takes seconds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def environments(size: int) -> list[dict[str, str]]:
    """What a launcher sets, for each rank."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def run(
    module: str, cases: Sequence[str], size: int, timeout: float = 600, lost: Collection[int] = ()
) -> dict[str, list[dict[str, Any]]]:
    """Runs cases of a module of this folder in a world; returns what each returned, by rank.

    Args:
        module: Its name.
        cases: Names of functions in it.
        size: Number of processes.
        timeout: Seconds for all.
        lost: Ranks that do not survive the last case; there is nothing of them then.

    Raises:
        AssertionError: If a process fails; the message has the output of all.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", "tests.distributed.worker", module, folder, *cases],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for environment in environments(size)
        ]
        try:
            outputs = [process.communicate(timeout=timeout)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        codes = [0 if rank in lost else process.returncode for rank, process in enumerate(started)]
        assert not any(codes), f"exit codes {codes}\n" + "\n".join(outputs)
        found: dict[str, list[dict[str, Any]]] = {}
        for case in cases:
            found[case] = []
            for rank in range(size):
                if rank in lost and case == cases[-1]:
                    found[case].append({})
                    continue
                with np.load(Path(folder, f"{case}.{rank}.npz")) as loaded:
                    found[case].append({key: loaded[key] for key in loaded})
        return found
