"""Operators that are taken apart before PyTorch differentiates the model.

Their own backward operators have no ONNX translation; made of simple operators, they are differentiated as these are.
A few functions of PyTorch look at the values of tensors and can't be exported at all: they are replaced while the model
is captured.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._decomp import decompositions

from ..errors import ExportError

__all__ = ["exportable_functions", "replace_composites"]

aten = torch.ops.aten
Size = Any
"""An int, or a symbolic one."""


def replace_composites(module: torch.fx.GraphModule) -> None:
    """Puts compositions of simple operators in the place of operators, in a graph that is not differentiated yet."""
    for node in module.graph.nodes:
        composite = _COMPOSITES.get(node.target) if node.op == "call_function" else None
        if composite is not None:
            node.target = composite
    module.recompile()


@contextlib.contextmanager
def exportable_functions() -> Iterator[None]:
    """Replaces functions that look at the values of tensors by ones that don't."""
    with (
        mock.patch.object(torch, "ctc_loss", _ctc_loss),
        mock.patch.object(F, "gaussian_nll_loss", _gaussian_nll_loss),
    ):
        yield


def _grid_sampler(input: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, align_corners: bool) -> Any:
    if input.dim() != 4:
        return aten.grid_sampler.default(input, grid, mode, padding, align_corners)
    # A place that is NaN or infinite would become an index somewhere in memory.
    finite = grid.isfinite()
    grid = torch.where(finite, grid, 0.0)
    sampled = decompositions._grid_sampler_2d(input, grid, mode, padding, align_corners)  # type: ignore[no-untyped-call]
    sampled = torch.where(finite.all(-1).unsqueeze(1), sampled, math.nan)
    return _with_zero_gradient(sampled, grid) if mode == 1 else sampled


def _with_zero_gradient(value: torch.Tensor, constant_in: torch.Tensor) -> torch.Tensor:
    """Returns the value with a gradient of zero for what it is constant in: weight decay asks whether there is one."""
    never = torch.zeros((), dtype=torch.bool, device=value.device)
    return torch.where(never, constant_in.sum().to(value.dtype), value)


def _affine_grid(theta: torch.Tensor, size: Sequence[Size], align_corners: bool) -> Any:
    return decompositions.affine_grid_generator(theta, list(size), align_corners)


def _bilinear(first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    product = torch.einsum("...i,oij,...j->...o", first, weight, second)
    return product if bias is None else product + bias


def _weight_norm(direction: torch.Tensor, magnitude: torch.Tensor, dim: int = 0) -> torch.Tensor:
    axes = [axis for axis in range(direction.dim()) if dim == -1 or axis != dim]
    return direction * (magnitude / direction.square().sum(axes, keepdim=dim != -1).sqrt())


def _embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Sums (mode 0), means (1) or maxima (2) of bags of rows; the bags are runs of ``indices``."""
    if scale_grad_by_freq:
        return aten.embedding_bag.padding_idx(  # type: ignore[no-any-return]
            weight, indices, offsets, True, mode, sparse, per_sample_weights, include_last_offset, padding_idx
        )
    starts = offsets[:-1] if include_last_offset else offsets
    place = torch.arange(indices.shape[0], device=indices.device)
    bag = (place[:, None] >= starts).sum(1) - 1
    rows = weight[indices]
    rows = rows if per_sample_weights is None else rows * per_sample_weights[:, None]
    if padding_idx is None:
        kept = torch.ones_like(indices, dtype=torch.bool)
    else:
        kept = indices != padding_idx % weight.shape[0]
    count = torch.zeros_like(starts).index_add(0, bag, kept.to(starts.dtype))
    shape = (starts.shape[0], weight.shape[1])
    if mode == 2:
        into = bag[:, None].expand(rows.shape)
        considered = torch.where(kept[:, None], rows, -math.inf).detach()
        best = rows.new_full(shape, -math.inf).scatter_reduce(0, into, considered, "amax")
        # Of equal rows the first one has the gradient.
        last = torch.full_like(best, rows.shape[0] - 1)
        candidates = torch.where(kept[:, None] & (considered == best[bag]), place[:, None].to(rows.dtype), last[0])
        first = last.scatter_reduce(0, into, candidates, "amin").long()
        result = torch.where(count[:, None] > 0, rows.gather(0, first), 0.0)
    else:
        result = rows.new_zeros(shape).index_add(0, bag, torch.where(kept[:, None], rows, 0.0))
        result = result / count.clamp(min=1)[:, None] if mode == 1 else result
    return result, bag, count, count


def _cdist(first: torch.Tensor, second: torch.Tensor, p: float = 2.0, compute_mode: int | None = None) -> torch.Tensor:
    difference = (first.unsqueeze(-2) - second.unsqueeze(-3)).abs()
    # The absolute value of NaN has a gradient of zero, its distance has none.
    difference = difference * torch.where(difference.isnan(), math.nan, 1.0)
    if p == 0:
        return _with_zero_gradient(
            torch.where(difference.isnan(), math.nan, (difference != 0).to(first.dtype)).sum(-1), difference
        )
    if p == 1:
        return difference.sum(-1)
    if p == math.inf:
        return _chebyshev(difference)
    apart = difference != 0  # NaN is
    total = torch.where(apart, torch.where(apart, difference, 1.0).pow(p), 0.0).sum(-1)
    # The gradient of equal points is zero, and a power below 1 has none at zero.
    return torch.where(total != 0, torch.where(total != 0, total, 1.0).pow(1 / p), 0.0)


def _chebyshev(difference: torch.Tensor) -> torch.Tensor:
    """Returns the largest along the last dimension; each that equals it has the whole gradient."""
    largest = difference.amax(-1)
    value = largest.detach()
    total = torch.where(difference == value.unsqueeze(-1), difference, 0.0).sum(-1)
    return torch.where(value.isfinite(), value + (total - total.detach()), largest)


def _pdist(points: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    first, second = torch.triu_indices(int(points.shape[0]), int(points.shape[0]), 1)
    return _cdist(points, points, p)[first, second]


def _adaptive_max_pool(dims: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def pool(input: torch.Tensor, output_size: Sequence[Size]) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = input.shape[-dims:]
        counts = [*output_size] * dims if len(output_size) == 1 else list(output_size)
        values, indices = [], []
        for position in itertools.product(*(range(int(count)) for count in counts)):
            starts = [i * size // count for i, size, count in zip(position, sizes, counts, strict=True)]
            stops = [
                ((i + 1) * size + count - 1) // count for i, size, count in zip(position, sizes, counts, strict=True)
            ]
            window = input
            for axis in range(dims):
                window = window.narrow(axis - dims, starts[axis], stops[axis] - starts[axis])
            best, place = window.flatten(-dims).max(-1)
            index = torch.zeros_like(place)
            scale: Size = 1
            for axis in reversed(range(dims)):
                width = stops[axis] - starts[axis]
                index = index + (place % width + starts[axis]) * scale
                place, scale = place // width, scale * sizes[axis]
            values.append(best)
            indices.append(index)
        shape = [*input.shape[:-dims], *counts]
        return torch.stack(values, -1).reshape(shape), torch.stack(indices, -1).reshape(shape)

    pool.__name__ = pool.__qualname__ = f"_adaptive_max_pool{dims}d"
    return pool


_adaptive_max_pool1d, _adaptive_max_pool2d, _adaptive_max_pool3d = map(_adaptive_max_pool, (1, 2, 3))


def _adaptive_avg_pool1d(input: torch.Tensor, output_size: Sequence[Size]) -> torch.Tensor:
    if list(output_size) == [1]:
        return input.mean(-1, keepdim=True)
    return aten.adaptive_avg_pool1d.default(input, output_size)  # type: ignore[no-any-return]


def _adaptive_avg_pool2d(input: torch.Tensor, output_size: Sequence[Size]) -> torch.Tensor:
    """PyTorch's own makes views of one pixel by their strides, for the layout with channels last."""
    if list(output_size) in ([1], [1, 1]):
        return input.mean((-2, -1), keepdim=True)
    return aten.adaptive_avg_pool2d.default(input, output_size)  # type: ignore[no-any-return]


def _adaptive_avg_pool3d(input: torch.Tensor, output_size: Sequence[Size]) -> torch.Tensor:
    """The mean of a box is a mean of means, axis by axis; a product with a matrix would spread infinities."""
    counts = [*output_size] * 3 if len(output_size) == 1 else output_size
    for axis, count in zip((-3, -2, -1), counts, strict=True):
        size, means = input.shape[axis], []
        for place in range(int(count)):
            start, stop = place * size // count, ((place + 1) * size + count - 1) // count
            means.append(input.narrow(axis, start, stop - start).mean(axis))
        input = torch.stack(means, axis)
    return input


def _pad(input: torch.Tensor, pad: Sequence[Size], mode: str = "constant", value: float | None = None) -> torch.Tensor:
    if mode != "replicate":
        return aten.pad.default(input, pad, mode, value)  # type: ignore[no-any-return]
    for number in range(len(pad) // 2):
        axis, size = -1 - number, input.shape[-1 - number]
        place = torch.arange(-pad[2 * number], size + pad[2 * number + 1], device=input.device)
        input = input.index_select(axis, place.clamp(0, size - 1))
    return input


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


def _positive(value: torch.Tensor) -> torch.Tensor:
    """Returns what is more than zero, which neither zero nor NaN is, and zero elsewhere."""
    return torch.where(value > 0, value, 0.0)


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


def _reduced(loss: torch.Tensor, reduction: int) -> torch.Tensor:
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


def _extremum(operator: Any, name: str) -> Callable[..., torch.Tensor]:
    def extremum(input: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
        """The gradient asks which elements equal the extremum; in fp16 ONNX Runtime may round only one of the two."""
        if input.dtype in (torch.float16, torch.bfloat16):
            return operator(input.float(), dim, keepdim).to(input.dtype)  # type: ignore[no-any-return]
        return operator(input, dim, keepdim)  # type: ignore[no-any-return]

    extremum.__name__ = extremum.__qualname__ = name
    return extremum


_amax, _amin = _extremum(aten.amax.default, "_amax"), _extremum(aten.amin.default, "_amin")


def _aminmax(
    input: torch.Tensor, *, dim: int | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = [] if dim is None else [dim]
    return _amin(input, dims, keepdim), _amax(input, dims, keepdim)


def _kth(
    input: torch.Tensor, places: Callable[[torch.Tensor, Size], Any], dim: int, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the elements at some places of the order; NaN comes last."""
    row = input if input.dim() else input.unsqueeze(0)
    indices = torch.sort(row, dim=dim, stable=True).indices
    chosen = indices.gather(dim, places(row, row.shape[dim]))
    values = row.gather(dim, chosen)
    if keepdim and input.dim():
        return values, chosen
    return values.squeeze(dim), chosen.squeeze(dim)


def _kthvalue(input: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    def places(row: torch.Tensor, size: Size) -> torch.Tensor:
        return torch.full_like(row.narrow(dim, 0, 1), k - 1, dtype=torch.long)

    return _kth(input, places, dim, keepdim)


def _median_dim(input: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """If there is a NaN, it is the median, and the last in the order."""

    def places(row: torch.Tensor, size: Size) -> torch.Tensor:
        middle = torch.full_like(row.narrow(dim, 0, 1), (size - 1) // 2, dtype=torch.long)
        return torch.where(row.isnan().any(dim, keepdim=True), size - row.isnan().sum(dim, keepdim=True), middle)

    return _kth(input, places, dim, keepdim)


def _nanmedian_dim(input: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    def places(row: torch.Tensor, size: Size) -> torch.Tensor:
        known: torch.Tensor = size - row.isnan().sum(dim, keepdim=True)
        return ((known - 1) // 2).clamp(min=0)

    return _kth(input, places, dim, keepdim)


def _whole_median(along: Callable[..., tuple[torch.Tensor, torch.Tensor]], name: str) -> Callable[..., torch.Tensor]:
    def median(input: torch.Tensor) -> torch.Tensor:
        """All elements that equal the median share its gradient."""
        value = along(input.detach().flatten(), 0)[0]
        if not input.is_floating_point():
            return value
        same = (input == value) | (input.isnan() & value.isnan())
        shared = torch.where(same, input, 0.0).sum() / same.sum()
        return torch.where(value.isnan(), shared, torch.where(same, input, -math.inf).amax())

    median.__name__ = median.__qualname__ = name
    return median


_median, _nanmedian = _whole_median(_median_dim, "_median"), _whole_median(_nanmedian_dim, "_nanmedian")


def _erfc(input: torch.Tensor) -> torch.Tensor:
    """The same."""
    return torch.erfc(input) + torch.where(input.isnan(), input, 0.0).detach()


def _erf(input: torch.Tensor) -> torch.Tensor:
    """ONNX Runtime has 1 for NaN. (In GELU the input is a factor besides.)"""
    return torch.erf(input) + torch.where(input.isnan(), input, 0.0).detach()


def _cumulative(best: Callable[..., Any], sign: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def cumulative(input: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        if input.dim() == 0:
            return input.clone(), torch.zeros_like(input, dtype=torch.long)
        size = input.shape[dim]
        place = torch.arange(size, device=input.device)
        row = input.movedim(dim, -1).unsqueeze(-2)
        if input.is_floating_point():
            worst: float = -sign * math.inf
        else:
            worst = torch.iinfo(input.dtype).min if sign > 0 else torch.iinfo(input.dtype).max
        upto = torch.where(place <= place[:, None], row, torch.full_like(row[..., :1], worst))
        # Of equal elements the last one counts, so they are looked through backwards; what comes later does not count.
        indices = torch.minimum(size - 1 - best(upto.flip(-1), dim=-1).indices, place).movedim(-1, dim)
        return input.gather(dim, indices), indices

    cumulative.__name__ = cumulative.__qualname__ = f"_cum{best.__name__}"
    return cumulative


_cummax, _cummin = _cumulative(torch.max, 1), _cumulative(torch.min, -1)


def _masked_scatter(input: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(input.shape, mask.shape)  # type: ignore[no-untyped-call]
    input, mask = input.expand(shape), mask.expand(shape)
    place = (mask.flatten().long().cumsum(0) - 1).clamp(0, source.numel() - 1)
    return torch.where(mask, source.flatten()[place].reshape(input.shape), input)


def _take(input: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return input.flatten()[index]


def _put(input: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    flat = input.flatten().index_put((index.flatten(),), source.flatten(), accumulate)
    return flat.reshape(input.shape)


def _scatter_reduce(
    input: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    """ONNX has no mean, which torch.onnx takes for an assignment; and fp16 sums are better sums in fp32."""
    if input.dtype in (torch.float16, torch.bfloat16):
        wide = _scatter_reduce(input.float(), dim, index, src.float(), reduce, include_self=include_self)
        return wide.to(input.dtype)
    if reduce in ("amax", "amin") and input.is_floating_point():
        return _scatter_extremum(input, dim, index, src, reduce, include_self)
    if reduce != "mean":
        return aten.scatter_reduce.two(input, dim, index, src, reduce, include_self=include_self)  # type: ignore[no-any-return]
    total = input.scatter_reduce(dim, index, src, "sum", include_self=include_self)
    ones = torch.ones_like(input).scatter_reduce(dim, index, torch.ones_like(src), "sum", include_self=include_self)
    return total / ones


def _scatter_extremum(
    input: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, reduce: str, include_self: bool
) -> torch.Tensor:
    """ONNX Runtime leaves NaN out of a maximum."""
    best: torch.Tensor = aten.scatter_reduce.two(input, dim, index, src, reduce, include_self=include_self)
    unknown = input.isnan().to(input.dtype)
    unknown = unknown.scatter_reduce(dim, index, src.isnan().to(input.dtype), "sum", include_self=include_self)
    return best * torch.where(unknown > 0, math.nan, 1.0)


def _index_reduce(
    input: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    if reduce in ("amax", "amin") and not include_self:
        raise ExportError(
            "aten.index_reduce.default has no ONNX translation for include_self=False and the reduction "
            f"{reduce!r}: use scatter_reduce, or start with {'-' * (reduce == 'amax')}inf"
        )
    shape = [1] * input.dim()
    if shape:
        shape[dim] = -1
    spread = index.reshape(shape).expand(source.shape)
    return _scatter_reduce(input, dim, spread, source, reduce, include_self=include_self)


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


_COMPOSITES: dict[Any, Callable[..., Any]] = {
    aten.grid_sampler.default: _grid_sampler,
    aten.affine_grid_generator.default: _affine_grid,
    aten.bilinear.default: _bilinear,
    aten._weight_norm.default: _weight_norm,
    aten.embedding_bag.default: _embedding_bag,
    aten.embedding_bag.padding_idx: _embedding_bag,
    aten.cdist.default: _cdist,
    aten.pdist.default: _pdist,
    aten.adaptive_max_pool1d.default: _adaptive_max_pool1d,
    aten.adaptive_max_pool2d.default: _adaptive_max_pool2d,
    aten.adaptive_max_pool3d.default: _adaptive_max_pool3d,
    aten.adaptive_avg_pool1d.default: _adaptive_avg_pool1d,
    aten.adaptive_avg_pool2d.default: _adaptive_avg_pool2d,
    aten.adaptive_avg_pool3d.default: _adaptive_avg_pool3d,
    aten.pad.default: _pad,
    aten.multi_margin_loss.default: _multi_margin_loss,
    aten.multilabel_margin_loss.default: _multilabel_margin_loss,
    aten.amax.default: _amax,
    aten.amin.default: _amin,
    aten.aminmax.default: _aminmax,
    aten.kthvalue.default: _kthvalue,
    aten.erf.default: _erf,
    aten.erfc.default: _erfc,
    aten.median.default: _median,
    aten.nanmedian.default: _nanmedian,
    aten.nanmedian.dim: _nanmedian_dim,
    aten.median.dim: _median_dim,
    aten.cummax.default: _cummax,
    aten.cummin.default: _cummin,
    aten.masked_scatter.default: _masked_scatter,
    aten.take.default: _take,
    aten.put.default: _put,
    aten.scatter_reduce.two: _scatter_reduce,
    aten.index_reduce.default: _index_reduce,
}
