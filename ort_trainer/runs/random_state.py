"""The random state that decides the order of batches and what a dataset draws in this process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["WAY_OUT", "capture", "check_loader", "restore"]

WAY_OUT = "or go on without the place in the data: give resume() no position, and begin an epoch"
"""What somebody can do who has another loader than the one of the checkpoint."""


def capture(loader: Any) -> dict[str, Any]:
    """Returns the state of torch's, NumPy's and Python's generators, and of those that the loader was given."""
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
        "loader": [generator.get_state() for generator in _generators(loader)],
    }


def restore(state: Mapping[str, Any], loader: Any, own: bool = True) -> None:
    """Puts back what :func:`capture` returned, also after a checkpoint has made lists of its tuples.

    Args:
        state: The state.
        loader: What it was captured with.
        own: Whether to put back the loader's own generators too.

    Raises:
        ValueError: If the loader has another number of generators.
    """
    if own:
        check_loader(state, loader)
    torch.set_rng_state(state["torch"].clone())  # one in a file has any address, which PyTorch crashes on
    np.random.set_state(state["numpy"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    for generator, value in zip(_generators(loader) if own else (), state["loader"], strict=False):
        generator.set_state(value.clone())


def check_loader(state: Mapping[str, Any], loader: Any) -> None:
    """Checks whether a loader has as many generators as the one that a state was captured with.

    Raises:
        ValueError: If it has not.
    """
    count = len(list(_generators(loader)))
    if count != len(state["loader"]):
        raise ValueError(
            f"the loader has {count} generators of its own, but the checkpoint was saved with {len(state['loader'])}: "
            f"make the loader as it was made then, {WAY_OUT}"
        )


def _generators(loader: Any) -> Iterator[torch.Generator]:
    """Yields the generators that a loader and its samplers were given."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = {id(generator): generator for owner in owners if (generator := getattr(owner, "generator", None))}
    yield from (generator for generator in found.values() if isinstance(generator, torch.Generator))
