"""Losses that need less memory than PyTorch's own operators, or whose results have the same sizes for all values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .linear import is_faster, product

# Without the Python part of their calls, as programs call them.
_nll_loss = torch.ops.aten.nll_loss_forward.default._op
_nll_loss_backward = torch.ops.aten.nll_loss_backward.default._op
_log_softmax: Callable[..., torch.Tensor] = torch.ops.aten._log_softmax.out._op
_log_softmax_backward: Callable[..., torch.Tensor] = torch.ops.aten._log_softmax_backward_data.out._op


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
    d_logits = _nll_loss_backward(gradient, log_probabilities, target, None, reduction, ignore_index, total_weight)
    # In place is safe: the kernel computes the sum of a row before it writes to the row.
    return _log_softmax_backward(d_logits, log_probabilities, 1, log_probabilities.dtype, out=d_logits)


# Size of a block's logits, and its minimum of rows: fewer rows make products slow, more take memory.
_BLOCK_BYTES, _FEWEST_ROWS = 32 << 20, 128


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    gradient: torch.Tensor,
    reduction: int,
    ignore_index: int,
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    """Returns the cross entropy of hidden @ weight.T + bias, and its gradients, without the whole matrix of logits.

    Rows with the ignored label are left out, and the others are computed by blocks, forward and backward together.
    Logits are fp32 after the product, as autocast casts them. If something is not finite, it may be in a row that
    is left out: a NaN in an ignored row makes all gradients NaN in PyTorch. Then all rows are computed, with PyTorch's
    own kernels.

    Args:
        hidden: (rows, inputs).
        weight: (classes, inputs).
        bias: (classes), or None.
        target: (rows), int64.
        gradient: Gradient of the loss: one number, or one per row without a reduction.
        reduction: 0 none, 1 mean, 2 sum.
        ignore_index: A target whose row is ignored.
        wanted: Whether the gradients of ``hidden``, ``weight`` and ``bias`` are needed.

    Returns:
        The loss, and the three gradients; those that are not needed have undefined contents.

    Raises:
        IndexError: If a target is no class.
    """
    kept = (target != ignore_index).nonzero()[:, 0]
    if len(kept):
        lowest, highest = target[kept].aminmax()
        if lowest < 0 or highest >= len(weight):
            raise IndexError(f"Target {int(lowest if lowest < 0 else highest)} is out of bounds.")
    gradient = gradient.float()
    factors = (gradient / len(kept) if reduction == 1 else gradient).expand(len(target))
    plain = bool(gradient.isfinite().all())
    shared = hidden, weight, bias, target, factors, ignore_index, wanted
    results = _by_blocks(kept, *shared, plain) if plain else ()
    if not plain or (len(kept) < len(target) and not _all_finite(hidden, weight, bias, results[1], kept)):
        results = _by_blocks(torch.arange(len(target)), *shared, False)
    losses, *gradients = results
    loss = losses if reduction == 0 else losses.sum() / len(kept) if reduction == 1 else losses.sum()
    return [loss, *gradients]


def _all_finite(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    d_hidden: torch.Tensor,
    kept: torch.Tensor,
) -> bool:
    """Returns whether hidden values and weights are finite, so that the rows that are left out have zeros as gradients.

    A sum is not finite if one of its terms is not. A row of ``d_hidden`` is a product with the weights: its sum saves a
    pass over them.
    """
    seen = [d_hidden[kept[0]]] if len(kept) and len(d_hidden) else [weight] if bias is None else [weight, bias]
    return all(bool(tensor.sum().isfinite()) for tensor in (hidden, *seen))


def _by_blocks(
    computed: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    factors: torch.Tensor,
    ignore_index: int,
    wanted: Sequence[bool],
    plain: bool,
) -> tuple[torch.Tensor, ...]:
    """Returns the losses of rows and the three gradients.

    Args:
        computed: The rows to compute, (number).
        hidden, weight, bias, target: As given.
        factors: The gradient of each row's loss.
        ignore_index: As given.
        wanted: As given.
        plain: Whether all factors are finite and no computed row is ignored, so that factors can be applied after the
            products, which is faster.
    """
    (rows,), classes = target.shape, len(weight)
    of_hidden, of_weight, of_bias = wanted
    everything = len(computed) == rows
    losses = torch.zeros(rows)
    d_hidden = torch.zeros(hidden.shape if of_hidden else 0, dtype=hidden.dtype)
    # oneDNN copies the transpose that it multiplies from the left: the hidden values are fewer than the logits.
    turned = weight.dtype == torch.float32 and is_faster(2.0 * len(computed) * weight.numel(), True)
    d_weight = torch.zeros((weight.shape[::-1] if turned else weight.shape) if of_weight else 0)
    d_bias = torch.zeros(classes if of_bias else 0)
    for block in torch.split(computed, max(_FEWEST_ROWS, _BLOCK_BYTES // (4 * classes))):
        here = slice(int(block[0]), int(block[-1]) + 1) if everything else block
        x, labels, factor = hidden[here], target[here], factors[here][:, None]
        logits = product(x, weight.t(), bias).float()
        _log_softmax(logits, 1, False, out=logits)
        losses[here], total = _nll_loss(logits, labels, None, 0, ignore_index)
        # From here on these are the gradients of the logits; if plain, without the factors of their rows.
        if plain:
            logits.exp_().scatter_add_(1, labels[:, None], torch.full((len(labels), 1), -1.0))
        else:
            logits = cross_entropy_backward(factor[:, 0], logits, labels, 0, ignore_index, total)
            factor = torch.ones_like(factor)
        if of_bias:
            d_bias += torch.mv(logits.t(), factor[:, 0])
        d_logits = logits.to(x.dtype)
        if of_hidden:
            d_hidden[here] = product(d_logits, weight).mul_(factor)
        if of_weight and turned:
            d_weight += product((x * factor).t(), d_logits)
        elif of_weight and x.dtype == torch.float32:
            d_weight.addmm_(d_logits.t(), x * factor)
        elif of_weight:
            d_weight += torch.mm(d_logits.t(), (x * factor).to(x.dtype))
    if turned and of_weight:
        d_weight = d_weight.t().contiguous()
    return losses, d_hidden, d_weight.to(weight.dtype), d_bias.to(weight.dtype)


def ctc_losses(
    log_probabilities: torch.Tensor,
    targets: torch.Tensor,
    frames: torch.Tensor,
    lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the CTC losses of a batch, and the gradient of their sum.

    The gradient is computed at once because its size is fixed; what PyTorch would save for the backward pass has a size
    that depends on the lengths.

    Args:
        log_probabilities: (time, batch, classes).
        targets: (batch, length) padded, or all labels in one row.
        frames: (batch), the lengths in time.
        lengths: (batch), the numbers of labels.
        blank: Class of the blank.
        zero_infinity: Whether an infinite loss has the gradient 0.

    Returns:
        (batch), and a gradient like ``log_probabilities``.

    Raises:
        IndexError: If a label is not a class. PyTorch's kernel would read and write outside of its tensors.
    """
    place = torch.arange(targets.shape[-1], device=targets.device)
    is_used = place < (lengths.unsqueeze(1) if targets.ndim > 1 else lengths.sum())
    labels, classes = targets[is_used], log_probabilities.shape[-1]
    if ((labels < 0) | (labels >= classes)).any():
        lowest, highest = torch.aminmax(labels)
        raise IndexError(f"ctc_loss: labels must be from 0 to {classes - 1}, but {int(lowest)} to {int(highest)} occur")
    sequences = targets, frames, lengths
    losses, alpha = torch.ops.aten._ctc_loss.Tensor(log_probabilities, *sequences, blank, zero_infinity)
    gradient: torch.Tensor = torch.ops.aten._ctc_loss_backward.Tensor(
        torch.ones_like(losses), log_probabilities, *sequences, losses, alpha, blank, zero_infinity
    )
    return losses, gradient.contiguous()
