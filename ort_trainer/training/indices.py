"""Looks for indices in a batch that its model does not have: classes, rows of an embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..dims import evaluate
from ..graph import IndexRange
from ..runtime import Plan
from ..runtime.aten.program import find_operator

__all__ = ["check_indices"]


def check_indices(plan: Plan, batch: Mapping[str, torch.Tensor]) -> None:
    """Checks the inputs of a batch that operators index with; it takes one pass over each of them.

    Args:
        plan: For the shapes of the batch.
        batch: The inputs by name.

    Raises:
        IndexError: If one has a value that is out of range.
    """
    extremes: dict[tuple[str, int | None], tuple[int, int]] = {}
    for entry, size in plan.indices:
        key = (entry.input, entry.ignored)
        if key not in extremes:
            extremes[key] = _extremes(batch[entry.input], entry.ignored)
        lowest, highest = extremes[key]
        if lowest < (-size if entry.from_end else 0) or highest >= size:
            sizes = plan.runner.graph.sizes({name: tuple(value.shape) for name, value in batch.items()})
            _look_closer(entry, size, batch[entry.input], sizes)


def _extremes(values: torch.Tensor, ignored: int | None) -> tuple[int, int]:
    """Returns the lowest and the highest value that count; 0 stands for those that do not."""
    lowest, highest = torch.aminmax(values)
    found = int(lowest.item()), int(highest.item())
    if ignored is not None and ignored in found:
        lowest, highest = torch.aminmax(values.masked_fill(values == ignored, 0))
        found = int(lowest.item()), int(highest.item())
    return found


def _look_closer(entry: IndexRange, size: int, values: torch.Tensor, sizes: Mapping[str, int]) -> None:
    """Raises if a value is out of range that counts, and that the operator sees."""
    wrong = (values < (-size if entry.from_end else 0)) | (values >= size)
    if entry.ignored is not None:
        wrong &= values != entry.ignored
    if not wrong.any():
        return
    # What the operator sees of the input is found by doing the same to the numbers of its places.
    places = torch.arange(values.numel(), device=values.device).reshape(values.shape)
    for target, arguments in entry.steps:
        places = find_operator(target)(places, *_evaluated(arguments, sizes))
    places = places[places >= 0].flatten()
    found = places[wrong.flatten()[places]]
    if not len(found):
        return
    first = int(found[0])
    place = [int(number) for number in torch.unravel_index(torch.tensor(first), values.shape)]
    others = f", and {len(found) - 1} more of the kind" if len(found) > 1 else ""
    ignored = "" if entry.ignored is None else f", or {entry.ignored}, which is ignored"
    raise IndexError(
        f"input {entry.input!r} has the value {int(values.flatten()[first])} at {place}{others}, but {entry.operator} "
        f"takes it for an index, which must be from {-size if entry.from_end else 0} to {size - 1}{ignored}"
        f"{'; ' if entry.source else ''}{entry.source}"
    )


def _evaluated(arguments: Sequence[Any], sizes: Mapping[str, int]) -> list[Any]:
    """Returns arguments with numbers for expressions over symbolic sizes."""
    return [
        _evaluated(value, sizes)
        if isinstance(value, (list, tuple))
        else evaluate(value, sizes)
        if isinstance(value, str)
        else value
        for value in arguments
    ]
