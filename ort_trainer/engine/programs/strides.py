"""Operators that ignore the strides of their tensors.

PyTorch's functions call them with contiguous tensors. A captured graph lacks that call where a tensor is contiguous at
the captured sizes; at others it may be a view: ``reshape`` copies a transposed batch, but not one with a single sample.
Some of these operators raise then, and others compute wrong numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_Function = Callable[..., Any]


def with_contiguous_tensors(target: str, function: _Function) -> _Function:
    """Returns a function that calls an operator with the strides that it needs: mostly the operator itself.

    Args:
        target: The name of the operator, without its overload.
        function: The operator.
    """
    prepare = _attention if target.startswith(_ATTENTION) else _PREPARE.get(target)
    if prepare is None:
        return function

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*prepare(args), **kwargs)

    return run


def _contiguous(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.contiguous() if isinstance(value, torch.Tensor) else value for value in args)


def _order(value: torch.Tensor) -> torch.memory_format:
    """Returns the order in which a kernel reads memory: images on the CPU may be channels last.

    Kernels guess it from all strides, even from the meaningless stride of an axis of size 1.
    """
    if value.dim() not in (4, 5) or value.device.type != "cpu":
        return torch.contiguous_format
    expected = 1
    for axis in (1, *range(value.dim() - 1, 1, -1), 0):
        if value.stride(axis) != expected:
            return torch.contiguous_format
        expected *= value.shape[axis]
    return torch.channels_last if value.dim() == 4 else torch.channels_last_3d


def _group_norm(args: tuple[Any, ...]) -> tuple[Any, ...]:
    value, *others = args
    return value.contiguous(memory_format=_order(value)), *_contiguous(tuple(others))


def _norm_backward(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gives the gradient the order of the normalized tensor, in which the kernel reads it."""
    gradient, value, *others = args
    order = _order(value)
    return gradient.contiguous(memory_format=order), value.contiguous(memory_format=order), *_contiguous(tuple(others))


def _attention(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Makes the last axis, within a head, contiguous: the kernel respects only the other strides."""
    return tuple(
        value.contiguous() if isinstance(value, torch.Tensor) and value.stride()[-1:] != (1,) else value
        for value in args
    )


_ATTENTION = "aten._scaled_dot_product_"
_PREPARE: dict[str, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {
    "aten.native_group_norm": _group_norm,
    "aten.native_group_norm_backward": _norm_backward,
    "aten.native_batch_norm_backward": _norm_backward,
    **dict.fromkeys(
        (
            "aten._ctc_loss",
            "aten._ctc_loss_backward",
            "aten._embedding_bag",
            "aten._embedding_bag_backward",
            "aten._embedding_bag_per_sample_weights_backward",
            "aten._pdist_forward",
            "aten._pdist_backward",
            "aten.mkldnn_rnn_layer",
            "aten.mkldnn_rnn_layer_backward",
            "aten.adaptive_max_pool3d_backward",
            "aten.fractional_max_pool2d_backward",
            "aten.fractional_max_pool3d_backward",
            "aten.nll_loss2d_backward",
            "ort_trainer.ctc_losses",
        ),
        _contiguous,
    ),
}
IGNORING_STRIDES = tuple(_PREPARE)
"""The names of these operators, without those of attention."""
