"""Flat buckets: a few large tensors that hold many small ones, so that each bucket is sent with one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..optim.parts import Named

# The alignment of gradients in bytes, for vectorized kernels.
_ALIGNMENT = 64


@dataclass
class Bucket:
    """A flat tensor.

    Attributes:
        flat: The tensor; its size is divisible by the number of processes. Elements outside all gradients are zero.
        offsets: Parameter name -> offset of its gradient, in elements.
        views: Parameter name -> its gradient, a view.
    """

    flat: torch.Tensor
    offsets: dict[str, int]
    views: dict[str, torch.Tensor]

    def view_in(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """Returns the view of a parameter's gradient in another tensor of this size."""
        view = self.views[name]
        return flat[self.offsets[name] : self.offsets[name] + view.numel()].view(view.shape)

    def slice_of(self, name: str, begin: int, end: int) -> tuple[int, int]:
        """Returns the range of a gradient's elements in a range of the bucket; start and end are equal if empty."""
        offset, size = self.offsets[name], self.views[name].numel()
        first = min(max(begin - offset, 0), size)
        return first, max(first, min(end - offset, size))


class Buckets:
    """Buckets for the gradients of parameters, one dtype each, in the order of the parameters.

    Args:
        parameters: The trained parameters by name.
        processes: The number of processes, by which the size of each bucket must be divisible.
        limit: The maximum bytes of a bucket; a larger gradient gets its own bucket.

    Attributes:
        views: Parameter name -> its gradient, a view.
    """

    def __init__(self, parameters: Named, processes: int, limit: int) -> None:
        self._buckets = [
            self._bucket({name: parameters[name] for name in names}, processes) for names in grouped(parameters, limit)
        ]
        self.views = {name: view for bucket in self for name, view in bucket.views.items()}

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def _bucket(self, parameters: Named, processes: int) -> Bucket:
        """Returns a bucket of zeros for parameters of one dtype and device."""
        offsets: dict[str, int] = {}
        size = 0
        for name, parameter in parameters.items():
            offsets[name] = _aligned(size, parameter.element_size())
            size = offsets[name] + parameter.numel()
        like = next(iter(parameters.values()))
        flat = torch.zeros(-(-size // processes) * processes, dtype=like.dtype, device=like.device)
        views = {
            name: flat[offset : offset + parameters[name].numel()].view(parameters[name].shape)
            for name, offset in offsets.items()
        }
        return Bucket(flat, offsets, views)


def _aligned(size: int, itemsize: int) -> int:
    """Rounds up a number of elements."""
    step = max(1, _ALIGNMENT // itemsize)
    return -(-size // step) * step


def grouped(tensors: Named, limit: int) -> Iterator[list[str]]:
    """Yields groups of names, in order: tensors of one dtype and device, up to a limit in bytes."""
    kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((tensor.dtype, tensor.device), []).append(name)
    for names in kinds.values():
        group: list[str] = []
        filled = 0
        for name in names:
            if group and filled + tensors[name].nbytes > limit:
                yield group
                group, filled = [], 0
            group.append(name)
            filled += tensors[name].nbytes
        yield group
