"""What PyTorch computes slowly on this processor, so that graphs go around it."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch

_LINES = ("vendor_id", "model name", "flags", "Features")


@functools.cache
def described() -> str:
    """Returns what a compiler must know of the processor: its kind, and the instructions that it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(_LINES)))


@functools.cache
def slow_halves() -> tuple[torch.dtype, ...]:
    """Returns the 16-bit floats whose products PyTorch's kernels compute slowly in training.

    float16 always is one. Without arithmetic for it, products are computed one by one; with it (AVX512-FP16), a step
    of six convolutions still took 175 times as long as in fp32 (torch 2.13).
    """
    onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    bfloat16 = onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float16,) if bfloat16 else (torch.float16, torch.bfloat16)


@functools.cache
def slow_mkl() -> bool:
    """Returns whether MKL computes PyTorch's products, on a processor that is not Intel's.

    It uses the widest instructions of Intel's processors only: on an AMD EPYC with AVX512, its products took twice the
    time of oneDNN's (torch 2.13).
    """
    return torch.backends.mkl.is_available() and bool(described()) and "Intel" not in described()
