"""The random state that decides the order of batches and what a dataset draws in this process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["capture", "generators", "restore"]


def capture(loader: Any) -> dict[str, Any]:
    """Returns the state of torch's, NumPy's and Python's generators, and of those that the loader was given."""
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
        "loader": [generator.get_state() for generator in generators(loader)],
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
    found = list(generators(loader)) if own else []
    if own and len(found) != len(state["loader"]):
        raise ValueError(
            f"the loader has {len(found)} generators of its own, but the checkpoint was saved with "
            f"{len(state['loader'])}: make the loader as it was made then"
        )
    torch.set_rng_state(state["torch"].clone())  # one in a file has any address, which PyTorch crashes on
    np.random.set_state(state["numpy"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    for generator, value in zip(found, state["loader"], strict=False):
        generator.set_state(value.clone())


def generators(loader: Any) -> Iterator[torch.Generator]:
    """Yields the generators that a loader and its samplers were given."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = {id(generator): generator for owner in owners if (generator := getattr(owner, "generator", None))}
    yield from (generator for generator in found.values() if isinstance(generator, torch.Generator))
