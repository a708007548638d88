"""Helpers for batches of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["moved", "samples"]


def moved(value: Any, device: torch.device) -> Any:
    """Returns a batch with its tensors on a device."""
    if isinstance(value, Mapping):
        return {key: moved(entry, device) for key, entry in value.items()}
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if type(value) in (list, tuple):
        return type(value)(moved(entry, device) for entry in value)
    return value


def samples(batch: Any) -> int:
    """Returns the number of samples: the first dimension of the first tensor."""
    entries = [batch]
    while entries:
        entry = entries.pop(0)
        if getattr(entry, "shape", None):
            return int(entry.shape[0])
        if isinstance(entry, Mapping):
            entries = [*entry.values(), *entries]
        elif isinstance(entry, (list, tuple)):
            entries = [*entry, *entries]
    return 1
