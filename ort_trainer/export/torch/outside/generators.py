"""Generators of random numbers: whether a run has drawn from them, and how their states are restored."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

__all__ = ["has_drawn", "is_generator", "name_of", "put_back", "state_of"]


def is_generator(value: Any) -> bool:
    """Returns whether an object draws random numbers."""
    return isinstance(value, (random.Random, torch.Generator)) or type(value).__module__.startswith("numpy.random")


def name_of(generator: Any) -> str:
    """Returns what a generator of the whole process is called; "" for others."""
    if generator is random._inst:  # type: ignore[attr-defined]
        return "random"
    return "numpy.random" if generator is numpy.random.mtrand._rand else ""


def state_of(generator: Any) -> Any:
    """Returns a generator's state, which determines its next numbers."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "get_state"):
        return generator.get_state()
    return getattr(generator, "bit_generator", generator).state


def has_drawn(generator: Any, state: Any) -> bool:
    """Returns whether a generator is in another state."""
    now = state_of(generator)
    return not torch.equal(now, state) if isinstance(now, torch.Tensor) else repr(now) != repr(state)


def put_back(generator: Any, state: Any) -> None:
    """Restores a generator's state, unless it is a global one, from which other threads draw, too."""
    if name_of(generator) or not has_drawn(generator, state):
        return
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state
