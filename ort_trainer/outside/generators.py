"""Generators of random numbers: whether a run has drawn from them, and how their states are restored."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy
import torch
from torch.utils._pytree import tree_leaves


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
    if isinstance(generator, random.Random):
        return bool(now != state)
    return not all(map(numpy.array_equal, tree_leaves(now), tree_leaves(state)))


def put_back(generator: Any, state: Any) -> None:
    """Restores a generator's state, unless it is a global one, from which other threads draw, too."""
    if not name_of(generator) and has_drawn(generator, state):
        _restore(generator, state)


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


@contextlib.contextmanager
def drawing_from_copies() -> Iterator[set[str]]:
    """Lets this thread draw from copies of the global generators of Python and NumPy.

    The generators stay as they are, so PyTorch draws the same numbers afterwards, and other threads get each number
    once. Functions that were imported by name, as in ``from random import random``, draw from the generators
    themselves, whose states are restored if no other thread is there.

    Yields:
        The names of the modules whose functions have drawn; complete at the context's end.
    """
    drawn: set[str] = set()
    thread, is_alone = threading.get_ident(), threading.active_count() == 1
    generators = {random: random._inst, numpy.random: numpy.random.mtrand._rand}  # type: ignore[attr-defined]
    states = {module: state_of(generator) for module, generator in generators.items()}
    copies: dict[Any, Any] = {random: random.Random(), numpy.random: numpy.random.RandomState()}
    for module, copy in copies.items():
        _restore(copy, states[module])

    def redirected(module: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return function(*args, **kwargs)
            drawn.add(module.__name__)
            return getattr(copies[module], name)(*args, **kwargs)

        vars(draw)["__self__"] = generators[module]  # a context inside this one redirects it again
        return draw

    with contextlib.ExitStack() as stack:
        for module, generator in generators.items():
            for name, function in list(vars(module).items()):
                if getattr(function, "__self__", None) is generator and "state" not in name:
                    stack.enter_context(mock.patch.object(module, name, redirected(module, name, function)))
        try:
            yield drawn
        finally:
            for module, generator in generators.items():
                if is_alone and has_drawn(generator, states[module]):
                    drawn.add(module.__name__)
                    _restore(generator, states[module])
