"""Losses for which PyTorch's own operators take more memory than need be."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["cross_entropy_backward"]

_nll_loss_backward = torch.ops.aten.nll_loss_backward.default
_log_softmax_backward: Callable[..., torch.Tensor] = torch.ops.aten._log_softmax_backward_data.out


def cross_entropy_backward(
    gradient: torch.Tensor,
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """Returns the gradient of the logits, by PyTorch's own kernels, but with one matrix of their size instead of two.

    Args:
        gradient: Of the loss: one number, or one for each row without a reduction.
        log_probabilities: (rows, classes).
        target: (rows), int64.
        reduction: 0 none, 1 mean, 2 sum.
        ignore_index: A target whose row does not count.
        total_weight: Number of rows that count.
    """
    given = _nll_loss_backward(gradient, log_probabilities, target, None, reduction, ignore_index, total_weight)
    # The kernel takes the sum of a row before it writes to the row.
    return _log_softmax_backward(given, log_probabilities, 1, log_probabilities.dtype, out=given)
