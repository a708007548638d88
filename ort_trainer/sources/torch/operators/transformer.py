"""Functions behind ``nn.Transformer`` and its parts that look at the values of tensors, which a graph does not know."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.nn.modules import transformer

from .registry import replacement

_mha: ModuleType = torch.backends.mha


@replacement(transformer, "_detect_is_causal_mask")
def _detect_is_causal_mask(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Leaves a mask as it is: to know that it is a causal one would only save the reading of it."""
    return is_causal is True


@replacement(_mha, "get_fastpath_enabled")
def _get_fastpath_enabled() -> bool:
    """Keeps evaluation on the way of training: the short one leaves out padding, whose amount it reads from a mask."""
    return False
