"""Sampling of images on grids and in regions of interest, and suppression of overlapping boxes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..node_table import Node, operator
from ..values import integers, is_traced, numbers
from .sampling import corners

_Tensor = torch.Tensor


@operator("GridSample", since=16)
def _grid_sample(x: _Tensor, grid: _Tensor, *, align_corners: int, mode: str, padding_mode: str, node: Node) -> _Tensor:
    # Before version 20, the modes had PyTorch's names.
    names = {
        "linear": "bilinear",
        "bilinear": "bilinear",
        "nearest": "nearest",
        "cubic": "bicubic",
        "bicubic": "bicubic",
    }
    if mode not in names:
        raise node.error(f"mode is {mode!r}, but must be 'linear', 'nearest' or 'cubic'")
    if x.dim() not in (4, 5) or (x.dim() == 5 and names[mode] == "bicubic"):
        raise node.error(f"with mode {mode!r}, PyTorch has no such operator for inputs of {x.dim()} dimensions")
    return F.grid_sample(x, grid, names[mode], padding_mode, bool(align_corners))


@operator("AffineGrid", since=20, known_inputs=(1,))
def _affine_grid(theta: _Tensor, size: Any, *, align_corners: int, node: Node) -> _Tensor:
    return F.affine_grid(theta, integers(size, "size", node), bool(align_corners))


@operator("RoiAlign", since=10)
def _align_regions(
    x: _Tensor,
    regions: _Tensor,
    images: _Tensor,
    *,
    coordinate_transformation_mode: str = "output_half_pixel",
    mode: str,
    output_height: int,
    output_width: int,
    sampling_ratio: int,
    spatial_scale: float,
    node: Node,
) -> _Tensor:
    """Pools regions of images to bins, from samples between pixels.

    Args:
        x: The images, (batch, channels, height, width).
        regions: The corners x1, y1, x2, y2 of each region, (regions, 4).
        images: The index of each region's image, (regions).
        coordinate_transformation_mode: ``half_pixel`` if pixel centers are at half coordinates; otherwise regions have
            at least one pixel.
        mode: avg or max.
        output_height: The number of bins down.
        output_width: The number of bins across.
        sampling_ratio: The number of samples of a bin in each direction; 0 for one per pixel.
        spatial_scale: The factor from the coordinates of regions to pixels.
        node: The node, for errors.
    """
    if coordinate_transformation_mode not in ("half_pixel", "output_half_pixel"):
        raise node.error(
            f"coordinate_transformation_mode is {coordinate_transformation_mode!r}, but must be 'half_pixel' or "
            "'output_half_pixel'"
        )
    half_pixel, bins, samples = (
        coordinate_transformation_mode == "half_pixel",
        (output_height, output_width),
        sampling_ratio,
    )
    if mode not in ("avg", "max"):
        raise node.error(f"mode is {mode!r}, but must be 'avg' or 'max'")
    count = regions.shape[0]
    edges = regions * spatial_scale - (0.5 if half_pixel else 0)
    begins = edges[:, 1], edges[:, 0]
    extents = [edges[:, 3] - edges[:, 1], edges[:, 2] - edges[:, 0]]
    if not half_pixel:
        extents = [extent.clamp(min=1) for extent in extents]
    places, sample_masks = [], []
    for begin, extent, number in zip(begins, extents, bins, strict=True):
        step = extent / number
        # Without a sampling ratio, each bin has one sample per pixel, so regions differ in their number of samples.
        each = step.new_full([count], samples) if samples > 0 else step.detach().ceil().clamp(min=1)
        most = samples if samples > 0 else max([1, *integers(each, "the number of samples in a region", node)])
        inner = (torch.arange(most) + 0.5) / each.unsqueeze(1)
        place = torch.arange(number).unsqueeze(1) + inner.unsqueeze(1)
        places.append(begin.reshape(-1, 1, 1) + place * step.reshape(-1, 1, 1))
        sample_masks.append((torch.arange(most) < each.unsqueeze(1)).reshape(count, 1, most))
    # (regions, bins down, samples down, bins across, samples across)
    shape = [count, bins[0], places[0].shape[2], bins[1], places[1].shape[2]]
    y = places[0].reshape(*shape[:3], 1, 1).expand(shape).flatten(1)
    across = places[1].reshape(count, 1, 1, *shape[3:]).expand(shape).flatten(1)
    height, width = x.shape[2:]
    outside = (y < -1) | (y > height) | (across < -1) | (across > width)
    parts = corners(x[images.long()], y.clamp(0, height - 1), across.clamp(0, width - 1))
    terms = torch.stack([values * factor.unsqueeze(1) for values, factor in parts])
    terms = terms.masked_fill(outside.unsqueeze(1), 0)
    valid = (sample_masks[0].reshape(count, 1, 1, -1, 1, 1) & sample_masks[1].reshape(count, 1, 1, 1, 1, -1)).expand(
        count, 1, *shape[1:]
    )
    split = [count, x.shape[1], *shape[1:]]
    if mode == "max":
        # ONNX defines the maximum over the four terms of each interpolation, not over their sums.
        greatest = terms.amax(0).reshape(split).masked_fill(~valid, float("-inf"))
        return greatest.amax((3, 5))
    sums = terms.sum(0).reshape(split).masked_fill(~valid, 0).sum((3, 5))
    return sums / valid.to(x.dtype).sum((3, 5))


@operator("NonMaxSuppression", since=10, known_inputs=(2, 3, 4))
def _suppress_boxes(
    boxes: _Tensor,
    scores: _Tensor,
    most: Any,
    overlap: Any,
    least: Any,
    *,
    center_point_box: int,
    node: Node,
) -> _Tensor:
    # The number of kept boxes depends on their values, so this runs outside of a trace only.
    limit = 0 if most is None else integers(most, "max_output_boxes_per_class", node)[0]
    most_overlap = 0.0 if overlap is None else numbers(overlap, "iou_threshold", node)[0]
    least_score = None if least is None else numbers(least, "score_threshold", node)[0]
    if is_traced(boxes):
        raise node.error(
            "how many boxes it keeps depends on the values of a batch, so it can't be a part of a graph for training: "
            "cut the model before it, and select boxes outside"
        )
    kept: list[list[int]] = []
    for image in range(boxes.shape[0]):
        places = _edges(boxes[image].detach().double(), bool(center_point_box))
        for label in range(scores.shape[1]):
            of_label = scores[image, label].detach()
            chosen: list[int] = []
            for box in torch.argsort(of_label, descending=True, stable=True).tolist():
                if len(chosen) == limit or (least_score is not None and not of_label[box] > least_score):
                    break
                if not chosen or bool((_overlaps(places[box], places[chosen]) <= most_overlap).all()):
                    chosen.append(box)
            kept += [[image, label, box] for box in chosen]
    return torch.tensor(kept, dtype=torch.int64).reshape(-1, 3)


def _edges(boxes: _Tensor, by_center: bool) -> _Tensor:
    """Returns boxes by their least and greatest coordinates."""
    if by_center:
        middle, half = boxes[:, :2], boxes[:, 2:] / 2
        return torch.cat([middle - half, middle + half], 1)
    return torch.cat([torch.minimum(boxes[:, :2], boxes[:, 2:]), torch.maximum(boxes[:, :2], boxes[:, 2:])], 1)


def _overlaps(box: _Tensor, others: _Tensor) -> _Tensor:
    """Returns the intersection over union of a box and each of the others."""
    common = (torch.minimum(box[2:], others[:, 2:]) - torch.maximum(box[:2], others[:, :2])).clamp(min=0).prod(1)
    union = (box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(1) - common
    return torch.where(union > 0, common / union, torch.zeros_like(common))
