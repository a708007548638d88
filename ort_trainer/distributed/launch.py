"""Which processes train together: what the options, the process group and the launcher's environment say."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ..options import ORTTrainerOptions
from ..training.strategy import SingleProcess, Strategy
from .data_parallel import DataParallel
from .processes import Processes
from .reduction import Sum

__all__ = ["choose_strategy"]


def choose_strategy(options: ORTTrainerOptions, device: torch.device) -> Strategy:
    """Returns how the processes work together; joins the group of torchrun's processes if that was not done yet.

    Args:
        options: All settings.
        device: Where training runs.
    """
    if not dist.is_available():
        return SingleProcess()
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return SingleProcess()
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    if dist.get_world_size() == 1:
        return SingleProcess()
    processes = Processes(device, 600.0)
    return DataParallel(processes, 25 * 2**20, Sum(processes))
