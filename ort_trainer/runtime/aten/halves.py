"""For which halves the processor has no arithmetic of its own."""

from __future__ import annotations

import functools

import torch

__all__ = ["slow_halves"]


@functools.cache
def slow_halves() -> tuple[torch.dtype, ...]:
    """Returns the types of halves for which oneDNN has no kernels here, so that PyTorch multiplies one by one."""
    if not torch._C._has_mkldnn:
        return ()
    known = {
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    }
    return tuple(dtype for dtype, supported in known.items() if not supported())
