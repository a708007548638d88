"""Extrema, medians and running extrema, made of simple operators before differentiation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["ORDER_COMPOSITES"]

aten = torch.ops.aten
Size = Any
"""An int, or a symbolic one."""


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


ORDER_COMPOSITES: dict[Any, Callable[..., Any]] = {
    aten.amax.default: _amax,
    aten.amin.default: _amin,
    aten.aminmax.default: _aminmax,
    aten.kthvalue.default: _kthvalue,
    aten.median.default: _median,
    aten.nanmedian.default: _nanmedian,
    aten.nanmedian.dim: _nanmedian_dim,
    aten.median.dim: _median_dim,
    aten.cummax.default: _cummax,
    aten.cummin.default: _cummin,
}
