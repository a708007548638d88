"""Operators that PyTorch has kernels for, forward and backward, but decomposes in exports, before it differentiates.

Its functions that do so are registered for the dispatch key Autograd, and run only while PyTorch traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch._C import DispatchKey
from torch._decomp.decompositions import upsample_compute_output_size

from ..fx.operator_table import Size, whole

aten = torch.ops.aten

RESIZING = (
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d,
    aten._upsample_nearest_exact2d,
    aten._upsample_nearest_exact3d,
    aten.upsample_linear1d,
    aten.upsample_bilinear2d,
    aten.upsample_trilinear3d,
    aten.upsample_bicubic2d,
)


def _kernel(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        """Runs an operator without the function that decomposes it."""
        others = {key: function for key, function in operator.py_kernels.items() if key != DispatchKey.Autograd}
        with mock.patch.object(operator, "py_kernels", others), mock.patch.object(operator, "_dispatch_cache", {}):
            return operator(*args, **kwargs)

    return run


def _resize(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    run = _kernel(operator)

    def resize(input: torch.Tensor, output_size: Sequence[Size] | None, *corners_and_scales: Any) -> Any:
        """Resizes images by their kernel, not by reading the neighbours of each pixel by index.

        Sequences are copied if they are transposed: PyTorch's description keeps their order, and its kernels do not.
        """
        *corners, scales = corners_and_scales
        sizes = upsample_compute_output_size(input.shape, output_size, scales)  # type: ignore[no-untyped-call]
        input = input.contiguous() if input.dim() < 4 else input
        return run(input, sizes, *corners, *(scales or [None] * len(sizes)))

    return resize


def _describe(packet: torch._ops.OpOverloadPacket[..., Any], result: Callable[..., torch.Tensor]) -> None:
    """Describes the result of a backward pass, of which PyTorch's own description takes known sizes only."""
    backward = getattr(aten, f"{packet.__name__}_backward").default
    if DispatchKey.Meta not in backward.py_kernels:
        backward.py_impl(DispatchKey.Meta)(result)


def _like_input(gradient: torch.Tensor, input: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(input)


def _of_input_size(
    gradient: torch.Tensor, output_size: Sequence[Size], input_size: Sequence[Size], *_: Any
) -> torch.Tensor:
    return gradient.new_empty(input_size)


def _in_its_order(
    gradient: torch.Tensor, output_size: Sequence[Size], input_size: Sequence[Size], *_: Any
) -> torch.Tensor:
    return gradient.new_empty(input_size).to(memory_format=torch._prims_common.suggest_memory_format(gradient))


for _packet in (aten.hardshrink, aten.softshrink):
    whole(_packet.default)(_kernel(_packet.default))
    _describe(_packet, _like_input)

for _packet in RESIZING:
    whole(_packet.vec)(_resize(_packet.default))
    _describe(_packet, _of_input_size if _packet is aten.upsample_bicubic2d else _in_its_order)
