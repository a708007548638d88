"""What a process imports and makes before it forks others, so that none of those has to do it again.

Exports run in forked children, and tests in the processes of ``processes.py``.
"""

from __future__ import annotations

import gc
import os

import torch
import torch.distributed

from ort_trainer import ORTTrainer  # noqa: F401
from ort_trainer.sources.torch import assemble, export  # noqa: F401
from ort_trainer.sources.torch.decompositions import decomposition_table

from .harness.contexts import follow_forks

decomposition_table()
# What PyTorch's exporter imports and makes is there only after a first export.
torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),))


def freeze() -> None:
    """Takes all objects that there are out of later garbage collections, of which each export makes a full one."""
    gc.collect()
    gc.freeze()


freeze()
if "COVERAGE_PROCESS_START" in os.environ:
    follow_forks()
