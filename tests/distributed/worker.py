"""One process of a world: runs cases one after another and writes their results.

A case is a function of a module in this folder: (rank, size) -> dict of numbers, strings and arrays. All processes run
the same cases in the same order. If a case raises, its result is the error's type and text, and the next case starts;
so a case that leaves the processes out of step spoils later ones.
"""

from __future__ import annotations

import importlib
import os
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist


def main(module: str, folder: str, *cases: str) -> None:
    torch.set_num_threads(1)
    found = importlib.import_module(f"tests.distributed.{module}")
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    for case in cases:
        torch.manual_seed(0)
        try:
            result = getattr(found, case)(rank, size)
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        np.savez(Path(folder, f"{case}.{rank}.npz"), **result)
    if dist.is_initialized():
        dist.destroy_process_group()
