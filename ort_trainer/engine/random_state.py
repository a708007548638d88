"""Generators of random numbers, and their state after a failed run."""

from __future__ import annotations

from types import TracebackType

import torch

__all__ = ["global_generator", "put_back_on_error"]


def global_generator(device: torch.device) -> torch.Generator:
    """Returns PyTorch's global generator for a device."""
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()  # type: ignore[no-untyped-call] # creates the generators
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


class put_back_on_error:
    """A context that restores a generator's state after an error.

    It is a class because a generator function takes twice as long, in every step.

    Args:
        generator: The generator; None if the run draws nothing.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator

    def __enter__(self) -> None:
        if self._generator is not None:
            self._state = self._generator.get_state()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None and self._generator is not None:
            self._generator.set_state(self._state)
