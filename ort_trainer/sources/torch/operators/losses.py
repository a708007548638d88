"""Losses that PyTorch's exporter or its decompositions get wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .registry import composite, decomposition, replacement

aten = torch.ops.aten


@composite(aten.multilabel_margin_loss.default)
def _multilabel_margin_loss(input: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    """The labels of a sample end at the first -1. (Torch 2.13's own decomposition counts what follows as class 0.)"""
    single = input.dim() < 2
    input, target = (input.reshape(1, -1), target.reshape(1, -1)) if single else (input, target)
    classes = input.shape[1]
    valid = (target < 0).long().cumsum(1) == 0
    label = torch.where(valid, target, 0)
    is_label = (torch.nn.functional.one_hot(label, classes) * valid.unsqueeze(-1)).sum(1) > 0
    margin = _positive(1.0 - input.gather(1, label).unsqueeze(-1) + input.unsqueeze(1))
    counted = valid.unsqueeze(-1) & ~is_label.unsqueeze(1)
    loss = torch.where(counted, margin, 0.0).sum((1, 2)) / classes
    loss = loss[0] if single else loss
    return _reduced(loss, reduction)


@composite(aten.multi_margin_loss.default)
def _multi_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    p: float = 1,
    margin: float = 1,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
) -> torch.Tensor:
    """A margin that is met exactly has no gradient. (In PyTorch's own decomposition it has.)"""
    single = input.dim() < 2
    rows, label = (input.reshape(1, -1), target.reshape(1)) if single else (input, target)
    classes = rows.shape[1]
    violated = _positive(margin - rows.gather(1, label[:, None]) + rows)
    violated = violated if p == 1 else violated.square()
    violated = violated if weight is None else violated * weight[label][:, None]
    others = torch.arange(classes, device=rows.device) != label[:, None]
    loss = torch.where(others, violated, 0.0).sum(1) / classes
    return _reduced(loss[0] if single and reduction == 0 else loss, reduction)


def _positive(value: torch.Tensor) -> torch.Tensor:
    """Returns what is more than zero, which neither zero nor NaN is, and zero elsewhere."""
    return torch.where(value > 0, value, 0.0)


def _reduced(loss: torch.Tensor, reduction: int) -> torch.Tensor:
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


@decomposition(aten.soft_margin_loss_backward.default)
def _soft_margin_loss_backward(
    grad_output: torch.Tensor, input: torch.Tensor, target: torch.Tensor, reduction: int
) -> torch.Tensor:
    """PyTorch's formula: NaN where the exponential overflows to infinity."""
    growth = (-target * input).exp()
    share = grad_output / input.numel() if reduction == 1 else grad_output
    return share * (-target * growth / (growth + 1))


@decomposition(aten.smooth_l1_loss_backward.default)
def _smooth_l1_loss_backward(
    grad_output: torch.Tensor, input: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> torch.Tensor:
    """What is neither beyond beta nor beyond its negative is divided by it, NaN included."""
    share = grad_output / input.numel() if reduction == 1 else grad_output
    x = input - target
    inner = x / beta if beta else x
    slope = torch.where(x <= -beta, -1.0, torch.where(x >= beta, 1.0, inner))
    return share * (slope if beta else torch.where(x == 0, 0.0, slope))


@replacement(F, "gaussian_nll_loss")
def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """The documented formula of ``F.gaussian_nll_loss``, which looks for negative variances first."""
    variance = var * torch.ones_like(input) if isinstance(var, float) else var
    if variance.shape == input.shape[:-1]:
        variance = variance.unsqueeze(-1)
    # The clamp has no part in the gradient.
    variance = variance + (variance.clamp(min=eps) - variance).detach()
    loss = 0.5 * (variance.log() + (input - target).square() / variance)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return _reduced(loss, ("none", "mean", "sum").index(reduction))


# A logarithm of zero that stays finite, so that no infinity meets a zero in the backward pass.
_LOG_ZERO = -1e30


@replacement(torch, "ctc_loss")
def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Connectionist temporal classification by the forward recursion of Graves et al. (2006), unrolled over time.

    Args:
        log_probs: (time, batch, classes), or (time, classes).
        targets: (batch, length) padded, or all labels in one row.
        input_lengths: Of each sample.
        target_lengths: Of each sample.
        blank: Class of the blank.
        reduction: 0 none, 1 mean of the losses divided by the target's length, 2 sum.
        zero_infinity: Whether an impossible alignment costs 0 instead of infinity.
    """
    single = log_probs.dim() == 2
    log_probs = log_probs.unsqueeze(1) if single else log_probs
    steps, batch = log_probs.shape[:2]
    frames, lengths = (
        torch.as_tensor(given, device=log_probs.device).long().reshape(-1).expand(batch)
        for given in (input_lengths, target_lengths)
    )
    targets = targets.long()
    if targets.dim() == 1:
        place = (lengths.cumsum(0) - lengths)[:, None] + torch.arange(targets.shape[0], device=targets.device)
        targets = targets[place.clamp(max=targets.shape[0] - 1)]
    # Blanks stand before, between and behind the labels.
    blanks = torch.full_like(targets, blank)
    states = torch.cat([torch.stack([blanks, targets], 2).flatten(1), blanks[:, :1]], 1)
    before = F.pad(states, (2, 0), value=blank)[:, : states.shape[1]]
    may_skip = (states != blank) & (states != before)
    emitted = log_probs.gather(2, states.expand(steps, batch, states.shape[1]))
    first = torch.arange(states.shape[1], device=states.device) < 2
    alpha = torch.where(first, emitted[0], _LOG_ZERO)
    edge = torch.full_like(alpha[:, :2], _LOG_ZERO)
    for step in range(1, int(steps)):
        padded = torch.cat([edge, alpha], 1)
        ways = [alpha, padded[:, 1:-1], torch.where(may_skip, padded[:, :-2], _LOG_ZERO)]
        largest = torch.maximum(torch.maximum(ways[0], ways[1]), ways[2]).detach()
        onward = torch.stack(ways).sub(largest).exp().sum(0).log() + largest + emitted[step]
        alpha = torch.where((step < frames)[:, None], onward, alpha)
    last = alpha.gather(1, 2 * lengths[:, None])
    label = alpha.gather(1, (2 * lengths[:, None] - 1).clamp(min=0))
    label = torch.where(lengths[:, None] > 0, label, _LOG_ZERO)
    loss = -torch.logsumexp(torch.cat([last, label], 1), 1)
    # PyTorch's backward pass takes the inputs for logarithms of probabilities that sum to 1, also where they do not.
    within = (torch.arange(steps, device=frames.device)[:, None] < frames).unsqueeze(-1)
    total = torch.where(within, log_probs.exp(), 0.0).sum((0, 2))
    loss = loss + (total - total.detach())
    impossible = loss > -_LOG_ZERO / 2
    loss = torch.where(impossible, 0.0 if zero_infinity else math.inf, loss)
    if reduction == 1:
        return (loss / lengths.clamp(min=1)).mean()
    return loss.sum() if reduction == 2 else loss[0] if single else loss
