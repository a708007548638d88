"""Losses that PyTorch's exporter or its decompositions get wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..engine.programs import operators  # noqa: F401 - which defines the package's own
from ..fx.autocast import as_operator
from ..fx.operator_table import composite, decomposition, replacement

aten = torch.ops.aten
ort_ops = torch.ops.ort_trainer

_CROSS_ENTROPY, _NLL_LOSS = torch._C._nn.cross_entropy_loss, torch._C._nn.nll_loss_nd


@composite(aten.multilabel_margin_loss.default, for_pytorch=True)
def _multilabel_margin_loss(input: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    """Ends the labels of a sample at the first -1. (Torch 2.13's own decomposition takes the rest for class 0.)"""
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


@composite(aten.multi_margin_loss.default, for_pytorch=True)
def _multi_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    p: float = 1,
    margin: float = 1,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
) -> torch.Tensor:
    """Gives a margin that is met exactly no gradient. (PyTorch's own decomposition does.)"""
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
    """Returns the value where it is greater than zero, and zero elsewhere, including NaN."""
    return torch.where(value > 0, value, 0.0)


def _reduced(loss: torch.Tensor, reduction: int) -> torch.Tensor:
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


@decomposition(aten.soft_margin_loss_backward.default)
def _soft_margin_loss_backward(
    grad_output: torch.Tensor, input: torch.Tensor, target: torch.Tensor, reduction: int
) -> torch.Tensor:
    """Computes PyTorch's formula, which is NaN where the exponential overflows to infinity."""
    growth = (-target * input).exp()
    share = grad_output / input.numel() if reduction == 1 else grad_output
    return share * (-target * growth / (growth + 1))


@decomposition(aten.smooth_l1_loss_backward.default)
def _smooth_l1_loss_backward(
    grad_output: torch.Tensor, input: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> torch.Tensor:
    """Divides everything between -beta and beta by beta, including NaN."""
    share = grad_output / input.numel() if reduction == 1 else grad_output
    x = input - target
    inner = x / beta if beta else x
    slope = torch.where(x <= -beta, -1.0, torch.where(x >= beta, 1.0, inner))
    return share * (slope if beta else torch.where(x == 0, 0.0, slope))


@replacement(torch._C._nn, "cross_entropy_loss")
def _cross_entropy_loss(input: torch.Tensor, target: torch.Tensor, *settings: Any) -> torch.Tensor:
    """Takes labels of uint8, as PyTorch's kernel does. (Its decomposition refuses them while a model is captured.)"""
    return _CROSS_ENTROPY(input, _as_index(target), *settings)


@replacement(torch._C._nn, "nll_loss_nd")
def _nll_loss(input: torch.Tensor, target: torch.Tensor, *settings: Any) -> torch.Tensor:
    """Takes labels of uint8; see above."""
    return _NLL_LOSS(input, _as_index(target), *settings)


def _as_index(target: torch.Tensor) -> torch.Tensor:
    return target.long() if target.dtype == torch.uint8 else target


@replacement(F, "gaussian_nll_loss")
def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """Computes the documented formula of ``F.gaussian_nll_loss``, without its check for negative variances."""
    variance = var * torch.ones_like(input) if isinstance(var, float) else var
    if variance.shape == input.shape[:-1]:
        variance = variance.unsqueeze(-1)
    # The gradient ignores the clamp.
    variance = variance + (variance.clamp(min=eps) - variance).detach()
    loss = 0.5 * (variance.log() + (input - target).square() / variance)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return _reduced(loss, ("none", "mean", "sum").index(reduction))


@replacement(torch, "triplet_margin_loss")
def _triplet_margin_loss(
    anchor: torch.Tensor,
    positive: torch.Tensor,
    negative: torch.Tensor,
    margin: float | torch.Tensor = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: int = 1,
) -> torch.Tensor:
    """PyTorch's own composition, with a margin that may be a tensor, as a loss parameter is."""
    arguments = (anchor, positive, negative, margin, p, eps, swap, reduction)
    return as_operator(aten.triplet_margin_loss.default, _composed_triplet_margin_loss, *arguments)  # type: ignore[no-any-return]


def _composed_triplet_margin_loss(
    anchor: torch.Tensor,
    positive: torch.Tensor,
    negative: torch.Tensor,
    margin: float | torch.Tensor,
    p: float,
    eps: float,
    swap: bool,
    reduction: int,
) -> torch.Tensor:
    near, far = F.pairwise_distance(anchor, positive, p, eps), F.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    return _reduced((margin + near - far).clamp(min=0), reduction)


# A finite logarithm of zero, so that the backward pass never multiplies infinity by zero.
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
    """Computes the CTC loss by an operator of our own: the sizes of PyTorch's operators depend on the lengths.

    Args:
        log_probs: (time, batch, classes), or (time, classes).
        targets: (batch, length) padded, or all labels in one row.
        input_lengths: Number of time steps of each sample.
        target_lengths: Number of labels of each sample.
        blank: Class of the blank.
        reduction: 0 none, 1 mean of the losses divided by the target's length, 2 sum.
        zero_infinity: Whether an impossible alignment costs 0 instead of infinity.
    """
    single = log_probs.dim() == 2
    log_probs = log_probs.unsqueeze(1) if single else log_probs
    if log_probs.dtype in (torch.float16, torch.bfloat16):  # as under autocast, which does not see this function
        log_probs = log_probs.float()
    frames, lengths = (
        torch.as_tensor(counts, device=log_probs.device).long().reshape(-1).expand(log_probs.shape[1])
        for counts in (input_lengths, target_lengths)
    )
    loss: torch.Tensor = ort_ops.ctc_losses(log_probs, targets.long(), frames, lengths, blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss.isinf(), 0.0, loss)
    if reduction == 1:
        return (loss / lengths.clamp(min=1)).mean()
    return loss.sum() if reduction == 2 else loss[0] if single else loss


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], inputs[2])


def _ctc_backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    d_log_probs, frames = ctx.saved_tensors
    # As in PyTorch, zero behind the last frame even if the gradient of the loss is infinite.
    within = torch.arange(d_log_probs.shape[0], device=d_log_probs.device)[:, None] < frames
    return torch.where(within[..., None], gradient[:, None] * d_log_probs, 0.0), None, None, None, None, None


torch.library.register_autograd("ort_trainer::ctc_losses", _ctc_backward, setup_context=_keep_gradient)


@composite(ort_ops.ctc_losses.default)
def _ctc_losses(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    frames: torch.Tensor,
    lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the forward recursion of Graves et al. (2006), unrolled over time."""
    steps, batch = log_probs.shape[:2]
    if targets.dim() == 1:
        place = (lengths.cumsum(0) - lengths)[:, None] + torch.arange(targets.shape[0], device=targets.device)
        targets = targets[place.clamp(max=targets.shape[0] - 1)]
    # Padding may be any number. A negative label would count from the end; this one is refused as out of range.
    targets = torch.where(targets < 0, log_probs.shape[2], targets)
    targets = torch.where(torch.arange(targets.shape[1], device=targets.device) < lengths[:, None], targets, blank)
    # Blanks precede, separate and follow the labels.
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
    # PyTorch's backward pass assumes that the inputs are logarithms of probabilities that sum to 1, even if they don't.
    within = (torch.arange(steps, device=frames.device)[:, None] < frames).unsqueeze(-1)
    total = torch.where(within, log_probs.exp(), 0.0).sum((0, 2))
    loss = loss + (total - total.detach())
    return torch.where(loss > -_LOG_ZERO / 2, math.inf, loss), torch.zeros_like(log_probs)
