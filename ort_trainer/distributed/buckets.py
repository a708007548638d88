"""Flat buckets: gradients one behind the other in a few tensors, each of which takes one call to reduce."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ..optim.parts import Named

__all__ = ["Bucket", "Buckets"]


@dataclass
class Bucket:
    """A flat tensor.

    Attributes:
        flat: The tensor; its size can be divided by the number of processes, zeros fill it up.
        offsets: Parameter name -> where its gradient begins.
        views: Parameter name -> its gradient, a view.
    """

    flat: torch.Tensor
    offsets: dict[str, int] = field(default_factory=dict)
    views: dict[str, torch.Tensor] = field(default_factory=dict)

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
    """

    def __init__(self, parameters: Named, processes: int, limit: int) -> None:
        self._buckets: list[Bucket] = []
        groups: dict[tuple[torch.dtype, torch.device], list[list[str]]] = {}
        for name, parameter in parameters.items():
            found = groups.setdefault((parameter.dtype, parameter.device), [[]])
            filled = sum(parameters[other].nbytes for other in found[-1])
            if found[-1] and filled + parameter.nbytes > limit:
                found.append([])
            found[-1].append(name)
        for (dtype, device), lists in groups.items():
            for names in lists:
                size = sum(parameters[name].numel() for name in names)
                bucket = Bucket(torch.zeros(-(-size // processes) * processes, dtype=dtype, device=device))
                offset = 0
                for name in names:
                    like = parameters[name]
                    bucket.offsets[name] = offset
                    bucket.views[name] = bucket.flat[offset : offset + like.numel()].view(like.shape)
                    offset += like.numel()
                self._buckets.append(bucket)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    @property
    def views(self) -> dict[str, torch.Tensor]:
        """Parameter name -> where its gradient lies."""
        return {name: view for bucket in self for name, view in bucket.views.items()}
