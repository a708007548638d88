"""Keeps sizes symbolic where Python would turn them into numbers."""

from __future__ import annotations

import builtins
from typing import Any

import torch

from .registry import Size, replacement

_len = builtins.len


@replacement(builtins, "len")
def _length(value: Any, /) -> Size:
    """Returns the first size of a tensor, symbolic as in ``value.shape[0]``; Python's own ``len`` returns a number."""
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else _len(value)
