"""Reductions and what runs along a dimension: products and sums that torch.onnx lacks, and extrema.

In PyTorch NaN is both the maximum and the minimum; ONNX Runtime ignores it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..fx.operator_table import Value, composite, decomposition, ir, keep, op, translation
from .sorting import keys

aten = torch.ops.aten
prims = torch.ops.prims


# ONNX has these products, but not what PyTorch decomposes them into.
keep(aten.prod.default, aten.prod.dim_int)


@decomposition(aten.mean.default, aten.mean.dim)
def _mean(
    input: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """The mean of a number of elements that depends on values: of none, ONNX Runtime's is 0, and PyTorch's NaN."""
    if not any(free_unbacked_symbols(size) for size in input.shape if isinstance(size, torch.SymInt)):
        return NotImplemented
    axes = dim or range(input.dim())
    count = math.prod(input.shape[axis] for axis in axes)
    return input.sum(list(axes), keepdim, dtype=dtype) / count


@decomposition(aten._is_all_true.default)
def _is_all_true(input: torch.Tensor) -> torch.Tensor:
    return input.all()


@decomposition(aten._is_any_true.default)
def _is_any_true(input: torch.Tensor) -> torch.Tensor:
    return input.any()


@decomposition(aten.cumprod.default)
def _cumprod(input: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Computes running products as products over a lower triangle: ONNX has no cumulative product."""
    input = input if dtype is None else input.to(dtype)
    if input.dim() == 0:
        return input.clone()
    place = torch.arange(input.shape[dim], device=input.device)
    upto = torch.where(place <= place[:, None], input.movedim(dim, -1).unsqueeze(-2), 1)
    return upto.prod(-1).movedim(-1, dim)


@decomposition(aten.logcumsumexp.default)
def _logcumsumexp(input: torch.Tensor, dim: int) -> torch.Tensor:
    """Computes running sums in the same way; each subtracts its own maximum first, if that is finite."""
    if input.dim() == 0:
        return input.clone()
    place = torch.arange(input.shape[dim], device=input.device)
    upto = torch.where(place <= place[:, None], input.movedim(dim, -1).unsqueeze(-2), -math.inf)
    highest = upto.amax(-1, keepdim=True)
    highest = torch.where(highest.isinf(), 0.0, highest)
    total = (upto - highest).exp().sum(-1).log() + highest.squeeze(-1)
    return total.movedim(-1, dim)


def _in_fp32(operator: Any) -> Callable[..., torch.Tensor]:
    def extremum(input: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
        """Computes in fp32: the gradient compares elements with the extremum, and fp16 may round only one of them."""
        if input.dtype in (torch.float16, torch.bfloat16):
            return operator(input.float(), dim, keepdim).to(input.dtype)  # type: ignore[no-any-return]
        return operator(input, dim, keepdim)  # type: ignore[no-any-return]

    return extremum


_amax, _amin = _in_fp32(aten.amax.default), _in_fp32(aten.amin.default)
composite(aten.amax.default)(_amax)
composite(aten.amin.default)(_amin)


@composite(aten.aminmax.default)
def _aminmax(
    input: torch.Tensor, *, dim: int | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = [] if dim is None else [dim]
    return _amin(input, dims, keepdim), _amax(input, dims, keepdim)


def _cumulative(best: Callable[..., Any], sign: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def cumulative(input: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes running maxima (sign 1) or minima (-1) over a lower triangle, as ``_cumprod`` does products."""
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
        # Among equal elements the last one wins, so the search runs backwards; elements after the place are excluded.
        indices = torch.minimum(size - 1 - best(upto.flip(-1), dim=-1).indices, place).movedim(-1, dim)
        return input.gather(dim, indices), indices

    return cumulative


composite(aten.cummax.default)(_cumulative(torch.max, 1))
composite(aten.cummin.default)(_cumulative(torch.min, -1))


def _extremum(operator: Any) -> Callable[..., Any]:
    def extremum(input: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        """Reduces all dimensions if none are given, and propagates NaN, which ONNX Runtime ignores."""
        if input.dim() == 0:
            return input.clone()
        dims = sorted({axis % input.dim() for axis in dim}) or list(range(input.dim()))
        result = operator(input, dims)
        if input.is_floating_point():
            result = torch.where(input.isnan().any(dims), math.nan, result)
        for axis in dims if keepdim else []:
            result = result.unsqueeze(axis)
        return result

    return extremum


decomposition(aten.amax.default)(_extremum(prims.amax.default))
decomposition(aten.amin.default)(_extremum(prims.amin.default))


def _whole_extremum(operator: Any) -> Callable[..., torch.Tensor]:
    def extremum(input: torch.Tensor) -> torch.Tensor:
        if input.dtype == torch.bool:
            return operator(input.int(), []).bool()  # type: ignore[no-any-return]
        return operator(input, [])  # type: ignore[no-any-return]

    return extremum


decomposition(aten.max.default)(_whole_extremum(aten.amax.default))
decomposition(aten.min.default)(_whole_extremum(aten.amin.default))


def _pairwise(operator: Any) -> Callable[..., Any]:
    def extremum(input: torch.Tensor, other: torch.Tensor) -> Any:
        """Computes in fp32: in 16 bits ONNX Runtime may lose a NaN."""
        if input.dtype not in (torch.float16, torch.bfloat16) or other.dtype != input.dtype:
            return NotImplemented
        return operator(input.float(), other.float()).to(input.dtype)

    return extremum


decomposition(aten.maximum.default)(_pairwise(aten.maximum.default))
decomposition(aten.minimum.default)(_pairwise(aten.minimum.default))


def _index_of_extremum(largest: bool) -> Callable[..., Any]:
    def index(input: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        """Finds the index in int64 numbers with topk: ONNX Runtime's ArgMax and ArgMin take 32-bit numbers only."""
        if input.dtype != torch.int64 or input.dim() == 0:
            return NotImplemented
        if dim is None:
            indices = input.reshape(-1).topk(1, 0, largest).indices
            return indices.reshape([1] * input.dim()) if keepdim else indices.squeeze(0)
        indices = input.topk(1, dim, largest).indices
        return indices if keepdim else indices.squeeze(dim)

    return index


decomposition(aten.argmax.default)(_index_of_extremum(largest=True))
decomposition(aten.argmin.default)(_index_of_extremum(largest=False))


def _place_of_best(largest: bool) -> Callable[..., Any]:
    def place(value: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        """Returns the index of the first maximum or minimum; NaN is either."""
        best = op.ArgMax if largest else op.ArgMin
        rank = len(value.shape)
        if rank == 0:
            return op.Constant(value_int=0)
        ordered = keys(value, largest)
        if value.dtype == ir.DataType.INT64:  # ONNX Runtime has TopK for these, but no ArgMax
            row = ordered if dim is not None else op.Reshape(ordered, [-1])
            _, first = op.TopK(row, [1], axis=dim or 0, largest=largest)
            return _shaped(first, rank, dim, keepdim)
        if dim is not None:
            return best(ordered, axis=dim, keepdims=int(keepdim))
        first = best(op.Reshape(ordered, [-1]), axis=0, keepdims=0)
        return op.Reshape(first, [1] * rank) if keepdim else first

    return place


def _shaped(first: Value, rank: int, dim: int | None, keepdim: bool) -> Value:
    if dim is not None:
        return first if keepdim else op.Squeeze(first, [dim])
    return op.Reshape(first, [1] * rank if keepdim else op.Constant(value_ints=[]))


_argmax, _argmin = _place_of_best(True), _place_of_best(False)


translation(aten.argmax.default)(_argmax)
translation(aten.argmin.default)(_argmin)


def _best(largest: bool) -> Callable[..., Any]:
    place = _argmax if largest else _argmin

    def best(value: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
        """Returns the maximum or minimum along a dimension, and its index."""
        if len(value.shape) == 0:
            return op.Identity(value), op.Constant(value_int=0)
        indices = place(value, dim, True)
        values = op.GatherElements(value, indices, axis=dim)
        return (values, indices) if keepdim else (op.Squeeze(values, [dim]), op.Squeeze(indices, [dim]))

    return best


translation(aten.max.dim)(_best(True))
translation(aten.min.dim)(_best(False))


@translation(prims.amax.default)
def _largest(value: Value, dims: Sequence[int] | None = None, **options: Any) -> Value:
    """Returns the maximum, ignoring NaN."""
    return op.ReduceMax(value, keepdims=0) if dims is None else op.ReduceMax(value, list(dims), keepdims=0)


@translation(prims.amin.default)
def _smallest(value: Value, dims: Sequence[int] | None = None, **options: Any) -> Value:
    """Returns the minimum, ignoring NaN."""
    return op.ReduceMin(value, keepdims=0) if dims is None else op.ReduceMin(value, list(dims), keepdims=0)


@translation(prims.fmax.default)
def _fmax(first: Value, second: Value) -> Value:
    """Returns the larger operand; a number beats NaN."""
    return op.Where(op.IsNaN(first), second, op.Where(op.IsNaN(second), first, op.Max(first, second)))


@translation(prims.fmin.default)
def _fmin(first: Value, second: Value) -> Value:
    """Returns the smaller operand; a number beats NaN."""
    return op.Where(op.IsNaN(first), second, op.Where(op.IsNaN(second), first, op.Min(first, second)))
