"""Sizes that are asked for in ways which would make numbers of them."""

from __future__ import annotations

import builtins
from typing import Any

import torch

from .registry import Size, replacement

_len = builtins.len


@replacement(builtins, "len")
def _length(value: Any, /) -> Size:
    """Keeps the first size of a tensor symbolic, as ``value.shape[0]`` is: Python's own ``len`` returns a number."""
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else _len(value)
