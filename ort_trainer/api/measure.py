"""Trains from the artifacts in a folder, and prints the memory that training takes, in bytes.

``artifacts/memory_budget.py`` runs it in a new process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from ..core.report import peak_memory
from ..engine.ort import engine
from .checkpoint_state import CheckpointState
from .module import Module
from .optimizer import Optimizer

_STATUS = Path("/proc/self/status")


def resident(field: str) -> int:
    """Returns the memory of this process in bytes, now (``VmRSS``) or at its highest (``VmHWM``)."""
    if _STATUS.exists():
        (line,) = (line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024
    highest = peak_memory()  # outside Linux, only this is known
    if highest is None:
        raise SystemExit("the memory of a process can be measured on Linux and macOS only")
    return highest


def main(folder: Path) -> None:
    """Trains for three steps."""
    with np.load(folder / "batch.npz") as file:
        batch = {name[1:]: file[name] for name in file}
    engine()  # imports ONNX Runtime, whose own memory is not counted
    before = resident("VmRSS")
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state)
    update = folder / "optimizer_model.onnx"
    optimizer = Optimizer(update, module) if update.exists() else None
    names = module.input_names()
    inputs = batch if set(batch) == set(names) else dict(zip(names, batch.values(), strict=True))
    for _ in range(3):
        module(**inputs)
        if optimizer is not None:
            optimizer.step()
        module.lazy_reset_grad()
    print(max(0, resident("VmHWM") - before))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
