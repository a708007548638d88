"""The random state of this process that determines the order of batches and a dataset's random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["WAY_OUT", "capture", "check_loader", "restore"]

WAY_OUT = "or continue without the position in the data: call resume() without one, and start a new epoch"
"""The advice in messages about a loader that differs from the checkpoint's."""


def capture(loader: Any) -> dict[str, Any]:
    """Returns the state of torch's, NumPy's and Python's generators, and of the loader's own."""
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
        "loader": [generator.get_state() for generator in _generators(loader)],
    }


def restore(state: Mapping[str, Any], loader: Any, own: bool = True) -> None:
    """Restores what :func:`capture` returned; accepts lists in place of its tuples, as read from a checkpoint.

    Args:
        state: The state.
        loader: The loader that it was captured with.
        own: Whether to restore the loader's own generators too.

    Raises:
        ValueError: If the loader has a different number of generators.
    """
    if own:
        check_loader(state, loader)
    torch.set_rng_state(state["torch"].clone())  # PyTorch crashes on unaligned memory, as in a mapped file
    np.random.set_state(state["numpy"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    for generator, value in zip(_generators(loader) if own else (), state["loader"], strict=False):
        generator.set_state(value.clone())


def check_loader(state: Mapping[str, Any], loader: Any) -> None:
    """Checks that a loader has as many generators as the one that a state was captured with.

    Raises:
        ValueError: If the numbers differ.
    """
    count = len(list(_generators(loader)))
    if count != len(state["loader"]):
        raise ValueError(
            f"the loader has {count} generators of its own, but the checkpoint was saved with {len(state['loader'])}: "
            f"create the loader as before, {WAY_OUT}"
        )


def _generators(loader: Any) -> Iterator[torch.Generator]:
    """Yields the generators of a loader and its samplers."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = {id(generator): generator for owner in owners if (generator := getattr(owner, "generator", None))}
    yield from (generator for generator in found.values() if isinstance(generator, torch.Generator))
