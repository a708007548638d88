"""Checks what a checkpoint says of a run, before anything is restored: a file may be anyone's."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..core.errors import CheckpointError, shown
from ..state import read_user_dict
from .trainer import Trainer

# Larger integers are no counts; 2^53 is where floats, in which some of them are computed, end to be exact.
_LARGEST = 1 << 53
# NumPy reads as many of the numbers in its state as a position says, without a check. MT19937: 624 words; Philox: 4.
_POSITIONS = {"pos": 624, "buffer_pos": 4}
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def entry(values: Any, key: str, check: Callable[[Any, str], Any], where: str) -> Any:
    """Returns a checked entry of a dict.

    Raises:
        CheckpointError: If it is missing, or the check refuses it.
    """
    if not isinstance(values, Mapping) or key not in values:
        raise CheckpointError(f"{where} must be a dict with {key!r}, but it is {shown(values)}")
    return check(values[key], f"{where}[{key!r}]")


def anything(value: Any, where: str) -> Any:
    """Returns a value of any kind."""
    return value


def whole(value: Any, where: str) -> int:
    """Returns a count."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        raise CheckpointError(f"{where} must be an int of at least 0, but it is {shown(value)}")
    return value


def number(value: Any, where: str) -> float:
    """Returns a number, perhaps NaN or infinite."""
    is_float = isinstance(value, float) or (isinstance(value, int) and abs(value) < _LARGEST)
    if isinstance(value, bool) or not is_float:
        raise CheckpointError(f"{where} must be a number, but it is {shown(value)}")
    return float(value)


def text(value: Any, where: str) -> str:
    """Returns a str."""
    if not isinstance(value, str):
        raise CheckpointError(f"{where} must be a str, but it is {shown(value)}")
    return value


def optional(check: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Returns a check that also takes None."""
    return lambda value, where: None if value is None else check(value, where)


def load_checked(
    trainer: Trainer, path: str | os.PathLike[str], check: Callable[[Mapping[str, Any]], object]
) -> dict[str, Any]:
    """Loads a checkpoint whose user dict passes a check, and returns that dict."""
    check(read_user_dict(path))
    return trainer.load_checkpoint(path)


def check_place(place: Any, where: str, generators: Sequence[torch.Generator] | None) -> None:
    """Checks the state of a :class:`~ort_trainer.Position`.

    Args:
        place: The state.
        where: What it is called in errors.
        generators: Those of the loader that it is for; None for no loader.

    Raises:
        CheckpointError: If it can't be restored.
    """
    if entry(place, "epoch", whole, where) < 1:
        raise CheckpointError(f"{where}['epoch'] must be at least 1, but it is 0")
    batch, batches = entry(place, "batch", whole, where), entry(place, "batches", optional(whole), where)
    if batches is not None and batch > batches:
        raise CheckpointError(f"{where}['batch'] must be at most {batches}, the batches of an epoch, but it is {batch}")
    if not isinstance(place.get("ended", False), bool):
        raise CheckpointError(f"{where}['ended'] must be True or False, but it is {shown(place['ended'])}")
    order = place.get("order")
    if order is not None:
        entry(order, "of", whole, f"{where}['order']")
        entry(order, "seed", optional(whole), f"{where}['order']")
        if entry(order, "together", whole, f"{where}['order']") < 1:
            raise CheckpointError(f"{where}['order']['together'] must be at least 1")
    for key in ("random", "epoch_random"):
        state = entry(place, key, anything, where)
        # An additional process has none of an epoch, and one that loads a batch none of this moment.
        if state is not None if key == "random" else not isinstance(state, Mapping) or state:
            check_random(state, f"{where}[{key!r}]", generators)


def check_random(state: Any, where: str, generators: Sequence[torch.Generator] | None = None) -> None:
    """Checks the state of PyTorch's, NumPy's and Python's generators, by putting it into private ones.

    Args:
        state: The state.
        where: What it is called in errors.
        generators: A loader's own generators; None for no loader.

    Raises:
        CheckpointError: If a generator refuses it.
    """
    for key in ("torch", "numpy", "python", "loader"):
        entry(state, key, anything, where)
    if not isinstance(state["loader"], Sequence) or isinstance(state["loader"], str):
        raise CheckpointError(f"{where}['loader'] must be a list, but it is {shown(state['loader'])}")
    own = [torch.Generator(each.device) for each in generators or ()]
    tries: list[tuple[str, Callable[[], object]]] = [
        ("['torch']", lambda: torch.Generator().set_state(state["torch"].clone())),
        ("['numpy']", lambda: _try_numpy(state["numpy"])),
        ("['python']", lambda: _try_python(*state["python"])),
        ("['loader']", lambda: [g.set_state(v.clone()) for g, v in zip(own, state["loader"], strict=False)]),
    ]
    for part, attempt in tries:
        try:
            attempt()
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{where}{part} is no state of a generator: {error}") from error


def _try_numpy(state: Mapping[str, Any]) -> None:
    if state["bit_generator"] not in _BIT_GENERATORS:
        raise ValueError(f"unknown bit generator {shown(state['bit_generator'])}")
    for key, most in _POSITIONS.items():
        position = state["state"].get(key, state.get(key, 0))
        if whole(position, key) > most:
            raise ValueError(f"{key!r} must be at most {most}, but it is {position}")
    key = state["state"].get("key")
    if isinstance(key, np.ndarray) and state["bit_generator"] == "MT19937" and key.shape != (624,):
        raise ValueError(f"'key' must have 624 words, but has the shape {list(key.shape)}")
    if whole(state.get("has_gauss", 0), "has_gauss") > 1 or not math.isfinite(number(state.get("gauss", 0.0), "gauss")):
        raise ValueError("'has_gauss' must be 0 or 1, and 'gauss' finite")
    np.random.RandomState(getattr(np.random, state["bit_generator"])()).set_state(dict(state))


def _try_python(version: int, numbers: Sequence[int], gauss: float | None) -> None:
    optional(number)(gauss, "gauss")
    random.Random().setstate((version, tuple(numbers), gauss))
