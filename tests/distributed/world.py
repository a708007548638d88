"""Launches several processes that run cases, once for many cases."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import processes
from . import worker

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """Returns a port below those that the system gives to connections: one of gloo could take it before the store."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as opened, contextlib.suppress(OSError):
            opened.bind(("127.0.0.1", port))
            return port


def environments(size: int) -> list[dict[str, str]]:
    """Returns the environment variables that a launcher sets, for each rank."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    # Processes that join an elastic job later count other restarts.
    return [
        {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(rank)}
        for rank in range(size)
    ]


def run(
    module: str, cases: Sequence[str], size: int, timeout: float = 600, lost: Collection[int] = ()
) -> dict[str, list[dict[str, Any]]]:
    """Runs cases of a module of this folder in a world; returns the result of each case, by rank.

    Args:
        module: The name of the module.
        cases: The names of functions in it.
        size: The number of processes.
        timeout: Seconds for all cases.
        lost: Ranks that do not survive the last case, and have no results.

    Raises:
        AssertionError: If a process fails; the message has the output of all.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = (module, folder, *cases)
        ended = processes.run([processes.Call(worker.main, args, found) for found in environments(size)], timeout)
        codes = [0 if rank in lost else process.code for rank, process in enumerate(ended)]
        assert not any(codes), f"exit codes {codes}\n" + "\n".join(process.output for process in ended)
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
