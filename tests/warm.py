"""Work that a process does before it forks others, so that they need not repeat it.

Exports run in forked children, and tests in the processes of ``processes.py``.
"""

from __future__ import annotations

import gc
import os

import torch
import torch.distributed

from ort_trainer import ORTTrainer  # noqa: F401
from ort_trainer.export import assemble, export  # noqa: F401
from ort_trainer.kernels.onnxruntime.translate import decomposition_table

from .harness.contexts import follow_forks

decomposition_table()
# A first export, because PyTorch's exporter imports and initializes some parts lazily.
torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),))


def freeze() -> None:
    """Excludes all existing objects from later garbage collections; each export runs a full one."""
    gc.collect()
    gc.freeze()


freeze()
if "COVERAGE_PROCESS_START" in os.environ:
    follow_forks()
