"""Finds the 16-bit floating-point types whose products are slow on this processor."""

from __future__ import annotations

import functools

import torch

__all__ = ["slow_halves"]


@functools.cache
def slow_halves() -> tuple[torch.dtype, ...]:
    """Returns the 16-bit floats whose products PyTorch's kernels compute slowly in training.

    float16 always is one. Without arithmetic for it, products are computed one by one; with it (AVX512-FP16), a step
    of six convolutions still took 175 times as long as in fp32 (torch 2.13).
    """
    onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    bfloat16 = onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float16,) if bfloat16 else (torch.float16, torch.bfloat16)
