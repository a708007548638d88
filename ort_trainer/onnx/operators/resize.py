"""Resizes images: Resize and Upsample.

Along each axis, an element of the output is a weighted sum of neighbours in the input; the weights depend on its
position. PyTorch's interpolation is used where it means the same as ONNX's; otherwise the sums are written out, axis by
axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..node_table import Node, operator
from ..values import Number, integers, numbers

_Tensor = torch.Tensor
_NATIVE = {1: "linear", 2: "bilinear", 3: "trilinear"}


@dataclass(frozen=True)
class _Axis:
    """How one axis is resized.

    Attributes:
        axis: The axis.
        size: The size of the input.
        output_size: The size of the output.
        scale: The scale; its product with the input's size may differ from the output's.
        begin: Where the region to be resized begins, as a part of the input.
        end: Where it ends.
    """

    axis: int
    size: Number
    output_size: Number
    scale: Number
    begin: float = 0.0
    end: float = 1.0

    @property
    def is_same(self) -> bool:
        """Whether nothing changes."""
        return isinstance(self.scale, float) and self.scale == 1 and (self.begin, self.end) == (0, 1)


@dataclass(frozen=True)
class _Kind:
    """The attributes of Resize."""

    mode: str
    coordinates: str
    nearest: str
    cubic: float
    exclude_outside: bool
    antialias: bool
    extrapolation: float


@operator("Upsample", since=7, known_inputs=(1,))
@operator("Resize", since=10, until=10, known_inputs=(1,))
def _resize_by_scales(x: _Tensor, scales: Any, *, mode: str, node: Node) -> _Tensor:
    axes = [_scaled(axis, x.shape[axis], scale) for axis, scale in enumerate(numbers(scales, "scales", node))]
    mode = {"bilinear": "linear", "trilinear": "linear"}.get(mode, mode)
    return _resized(x, axes, _Kind(mode, "asymmetric", "floor", -0.75, False, False, 0.0), node)


@operator("Resize", since=11, known_inputs=(1, 2, 3))
def _resize(
    x: _Tensor,
    region: Any,
    scales: Any,
    sizes: Any,
    *,
    antialias: int = 0,
    axes: list[int] | None = None,
    coordinate_transformation_mode: str,
    cubic_coeff_a: float,
    exclude_outside: int,
    extrapolation_value: float,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str,
    nearest_mode: str,
    node: Node,
) -> _Tensor:
    chosen = list(range(x.dim())) if axes is None else [axis % x.dim() for axis in axes]
    crops = coordinate_transformation_mode == "tf_crop_and_resize"
    begin_end = numbers(region, "roi", node) if crops else [0.0] * len(chosen) + [1.0] * len(chosen)
    factors = [] if scales is None else [float(scale) for scale in numbers(scales, "scales", node)]
    if factors and crops:
        parts = zip(chosen, factors, begin_end, begin_end[len(chosen) :], strict=False)
        resized = [_Axis(a, x.shape[a], _floor(x.shape[a] * (end - begin) * s), s) for a, s, begin, end in parts]
    elif factors:
        resized = [_scaled(axis, x.shape[axis], scale) for axis, scale in zip(chosen, factors, strict=True)]
    else:
        resized = _sized(x, chosen, integers(sizes, "sizes", node), keep_aspect_ratio_policy, node)
    regions = zip(resized, begin_end[: len(chosen)], begin_end[len(chosen) :], strict=True)
    resized = [_Axis(a.axis, a.size, a.output_size, a.scale, begin, end) for a, begin, end in regions]
    if antialias and mode == "nearest":
        raise node.error("antialias is for the modes linear and cubic, but the mode is 'nearest'")
    kind = _Kind(
        mode,
        coordinate_transformation_mode,
        nearest_mode,
        cubic_coeff_a,
        bool(exclude_outside),
        bool(antialias),
        extrapolation_value,
    )
    return _resized(x, resized, kind, node)


def _scaled(axis: int, size: Number, scale: float) -> _Axis:
    """Describes an axis resized by a scale; a whole scale keeps a symbolic size free of rounding."""
    if float(scale).is_integer():
        return _Axis(axis, size, size * int(scale), float(scale))
    return _Axis(axis, size, _floor(size * float(scale)), float(scale))


def _floor(size: Number) -> Any:
    """Returns the floor of a size; truncation is the floor, because sizes are positive."""
    return torch.sym_int(size)  # type: ignore[no-untyped-call]


def _sized(x: _Tensor, axes: Sequence[int], sizes: Sequence[Number], policy: str, node: Node) -> list[_Axis]:
    """Describes axes resized to these sizes, or by one common scale to at most or at least these sizes."""
    pairs = list(zip(axes, sizes, strict=True))
    if policy == "stretch":
        return [_Axis(a, x.shape[a], new, 1.0 if new is x.shape[a] else _ratio(new, x.shape[a])) for a, new in pairs]
    if policy not in ("not_larger", "not_smaller"):
        raise node.error(
            f"keep_aspect_ratio_policy is {policy!r}, but must be 'stretch', 'not_larger' or 'not_smaller'"
        )
    scale: Any = (min if policy == "not_larger" else max)(_ratio(new, x.shape[a]) for a, new in pairs)
    rounded = [(a, _floor(scale * x.shape[a] + 0.5)) for a, _ in pairs]
    return [_Axis(a, x.shape[a], new, scale) for a, new in rounded]


def _ratio(output_size: Number, size: Number) -> Number:
    return output_size / size


def _resized(x: _Tensor, axes: Sequence[_Axis], kind: _Kind, node: Node) -> _Tensor:
    changed = [axis for axis in axes if not axis.is_same]
    if not changed:
        return x
    native = _by_pytorch(x, changed, kind)
    if native is not None:
        return native
    dtype = x.dtype
    values = x.to(torch.promote_types(dtype, torch.float32)) if dtype.is_floating_point else x.double()
    for axis in changed:
        values = _along(values, axis, kind, node)
    if dtype.is_floating_point:
        return values.to(dtype)
    limits = torch.iinfo(dtype)
    return values.round().clamp(limits.min, limits.max).to(dtype)


def _by_pytorch(x: _Tensor, axes: Sequence[_Axis], kind: _Kind) -> _Tensor | None:
    """Interpolates all dimensions after the second; None if PyTorch's interpolation differs from ONNX's."""
    rank = x.dim() - 2
    spatial = {axis.axis: axis for axis in axes}
    if not 1 <= rank <= 3 or min(spatial) < 2 or kind.antialias or not x.dtype.is_floating_point:
        return None
    by_size = all(axis.output_size is not None and not _is_fractional(axis) for axis in axes)
    align = kind.coordinates == "align_corners"
    half = kind.coordinates in ("half_pixel", "half_pixel_symmetric") or (
        kind.coordinates == "pytorch_half_pixel"
        and all(isinstance(axis.output_size, int) and axis.output_size > 1 for axis in axes)
    )
    if not by_size or not all(isinstance(axis.output_size, int) or not align for axis in axes):
        return None
    if align and any(axis.output_size == 1 for axis in axes):
        return None
    size = [spatial[i].output_size if i in spatial else x.shape[i] for i in range(2, x.dim())]
    if kind.mode == "nearest" and kind.coordinates == "asymmetric" and kind.nearest == "floor":
        return F.interpolate(x, size)
    if kind.mode == "linear" and (half or align) and not kind.exclude_outside:
        return F.interpolate(x, size, mode=_NATIVE[rank], align_corners=align)
    if kind.mode == "cubic" and rank == 2 and (half or align) and kind.cubic == -0.75 and not kind.exclude_outside:
        return F.interpolate(x, size, mode="bicubic", align_corners=align)
    return None


def _is_fractional(axis: _Axis) -> bool:
    """Returns whether the scale differs from the ratio of the sizes, or may differ because they are symbolic.

    PyTorch computes positions from the ratio of the sizes, ONNX from the scale.
    """
    if isinstance(axis.size, int) and isinstance(axis.output_size, int):
        return not math.isclose(axis.output_size, axis.size * float(axis.scale), rel_tol=1e-6)
    return isinstance(axis.scale, float) and not axis.scale.is_integer()


def _along(x: _Tensor, axis: _Axis, kind: _Kind, node: Node) -> _Tensor:
    """Resizes along one axis."""
    place = _places(axis, kind, node)
    first, coefficients = _coefficients(place, axis, kind, node)
    index = first.unsqueeze(1) + torch.arange(coefficients.shape[1])
    if kind.exclude_outside:
        inside = (index >= 0) & (index < axis.size)
        coefficients = torch.where(inside, coefficients, torch.zeros_like(coefficients))
        coefficients = coefficients / coefficients.sum(1, keepdim=True)
    shape = [-1] + [1] * (x.dim() - 1 - axis.axis)
    total: Any = 0
    for i in range(coefficients.shape[1]):
        neighbours = x.index_select(axis.axis, index[:, i].clamp(0, axis.size - 1))
        total = total + neighbours * coefficients[:, i].to(x.dtype).reshape(shape)
    if kind.coordinates == "tf_crop_and_resize":
        outside = ((place < 0) | (place > axis.size - 1)).reshape(shape)
        total = torch.where(outside, torch.full_like(total, kind.extrapolation), total)
    result: _Tensor = total
    return result


def _places(axis: _Axis, kind: _Kind, node: Node) -> Any:
    """Returns the position of each element of the output in the input, by ONNX's formula of each coordinate mode."""
    y = torch.arange(axis.output_size, dtype=torch.float64)
    # The output's size before it was rounded.
    exact = axis.size * axis.scale
    last = axis.size - 1
    if kind.coordinates == "align_corners":
        return y * 0 if exact == 1 else y * (last / (exact - 1))
    if kind.coordinates == "asymmetric":
        return y / axis.scale
    if kind.coordinates == "tf_crop_and_resize":
        if axis.output_size == 1:
            return y * 0 + 0.5 * (axis.begin + axis.end) * last
        return y * ((axis.end - axis.begin) * last / (axis.output_size - 1)) + axis.begin * last
    if kind.coordinates == "pytorch_half_pixel" and exact == 1:
        return y * 0 - 0.5
    if kind.coordinates in ("half_pixel", "pytorch_half_pixel"):
        return (y + 0.5) / axis.scale - 0.5
    if kind.coordinates == "half_pixel_symmetric":
        return axis.size / 2 * (1 - axis.output_size / exact) + (y + 0.5) / axis.scale - 0.5
    raise node.error(f"coordinate_transformation_mode is {kind.coordinates!r}, which ONNX does not define")


def _coefficients(place: _Tensor, axis: _Axis, kind: _Kind, node: Node) -> tuple[_Tensor, _Tensor]:
    """Returns the index of each element's first neighbour, and the coefficients of all neighbours.

    For cubic, Keys' convolution kernel with ``a`` = cubic_coeff_a (R. Keys, 1981), at a distance d from the element:
    (a + 2) d^3 - (a + 3) d^2 + 1 for d <= 1, and a d^3 - 5a d^2 + 8a d - 4a for 1 < d < 2.
    """
    left = place.floor()
    if kind.mode == "nearest":
        rounding = {
            "floor": left,
            "ceil": place.ceil(),
            "round_prefer_floor": (place - 0.5).ceil(),
            "round_prefer_ceil": (place + 0.5).floor(),
        }.get(kind.nearest)
        if rounding is None:
            raise node.error(f"nearest_mode is {kind.nearest!r}, which ONNX does not define")
        return rounding.long(), torch.ones_like(place).unsqueeze(1)
    if kind.mode not in ("linear", "cubic"):
        raise node.error(f"mode is {kind.mode!r}, but must be 'nearest', 'linear' or 'cubic'")
    reach = 1 if kind.mode == "linear" else 2
    scale: Any = 1.0
    if kind.antialias:
        if not isinstance(axis.scale, (int, float)):
            raise node.error("with antialias it needs to know its scale: give it as a constant, or fix the sizes")
        scale = min(float(axis.scale), 1.0)
    # With antialias, a downscaled element averages over more neighbours: the kernel is stretched by 1 / scale.
    begin = math.floor(-reach / scale) + 1
    distance = (torch.arange(begin, 2 - begin, dtype=place.dtype) - (place - left).unsqueeze(1)) * scale
    size = distance.abs()
    if kind.mode == "linear":
        coefficients = (1 - size).clamp(min=0)
    else:
        a = kind.cubic
        near = ((a + 2) * size - (a + 3)) * size.square() + 1
        far = ((a * size - 5 * a) * size + 8 * a) * size - 4 * a
        coefficients = torch.where(size <= 1, near, torch.where(size < 2, far, torch.zeros_like(size)))
    if kind.antialias:
        coefficients = coefficients / coefficients.sum(1, keepdim=True)
    return left.long() + begin, coefficients
