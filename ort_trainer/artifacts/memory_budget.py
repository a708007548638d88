"""Chooses which parameters a device trains, so that training fits in its memory.

The memory is measured, not estimated: candidates are exported, and a process of their own trains each for three steps.
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

__all__ = ["choose_trained", "parse_budget"]

_log = logging.getLogger(__name__)
_UNITS = {"": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
BATCH = "batch.npz"


def parse_budget(given: int | str) -> int:
    """Returns a number of bytes, given as such or as text (``64MB``, ``1.5 GiB``).

    Raises:
        ValueError: If it is neither, or not above 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)?", str(given).strip())
    size = 0 if found is None or isinstance(given, bool) else int(float(found[1]) * _UNITS[found[2] or ""])
    if size <= 0:
        raise ValueError(
            f"memory_budget must be a number of bytes or a text such as '64MB' (units {', '.join([*_UNITS][1:])}), "
            f"but {shown(given)} was given"
        )
    return size


def choose_trained(
    trained: Sequence[str],
    budget: int,
    batch: Any,
    export: Callable[[Sequence[str], Path], None],
) -> tuple[list[str], str]:
    """Returns which parameters to freeze, and what was measured, as the text of ``memory.json``.

    Parameters are frozen until training fits: first the weights of two or more dimensions, from the first layer on,
    then the biases and norms, from the first layer on; those of the last layer are never frozen.

    Args:
        trained: The parameters that may be trained, in the order of the model.
        budget: Number of bytes that training may add to a process in which ONNX Runtime is loaded.
        batch: The batch to train with, a sequence or a mapping of tensors.
        export: Exports to a folder with these parameters frozen.

    Raises:
        ValueError: If training does not fit even so; the message says what it takes.
        TypeError: If the batch is neither a sequence nor a mapping of tensors.
    """
    arrays = _arrays(batch)
    measured: dict[int, int] = {}
    order: list[str] = []

    def peak(count: int) -> int:
        if count not in measured:
            with temporary_folder() as folder:
                export(order[:count], folder)
                if not count:
                    order.extend(_order(trained, read_checkpoint(folder / CHECKPOINT).parameters))
                # An input may have the name of an argument of NumPy's.
                np.savez(folder / BATCH, allow_pickle=False, **{f"_{name}": arrays[name] for name in arrays})
                measured[count] = _measured(folder)
            _log.info("with %d of %d parameters frozen, training takes %s", count, len(trained), _said(measured[count]))
        return measured[count]

    few = many = 0
    if peak(0) > budget:
        many = len(order)
        if peak(many) > budget:
            raise ValueError(
                f"memory_budget is {_said(budget)}, but training takes {_said(peak(many))} even if only the last layer "
                "is trained: use smaller batches, quantize what is frozen (quantize_frozen), or raise the budget"
            )
        while many - few > 1:  # few does not fit, many does
            middle = (few + many) // 2
            few, many = (few, middle) if peak(middle) <= budget else (middle, many)
    frozen = order[:many]
    said: dict[str, Any] = {
        "memory_budget": budget,
        "peak": peak(many),
        "batch": {name: list(value.shape) for name, value in arrays.items()},
        "trained": [name for name in trained if name not in frozen],
    }
    _log.info("memory_budget: training takes %s and trains %s", _said(peak(many)), said["trained"])
    return frozen, json.dumps(said, indent=1) + "\n"


def _order(trained: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Returns the parameters that may be frozen, the first to be frozen first."""
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
    """Returns how many bytes training from the artifacts in a folder takes."""
    command = [sys.executable, "-m", "ort_trainer.api.measure", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError("the memory of training could not be measured: three steps took ten minutes") from None
    if done.returncode:
        raise RuntimeError(f"the memory of training could not be measured: {done.stderr.strip()[-2000:]}")
    return int(done.stdout.split()[-1])


def _said(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
