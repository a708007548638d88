"""Reads values of a state dict, and collects how they differ from the trainer's, so that one error reports all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from .bfloat16 import array_of, tensor_of
from .state import Array

# Bytes of the states of PyTorch's random generators, by kind of device.
_STATE_SIZES = {"cpu": 5056, "cuda": 16, "xpu": 16}


class Differences:
    """Missing keys, unexpected keys, and tensors with the wrong shape or dtype.

    Args:
        strict: Whether missing and unexpected keys are errors.
    """

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self._names: list[str] = []
        self._shapes: list[str] = []
        self._dtypes: list[str] = []

    def compare_keys(self, expected: Iterable[str], actual: Iterable[str], where: str) -> None:
        """Records missing and unexpected keys of a part of the state dict."""
        if not self.strict:
            return
        expected, actual = dict.fromkeys(expected), dict.fromkeys(actual)
        missing = [name for name in expected if name not in actual]
        unexpected = [name for name in actual if name not in expected]
        if missing:
            self._names.append(f"Missing keys: {missing} in {where}")
        if unexpected:
            self._names.append(f"Unexpected keys: {unexpected} in {where}")

    def fitting(self, value: Any, like: torch.Tensor, dtype: torch.dtype, where: str) -> Array | None:
        """Returns a value in the trainer's dtype; None if its shape or dtype is wrong, which is recorded.

        Args:
            value: A tensor or array.
            like: The model's tensor.
            dtype: The dtype in which the trainer keeps it.
            where: The value's place, for messages.

        Raises:
            TypeError: If it is neither a tensor nor an array.
        """
        tensor = self.tensor(value, where)
        if tensor.shape != like.shape:
            self._shapes.append(f"{where} has shape {list(tensor.shape)}, but the trainer has {list(like.shape)}")
            return None
        if tensor.dtype != like.dtype and (tensor.is_floating_point() != like.is_floating_point()):
            self._dtypes.append(f"{where} has dtype {tensor.dtype}, but the trainer has {like.dtype}")
            return None
        return array_of(tensor.to(dtype))

    def tensor(self, value: Any, where: str) -> torch.Tensor:
        """Returns a tensor or array as a tensor that shares its memory.

        Raises:
            TypeError: If it is neither a tensor nor an array.
        """
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (np.ndarray, np.generic)):
            return tensor_of(np.asarray(value))
        raise TypeError(f"{where} must be a tensor or a numpy array, but it is a {type(value).__name__}")

    def random_state(self, value: Any, device: torch.device, where: str) -> Array:
        """Returns a copy of the state of a random generator.

        Raises:
            TypeError: If it is neither a tensor nor an array.
            ValueError: If it is not a state of a generator.
        """
        # A copy, as PyTorch crashes on unaligned memory, as in a mapped file.
        state = self.tensor(value, where).to(torch.uint8, copy=True)
        if state.numel() in _STATE_SIZES.values() and state.numel() != _STATE_SIZES.get(device.type):
            return derived_state(state.numpy().tobytes(), device).numpy()  # no device continues another's numbers
        try:
            torch.Generator(device).set_state(state)
        except RuntimeError as error:
            raise ValueError(f"{where} is not a state of a random generator on {device}: {error}") from error
        return state.numpy()

    def check(self) -> None:
        """Raises one error for all recorded differences.

        Raises:
            RuntimeError: If keys are missing or unexpected; the message lists all differences.
            ValueError: If only shapes or dtypes differ.
        """
        parts = list(self._names)
        if self._shapes:
            parts.append(f"Mis-shaped keys: {', and '.join(self._shapes)}")
        if self._dtypes:
            parts.append(f"Keys of another dtype: {', and '.join(self._dtypes)}")
        if self._names:
            # strict=False does not help against wrong shapes.
            hint = ". To restore only what both have, pass strict=False" if parts == self._names else ""
            raise RuntimeError("; ".join(parts) + hint)
        if parts:
            raise ValueError("; ".join(parts))


def compare_keys(expected: Iterable[str], actual: Iterable[str], strict: bool, where: str) -> None:
    """Raises a RuntimeError that lists missing and unexpected keys, if ``strict`` is True."""
    differences = Differences(strict)
    differences.compare_keys(expected, actual, where)
    differences.check()


def derived_state(state: bytes, device: torch.device, number: int = 0) -> torch.Tensor:
    """Returns the state of a generator on a device, seeded with a hash of another state and a number."""
    digest = hashlib.sha256(state + number.to_bytes(8, "little")).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little")).get_state()
