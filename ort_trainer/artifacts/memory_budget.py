"""Chooses which parameters a device trains, so that training fits in its memory.

The memory is measured, not estimated: each candidate is exported, and trained for three steps in a new process.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.atomic import temporary_folder
from ..core.errors import shown
from ..state.training_api import read_checkpoint
from .files import CHECKPOINT

_log = logging.getLogger(__name__)
_UNITS = {"": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
BATCH = "batch.npz"


def parse_budget(budget: int | str) -> int:
    """Returns a budget in bytes, from a number of bytes or a text (``64MB``, ``1.5 GiB``).

    Raises:
        ValueError: If it is neither, or not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", str(budget).strip())
    size = 0 if match is None or isinstance(budget, bool) else int(float(match[1]) * _UNITS[match[2] or ""])
    if size <= 0:
        raise ValueError(
            f"memory_budget must be a number of bytes or a text such as '64MB' (units {', '.join([*_UNITS][1:])}), "
            f"but {shown(budget)} was given"
        )
    return size


def choose_trained(
    trained: Sequence[str],
    budget: int,
    batch: Any,
    export: Callable[[Sequence[str], Path], None],
) -> tuple[list[str], str]:
    """Returns the parameters to freeze, and the text of ``memory.json``, which records the measurement.

    Parameters are frozen until training fits: first weights of two or more dimensions, from the first layer on, then
    biases and norms, from the first layer on. Parameters of the last layer are never frozen.

    Args:
        trained: The parameters that may be trained, in the order of the model.
        budget: Number of bytes that training may add to a process in which ONNX Runtime is loaded.
        batch: The batch to train with, a sequence or a mapping of tensors.
        export: Exports to a folder with these parameters frozen.

    Raises:
        ValueError: If training does not fit with only the last layer trained; the message says how much it takes.
        TypeError: If the batch is neither a sequence nor a mapping of tensors.
    """
    arrays = _arrays(batch)
    measured: dict[int, int] = {}
    order: list[str] = []

    def peak(count: int) -> int:
        """Returns the bytes that training takes with the first parameters of the order frozen; measured once each."""
        if count not in measured:
            with temporary_folder() as folder:
                export(order[:count], folder)
                if not count:
                    order.extend(_order(trained, read_checkpoint(folder / CHECKPOINT).parameters))
                # The prefix, because an input may have the name of an argument of np.savez.
                np.savez(folder / BATCH, allow_pickle=False, **{f"_{name}": arrays[name] for name in arrays})
                measured[count] = _measured(folder)
            _log.info("with %d of %d parameters frozen, training takes %s", count, len(trained), _mb(measured[count]))
        return measured[count]

    few = many = 0
    if peak(0) > budget:
        many = len(order)
        if peak(many) > budget:
            raise ValueError(
                f"memory_budget is {_mb(budget)}, but training takes {_mb(peak(many))} even if only the last layer "
                "is trained: use smaller batches, quantize what is frozen (quantize_frozen), or raise the budget"
            )
        while many - few > 1:  # bisection: training does not fit with few frozen, and fits with many
            middle = (few + many) // 2
            few, many = (few, middle) if peak(middle) <= budget else (middle, many)
    frozen = order[:many]
    report: dict[str, Any] = {
        "memory_budget": budget,
        "peak": peak(many),
        "batch": {name: list(value.shape) for name, value in arrays.items()},
        "trained": [name for name in trained if name not in frozen],
    }
    _log.info("memory_budget: training takes %s and trains %s", _mb(peak(many)), report["trained"])
    return frozen, json.dumps(report, indent=1) + "\n"


def _order(trained: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Returns the parameters that may be frozen, in the order of freezing."""
    last = trained[-1].rpartition(".")[0]
    others = [name for name in trained[:-1] if not last or name.rpartition(".")[0] != last]
    return sorted(others, key=lambda name: np.ndim(values[name]) < 2)


def _arrays(batch: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the arrays of a batch by name, or by number if they have none."""
    if isinstance(batch, Mapping):
        named = dict(batch)
    elif isinstance(batch, (tuple, list)):
        named = {str(number): value for number, value in enumerate(batch)}
    else:
        named = {}
    if not named or not all(hasattr(value, "shape") for value in named.values()):
        raise TypeError(
            f"memory_budget needs sample_batch as a tuple or a dict of tensors, of the size that the device will train "
            f"with, but {shown(batch)} was given"
        )
    return {name: np.asarray(value) for name, value in named.items()}


def _measured(folder: Path) -> int:
    """Returns the bytes that training from the artifacts in a folder takes."""
    command = [sys.executable, "-m", "ort_trainer.api.measure", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError("the memory of training could not be measured: three steps took ten minutes") from None
    if done.returncode:
        raise RuntimeError(f"the memory of training could not be measured: {done.stderr.strip()[-2000:]}")
    return int(done.stdout.split()[-1])


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
