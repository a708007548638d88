"""Reductions over axes, positions of extremes, running sums, and normalizations that are made of reductions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..node_table import Node, known_operator, operator
from ..values import Known, integers

_Tensor = torch.Tensor
_Axes = tuple[int, ...]


def _sum(x: _Tensor, axes: _Axes, keepdim: bool) -> _Tensor:
    return x.sum(axes, keepdim=keepdim, dtype=x.dtype)


def _mean(x: _Tensor, axes: _Axes, keepdim: bool) -> _Tensor:
    if x.is_floating_point():
        return x.mean(axes, keepdim=keepdim)
    return (x.double().mean(axes, keepdim=keepdim)).to(x.dtype)


def _extreme(x: _Tensor, axes: _Axes, keepdim: bool, largest: bool) -> _Tensor:
    """Returns the maximum or minimum over axes, also of empty ones, booleans and unsigned numbers."""
    if any(isinstance(x.shape[axis], int) and x.shape[axis] == 0 for axis in axes):
        shape = [1 if axis in axes else size for axis, size in enumerate(x.shape) if keepdim or axis not in axes]
        return torch.full(shape, _limit(x.dtype, lowest=largest), dtype=x.dtype, device=x.device)
    if x.dtype == torch.bool:
        return torch.any(x, axes, keepdim) if largest else torch.all(x, axes, keepdim)
    if x.dtype in (torch.uint32, torch.uint64):
        return _extreme(x.long(), axes, keepdim, largest).to(x.dtype)
    return x.amax(axes, keepdim) if largest else x.amin(axes, keepdim)


def _limit(dtype: torch.dtype, lowest: bool) -> Any:
    """Returns the maximum or minimum over no elements: the least or greatest number of the dtype."""
    if dtype.is_floating_point:
        return -math.inf if lowest else math.inf
    if dtype == torch.bool:
        return not lowest
    return torch.iinfo(dtype).min if lowest else torch.iinfo(dtype).max


def _product(x: _Tensor, axes: _Axes, keepdim: bool) -> _Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keepdim=keepdim, dtype=x.dtype)
    return x


def _of_floats(function: Callable[[_Tensor, _Axes, bool], _Tensor]) -> Callable[[_Tensor, _Axes, bool], _Tensor]:
    """Returns a reduction that computes integers in double precision."""

    def reduce(x: _Tensor, axes: _Axes, keepdim: bool) -> _Tensor:
        return function(x if x.is_floating_point() else x.double(), axes, keepdim).to(x.dtype)

    return reduce


_REDUCTIONS: dict[str, Callable[[_Tensor, _Axes, bool], _Tensor]] = {
    "ReduceL1": lambda x, axes, keepdim: _sum(x.abs(), axes, keepdim),
    "ReduceL2": _of_floats(lambda x, axes, keepdim: torch.linalg.vector_norm(x, 2, axes, keepdim)),
    "ReduceLogSum": _of_floats(lambda x, axes, keepdim: x.sum(axes, keepdim=keepdim).log()),
    "ReduceLogSumExp": _of_floats(lambda x, axes, keepdim: torch.logsumexp(x, axes, keepdim)),
    "ReduceMax": lambda x, axes, keepdim: _extreme(x, axes, keepdim, True),
    "ReduceMean": _mean,
    "ReduceMin": lambda x, axes, keepdim: _extreme(x, axes, keepdim, False),
    "ReduceProd": _product,
    "ReduceSum": _sum,
    "ReduceSumSquare": lambda x, axes, keepdim: _sum(x * x, axes, keepdim),
}


def _register_reduction(name: str, reduce: Callable[[_Tensor, _Axes, bool], _Tensor]) -> None:
    @operator(name, known_inputs=(1,))
    def run(x: _Tensor, axes: Any, *, keepdims: int, noop_with_empty_axes: int = 0, node: Node) -> _Tensor:
        chosen = [] if axes is None else integers(axes, "axes", node)
        if noop_with_empty_axes and not chosen:
            return reduce(x.unsqueeze(0), (0,), False)
        if not x.dim():  # a single number
            return reduce(x.reshape(1), (0,), False)
        return reduce(x, tuple(axis % x.dim() for axis in chosen or range(x.dim())), bool(keepdims))


for _name, _reduce in _REDUCTIONS.items():
    _register_reduction(_name, _reduce)


@known_operator("ReduceProd")
def _product_known(x: Known, axes: Known | None, *, keepdims: int, noop_with_empty_axes: int = 0) -> Any:
    if noop_with_empty_axes and (axes is None or not axes.size):
        return x
    chosen = None if axes is None or not axes.size else tuple(axes.tolist())
    return np.prod(x, chosen, keepdims=bool(keepdims), dtype=x.dtype)


def _position(
    find: Callable[..., _Tensor], x: _Tensor, *, axis: int, keepdims: int, select_last_index: int = 0
) -> _Tensor:
    if select_last_index:
        return x.shape[axis] - 1 - find(x.flip(axis), axis, bool(keepdims))
    return find(x, axis, bool(keepdims))


operator("ArgMax")(functools.partial(_position, torch.argmax))
operator("ArgMin")(functools.partial(_position, torch.argmin))


def _cumulative(
    function: Callable[..., _Tensor], neutral: int, x: _Tensor, axis: Any, *, exclusive: int, reverse: int, node: Node
) -> _Tensor:
    """Returns running sums or products; if exclusive, without the current element: the first is the neutral one."""
    axis = integers(axis, "axis", node)[0]
    x = x.flip(axis) if reverse else x
    if exclusive:
        first = torch.full_like(x.narrow(axis, 0, 1), neutral)
        x = torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
    result = function(x, axis, dtype=x.dtype)
    return result.flip(axis) if reverse else result


operator("CumSum", since=11, known_inputs=(1,))(functools.partial(_cumulative, torch.cumsum, 0))
operator("CumProd", since=26, known_inputs=(1,))(functools.partial(_cumulative, torch.cumprod, 1))


def _softmax(x: _Tensor, axis: int, node: Node) -> _Tensor:
    if not node.consumers & {"IsNaN", "Where"}:
        return torch.softmax(x, axis)
    # Attention may replace the NaN of fully masked rows by zeros, but their gradient would stay NaN: torch.softmax must
    # not see these rows.
    masked = (x == -math.inf).all(axis, keepdim=True)
    return torch.where(masked, math.nan, torch.softmax(torch.where(masked, 0, x), axis))


def _log_softmax(x: _Tensor, axis: int, node: Node) -> _Tensor:
    return torch.log_softmax(x, axis)


def _hardmax(x: _Tensor, axis: int, node: Node) -> _Tensor:
    return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1)


def _register_softmax(name: str, function: Callable[[_Tensor, int, Node], _Tensor]) -> None:
    @operator(name, until=12)
    def over_rest(x: _Tensor, *, axis: int, node: Node) -> _Tensor:
        # Before opset 13, it normalizes over the axis and all after it together.
        axis = axis % x.dim()
        return function(x.flatten(axis), axis, node).reshape(x.shape)

    @operator(name, since=13)
    def over_axis(x: _Tensor, *, axis: int, node: Node) -> _Tensor:
        return function(x, axis, node)


for _name, _function in {"Softmax": _softmax, "LogSoftmax": _log_softmax, "Hardmax": _hardmax}.items():
    _register_softmax(_name, _function)


@operator("LpNormalization")
def _lp_normalization(x: _Tensor, *, axis: int, p: int, node: Node) -> _Tensor:
    if p not in (1, 2):
        raise node.error(f"p is {p}, but must be 1 or 2")
    norm = torch.linalg.vector_norm(x, p, axis, keepdim=True)
    # Zeros stay zeros; the divisor 1 keeps their gradient finite.
    return torch.where(norm == 0, torch.zeros_like(x), x / torch.where(norm == 0, 1, norm))


@operator("MeanVarianceNormalization", since=9)
def _mean_variance_normalization(x: _Tensor, *, axes: list[int]) -> _Tensor:
    centered = x - x.mean(axes, keepdim=True)
    variance = (centered * centered).mean(axes, keepdim=True)
    return centered / (variance.sqrt() + 1e-9)
