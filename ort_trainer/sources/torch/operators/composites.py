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

from .loss_composites import LOSS_COMPOSITES, ctc_loss, gaussian_nll_loss
from .order_composites import ORDER_COMPOSITES

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
        mock.patch.object(torch, "ctc_loss", ctc_loss),
        mock.patch.object(F, "gaussian_nll_loss", gaussian_nll_loss),
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


def _with_nan(operator: Any, name: str) -> Callable[..., torch.Tensor]:
    def function(input: torch.Tensor) -> torch.Tensor:
        """ONNX Runtime's error function of NaN is 1. (In GELU the input is a factor besides.)"""
        result: torch.Tensor = operator(input)
        return result + torch.where(input.isnan(), input, 0.0).detach()

    function.__name__ = function.__qualname__ = name
    return function


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
    shape = [1] * input.dim()
    if shape:
        shape[dim] = -1
    spread = index.reshape(shape).expand(source.shape)
    return _scatter_reduce(input, dim, spread, source, reduce, include_self=include_self)


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
    aten.erf.default: _with_nan(aten.erf.default, "_erf"),
    aten.erfc.default: _with_nan(aten.erfc.default, "_erfc"),
    aten.special_ndtr.default: _with_nan(aten.special_ndtr.default, "_ndtr"),
    aten.masked_scatter.default: _masked_scatter,
    aten.take.default: _take,
    aten.put.default: _put,
    aten.scatter_reduce.two: _scatter_reduce,
    aten.index_reduce.default: _index_reduce,
    **LOSS_COMPOSITES,
    **ORDER_COMPOSITES,
}
