"""Losses for which PyTorch's own operators go over the memory more often than need be."""

from __future__ import annotations

import torch

__all__ = ["cross_entropy_backward"]


def cross_entropy_backward(
    gradient: torch.Tensor,
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """Returns the gradient of the logits: (softmax - one-hot) times the gradient of each row's loss.

    Args:
        gradient: Of the loss: one number, or one for each row without a reduction.
        log_probabilities: (rows, classes).
        target: (rows), int64.
        reduction: 0 none, 1 mean, 2 sum.
        ignore_index: A target whose row does not count.
        total_weight: Number of rows that count.
    """
    counts = target != ignore_index
    share = gradient / total_weight if reduction == 1 else gradient
    share = torch.where(counts, share, 0.0).unsqueeze(1)
    result = log_probabilities.exp().mul_(share)
    return result.scatter_add_(1, torch.where(counts, target, 0).unsqueeze(1), share.neg())
