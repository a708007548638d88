"""Reading and writing by index, where torch.onnx or ONNX Runtime differs; also of positions in images, and padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decompositions

from ..fx.autocast import as_operator
from ..fx.operator_table import Size, composite, decomposition, replacement, whole
from .elementwise import with_zero_gradient

aten = torch.ops.aten


_embedding, _bag = torch.embedding, torch.embedding_bag


@replacement(torch, "embedding")
def dense_embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Looks up rows; the gradient is dense also with ``sparse``: graphs have no sparse tensors."""
    return _embedding(weight, indices, padding_idx, scale_grad_by_freq, False)


@replacement(torch, "embedding_bag")
def dense_embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    """Reduces bags of rows; the gradient is dense as above."""
    result: tuple[torch.Tensor, ...] = _bag(weight, indices, offsets, scale_grad_by_freq, mode, False, *rest)
    return result


@composite(aten.embedding_bag.default, aten.embedding_bag.padding_idx)
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
    """Computes sums (mode 0), means (1) or maxima (2) of bags of rows; the bags are runs of ``indices``."""
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
        # Among equal rows, the first gets the gradient.
        last = torch.full_like(best, rows.shape[0] - 1)
        candidates = torch.where(kept[:, None] & (considered == best[bag]), place[:, None].to(rows.dtype), last[0])
        first = last.scatter_reduce(0, into, candidates, "amin").long()
        result = torch.where(count[:, None] > 0, rows.gather(0, first), 0.0)
    else:
        result = rows.new_zeros(shape).index_add(0, bag, torch.where(kept[:, None], rows, 0.0))
        result = result / count.clamp(min=1)[:, None] if mode == 1 else result
    return result, bag, count, count


@composite(aten.masked_scatter.default)
def _masked_scatter(input: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(input.shape, mask.shape)  # type: ignore[no-untyped-call]
    input, mask = input.expand(shape), mask.expand(shape)
    # The n-th true element of the mask takes the n-th element of the source.
    place = (mask.flatten().long().cumsum(0) - 1).clamp(0, source.numel() - 1)
    return torch.where(mask, source.flatten()[place].reshape(input.shape), input)


@composite(aten.take.default)
def _take(input: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return input.flatten()[index]


@composite(aten.put.default)
def _put(input: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    flat = input.flatten().index_put((index.flatten(),), source.flatten(), accumulate)
    return flat.reshape(input.shape)


@composite(aten.index_reduce.default)
def _index_reduce(
    input: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    shape = [1] * input.dim()
    if shape:
        shape[dim] = -1
    spread = index.reshape(shape).expand(source.shape)
    return _reduce_by_index(input, dim, spread, source, reduce, include_self=include_self)


@composite(aten.scatter_reduce.two)
def _reduce_by_index(
    input: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    """Computes the mean, which ONNX lacks and torch.onnx mistakes for an assignment, and reduces halves in fp32."""
    if input.dtype in (torch.float16, torch.bfloat16):
        wide = _reduce_by_index(input.float(), dim, index, src.float(), reduce, include_self=include_self)
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
    """Propagates NaN, which ONNX Runtime ignores in a maximum or minimum."""
    best: torch.Tensor = aten.scatter_reduce.two(input, dim, index, src, reduce, include_self=include_self)
    unknown = input.isnan().to(input.dtype)
    unknown = unknown.scatter_reduce(dim, index, src.isnan().to(input.dtype), "sum", include_self=include_self)
    return best * torch.where(unknown > 0, math.nan, 1.0)


@decomposition(aten.scatter_reduce.two)
def _scatter_reduce(
    input: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """Computes the mean, which torch.onnx mistakes for an assignment, and maxima, which it starts at a finite number.

    (Before differentiation, a composite computes the mean; this is for models that are differentiated as they are.)
    """
    if reduce in ("amax", "amin") and not include_self and input.is_floating_point():
        start = aten.scatter.value(input, dim, index, float("-inf" if reduce == "amax" else "inf"))
        return aten.scatter_reduce.two(start, dim, index, src, reduce)
    if reduce != "mean":
        return NotImplemented
    total = aten.scatter_reduce.two(input, dim, index, src, "sum", include_self=include_self)
    ones, each = torch.ones_like(input), torch.ones_like(src)
    return total / aten.scatter_reduce.two(ones, dim, index, each, "sum", include_self=include_self)


@decomposition(aten.scatter_add.default)
def _scatter_add(input: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor) -> Any:
    """Adds fp16 values in fp32: ONNX Runtime's CPU provider has no kernel for them, and fp32 is more accurate."""
    if input.dtype != torch.float16:
        return NotImplemented
    return aten.scatter_add.default(input.float(), dim, index, src.float()).to(input.dtype)


@decomposition(aten.index.Tensor)
def _index(input: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    """Casts indices to 64 bits, which ONNX requires."""
    return aten.index.Tensor(input, _lengthened(indices)) if _has_short(indices) else NotImplemented


@decomposition(aten.index_put.default)
def _index_put(
    input: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> Any:
    """Casts indices to 64 bits, which ONNX requires, and accumulates fp16 values in fp32."""
    if _has_short(indices):
        return aten.index_put.default(input, _lengthened(indices), values, accumulate)
    if input.dtype != torch.float16 or not accumulate:
        return NotImplemented
    return aten.index_put.default(input.float(), indices, values.float(), True).to(input.dtype)


def _has_short(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype == torch.int32 for index in indices)


def _lengthened(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [index if index is None or index.dtype != torch.int32 else index.long() for index in indices]


@decomposition(aten.select_backward.default)
def _select_backward(grad: torch.Tensor, input_sizes: Sequence[Any], dim: int, index: int) -> torch.Tensor:
    """Pads a slice with zeros: PyTorch's own way compares every index and then selects, which is slow."""
    dim = dim % len(input_sizes)
    index = index + input_sizes[dim] if index < 0 else index
    pads = [0, 0] * (len(input_sizes) - 1 - dim) + [index, input_sizes[dim] - 1 - index]
    padded: torch.Tensor = aten.constant_pad_nd.default(grad.unsqueeze(dim), pads, 0.0)
    return padded


@composite(aten.masked_select.default, for_pytorch=True)
def _masked_select(input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Indexes with the mask: PyTorch's own backward pass takes the sizes of its arguments as numbers."""
    input, mask = torch.broadcast_tensors(input, mask)  # type: ignore[no-untyped-call]
    return input[mask]


@composite(aten.grid_sampler.default)
def _grid_sampler(input: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, align_corners: bool) -> Any:
    if input.dim() != 4:
        return aten.grid_sampler.default(input, grid, mode, padding, align_corners)
    sampled = _sampled(decompositions._grid_sampler_2d, input, grid, mode, padding, align_corners)
    return with_zero_gradient(sampled, grid) if mode == 1 else sampled


@whole(aten.grid_sampler.default)
def _sampled_by_kernel(input: torch.Tensor, grid: torch.Tensor, *settings: Any) -> Any:
    return _sampled(aten.grid_sampler.default, input, grid, *settings)


def _sampled(sample: Callable[..., Any], input: torch.Tensor, grid: torch.Tensor, *settings: Any) -> Any:
    """Samples NaN at positions that are not finite, each of which would become an arbitrary index into memory."""
    finite = grid.isfinite()
    sampled = sample(input, torch.where(finite, grid, 0.0), *settings)
    return torch.where(finite.all(-1).unsqueeze(1), sampled, math.nan)


@composite(aten.affine_grid_generator.default, for_pytorch=True)
def _affine_grid(theta: torch.Tensor, size: Sequence[Size], align_corners: bool) -> Any:
    return decompositions.affine_grid_generator(theta, list(size), align_corners)


@replacement(decompositions, "_linspace_from_neg_one")
def _pixels(count: Size, align_corners: bool, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Places the pixels of an affine grid without ``linspace``, which takes known sizes only."""
    places = torch.arange(count, dtype=dtype, device=device)
    if align_corners:
        return places * 2 / (count - 1) - 1 if count > 1 else places
    return (places * 2 + 1) / count - 1  # type: ignore[no-any-return]


@composite(aten.pad.default)
def _pad(input: torch.Tensor, pad: Sequence[Size], mode: str = "constant", value: float | None = None) -> torch.Tensor:
    if mode != "replicate":
        return aten.pad.default(input, pad, mode, value)  # type: ignore[no-any-return]
    return as_operator(aten.replication_pad1d.default, _replicated, input, pad)  # type: ignore[no-any-return]


@whole(aten.pad.default)
def _pad_by_kernel(input: torch.Tensor, pad: Sequence[Size], mode: str = "constant", *value: Any) -> torch.Tensor:
    """Copies channels-last images: PyTorch describes their gradient in another order than its kernel's."""
    return aten.pad.default(input.contiguous() if mode == "replicate" else input, pad, mode, *value)  # type: ignore[no-any-return]


def _replicated(input: torch.Tensor, pad: Sequence[Size]) -> torch.Tensor:
    # Indices beyond an edge are clamped to it, axis by axis from the last; pad holds (near, far) in this order.
    for number in range(len(pad) // 2):
        axis, size = -1 - number, input.shape[-1 - number]
        place = torch.arange(-pad[2 * number], size + pad[2 * number + 1], device=input.device)
        input = input.index_select(axis, place.clamp(0, size - 1))
    return input
