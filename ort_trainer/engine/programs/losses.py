"""Losses that need less memory than PyTorch's own operators, or whose results have the same sizes for all values."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["cross_entropy_backward", "ctc_losses"]

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
    """Returns the gradient of the logits with PyTorch's own kernels, but with one matrix of their size instead of two.

    Args:
        gradient: Gradient of the loss: one number, or one per row without a reduction.
        log_probabilities: (rows, classes).
        target: (rows), int64.
        reduction: 0 none, 1 mean, 2 sum.
        ignore_index: A target whose row is ignored.
        total_weight: Number of rows that are not ignored.
    """
    given = _nll_loss_backward(gradient, log_probabilities, target, None, reduction, ignore_index, total_weight)
    # In place is safe: the kernel computes the sum of a row before it writes to the row.
    return _log_softmax_backward(given, log_probabilities, 1, log_probabilities.dtype, out=given)


def ctc_losses(
    log_probabilities: torch.Tensor,
    targets: torch.Tensor,
    frames: torch.Tensor,
    lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the CTC losses of a batch, and the gradient of their sum.

    What PyTorch keeps for the backward pass has a size that depends on the lengths; the gradient has not.

    Args:
        log_probabilities: (time, batch, classes).
        targets: (batch, length) padded, or all labels in one row.
        frames: (batch), the lengths in time.
        lengths: (batch), the numbers of labels.
        blank: Class of the blank.
        zero_infinity: Whether an infinite loss has the gradient 0.

    Returns:
        (batch), and a gradient like ``log_probabilities``.
    """
    given = targets, frames, lengths
    losses, alpha = torch.ops.aten._ctc_loss.Tensor(log_probabilities, *given, blank, zero_infinity)
    gradient: torch.Tensor = torch.ops.aten._ctc_loss_backward.Tensor(
        torch.ones_like(losses), log_probabilities, *given, losses, alpha, blank, zero_infinity
    )
    return losses, gradient.contiguous()
