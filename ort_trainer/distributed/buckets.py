"""Flat buckets: tensors one behind the other in a few large ones, each of which takes one call to send."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ..optim.parts import Named

__all__ = ["Bucket", "Buckets", "grouped"]

# Where gradients begin, in bytes: kernels that read several numbers at once want addresses of that kind.
_ALIGNMENT = 64


@dataclass
class Bucket:
    """A flat tensor.

    Attributes:
        flat: The tensor; its size can be divided by the number of processes. What no gradient covers is zero.
        offsets: Parameter name -> where its gradient begins.
        views: Parameter name -> its gradient, a view.
    """

    flat: torch.Tensor
    offsets: dict[str, int] = field(default_factory=dict)
    views: dict[str, torch.Tensor] = field(default_factory=dict)

    def view_in(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """Returns where the gradient of a parameter would lie in another tensor of this size."""
        view = self.views[name]
        return flat[self.offsets[name] : self.offsets[name] + view.numel()].view(view.shape)

    def slice_of(self, name: str, begin: int, end: int) -> tuple[int, int]:
        """Returns which elements of a gradient lie in a range of the bucket; maybe none: then both are equal."""
        offset, size = self.offsets[name], self.views[name].numel()
        first = min(max(begin - offset, 0), size)
        return first, max(first, min(end - offset, size))


class Buckets:
    """Buckets for the gradients of parameters, one dtype each, in the order of the parameters.

    Args:
        parameters: The trained parameters by name.
        processes: What the size of each bucket is divided by.
        limit: Bytes of a bucket; a larger gradient has a bucket of its own.

    Attributes:
        views: Parameter name -> where its gradient lies.
    """

    def __init__(self, parameters: Named, processes: int, limit: int) -> None:
        self._buckets = [
            _bucket({name: parameters[name] for name in names}, processes) for names in grouped(parameters, limit)
        ]
        self.views = {name: view for bucket in self for name, view in bucket.views.items()}

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)


def grouped(tensors: Named, limit: int) -> Iterator[list[str]]:
    """Yields the names of tensors of one dtype and device, in their order, as many as have a number of bytes."""
    kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((tensor.dtype, tensor.device), []).append(name)
    for names in kinds.values():
        found: list[str] = []
        filled = 0
        for name in names:
            if found and filled + tensors[name].nbytes > limit:
                yield found
                found, filled = [], 0
            found.append(name)
            filled += tensors[name].nbytes
        yield found


def _bucket(parameters: Named, processes: int) -> Bucket:
    """Returns a bucket of zeros for parameters of one dtype and device."""
    offsets: dict[str, int] = {}
    size = 0
    for name, parameter in parameters.items():
        step = max(1, _ALIGNMENT // parameter.element_size())
        offsets[name] = -(-size // step) * step
        size = offsets[name] + parameter.numel()
    like = next(iter(parameters.values()))
    flat = torch.zeros(-(-size // processes) * processes, dtype=like.dtype, device=like.device)
    views = {
        name: flat[offset : offset + parameters[name].numel()].view(parameters[name].shape)
        for name, offset in offsets.items()
    }
    return Bucket(flat, offsets, views)
