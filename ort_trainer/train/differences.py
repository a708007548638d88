"""Collects the differences between a state dict and the trainer, so that one error reports all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ..engine.ownership import owned_dtype

__all__ = ["Differences", "compare_keys", "to_tensor"]


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

    def compare_keys(self, expected: Iterable[str], found: Iterable[str], where: str) -> None:
        """Records missing and unexpected keys of a part of the state dict."""
        if not self.strict:
            return
        expected, found = dict.fromkeys(expected), dict.fromkeys(found)
        missing = [name for name in expected if name not in found]
        unexpected = [name for name in found if name not in expected]
        if missing:
            self._names.append(f"Missing keys: {missing} in {where}")
        if unexpected:
            self._names.append(f"Unexpected keys: {unexpected} in {where}")

    def fitting(self, value: Any, like: torch.Tensor, where: str) -> torch.Tensor | None:
        """Returns a tensor in the trainer's dtype; None if its shape or dtype is wrong, which is recorded.

        Raises:
            TypeError: If it is not a tensor.
        """
        tensor = to_tensor(value, where)
        if tensor.shape != like.shape:
            self._shapes.append(f"{where} has shape {list(tensor.shape)}, but the trainer has {list(like.shape)}")
            return None
        if tensor.dtype != like.dtype and (tensor.is_floating_point() != like.is_floating_point()):
            self._dtypes.append(f"{where} has dtype {tensor.dtype}, but the trainer has {like.dtype}")
            return None
        return tensor.to(owned_dtype(like.dtype))

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


def compare_keys(expected: Iterable[str], found: Iterable[str], strict: bool, where: str) -> None:
    """Raises a RuntimeError that lists missing and unexpected keys, if ``strict`` is True."""
    differences = Differences(strict)
    differences.compare_keys(expected, found, where)
    differences.check()


def to_tensor(value: Any, where: str) -> torch.Tensor:
    """Returns a tensor or array as a tensor that shares its memory.

    Raises:
        TypeError: If it is neither a tensor nor an array.
    """
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return torch.from_numpy(np.asarray(value))
    raise TypeError(f"{where} must be a tensor or a numpy array, but it is a {type(value).__name__}")
