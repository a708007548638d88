"""Functions of ``nn.Transformer`` and its parts that read the values of tensors, which a graph does not know."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.nn.modules import transformer

from .registry import replacement

_mha: ModuleType = torch.backends.mha


@replacement(transformer, "_detect_is_causal_mask")
def _detect_is_causal_mask(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Does not inspect the mask: knowing that it is causal would only save reading it."""
    return is_causal is True


@replacement(_mha, "get_fastpath_enabled")
def _get_fastpath_enabled() -> bool:
    """Disables the fast path in evaluation: it leaves out padding, whose amount it reads from the values of a mask."""
    return False
