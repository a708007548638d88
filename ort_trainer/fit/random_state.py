"""The random state that decides the order of batches and what a dataset draws in this process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["capture", "restore"]


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
    generators = list(_generators(loader))
    if len(generators) != len(state["loader"]):
        raise ValueError(
            f"train_loader has {len(generators)} generators of its own, but the checkpoint was saved with "
            f"{len(state['loader'])}: make the loader as it was made then"
        )
    torch.set_rng_state(state["torch"].clone())  # one in a file has any address, which PyTorch crashes on
    np.random.set_state(state["numpy"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    for generator, value in zip(generators, state["loader"], strict=True):
        if own:
            generator.set_state(value.clone())


def _generators(loader: Any) -> Iterator[torch.Generator]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = {id(generator): generator for owner in owners if (generator := getattr(owner, "generator", None))}
    yield from (generator for generator in found.values() if isinstance(generator, torch.Generator))
