"""Finds indices in a batch that are out of range for the model: class labels, rows of an embedding.

Trainer and training API share this file, so it does not use PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .dims import evaluate

Array = np.ndarray[Any, Any]
# Steps also come from untrusted files, so this limits how many elements they may derive from an input.
_MOST_ELEMENTS = 1 << 26
Steps = tuple[tuple[str, tuple[Any, ...]], ...]


class IndexRange(NamedTuple):
    """The values that an operator allows in an integer input that it indexes with.

    Attributes:
        input: Name of the input.
        size: Number of rows, classes or elements: an int, or an expression over symbolic dimensions.
        from_end: Whether negative values down to ``-size`` count from the end; otherwise the minimum is 0.
        ignored: A value out of range that the operator ignores; None for none.
        operator: Name of the operator.
        source: Its place in the user's code; empty if unknown.
        outputs: Names of the described outputs that depend on the operator; empty for all.
        steps: How to derive the part of the input that the operator uses: operators of :data:`STEPS`, each with its
            arguments after the tensor, in which sizes may be expressions. Empty if it uses all of the input.
    """

    input: str
    size: int | str
    from_end: bool = False
    ignored: int | None = None
    operator: str = ""
    source: str = ""
    outputs: tuple[str, ...] = ()
    steps: Steps = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> IndexRange:
        """Returns the range that was stored as JSON, with its lists turned back into tuples."""
        return cls(**{key: _frozen(value) for key, value in values.items()})


def _frozen(value: Any) -> Any:
    """Returns a JSON value with tuples in place of lists."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def check_indices(
    ranges: Iterable[tuple[IndexRange, int]],
    array: Callable[[str], Array],
    sizes: Mapping[str, int],
    find_extremes: Callable[[str, int | None], tuple[int, int]] | None = None,
) -> None:
    """Checks the inputs of a batch that operators index with, by the lowest and the highest value of each.

    Args:
        ranges: The ranges, each with its size for this batch.
        array: Returns the values of an input.
        sizes: The sizes of the symbolic dimensions.
        find_extremes: Returns the lowest and the highest value of an input, with 0 in place of the ignored value, its
            second argument; for inputs with a faster way than through an array.

    Raises:
        IndexError: If a value is out of range.
    """
    extremes: dict[tuple[str, int | None], tuple[int, int]] = {}
    for entry, size in ranges:
        key = (entry.input, entry.ignored)
        if key not in extremes:
            extremes[key] = find_extremes(*key) if find_extremes else _extremes(array(entry.input), entry.ignored)
        lowest, highest = extremes[key]
        if lowest < (-size if entry.from_end else 0) or highest >= size:
            _look_closer(entry, size, array(entry.input), sizes)


def _extremes(values: Array, ignored: int | None) -> tuple[int, int]:
    """Returns the lowest and the highest value, with 0 in place of ignored ones."""
    extremes = int(values.min()), int(values.max())
    if ignored is not None and ignored in extremes:
        values = np.where(values == ignored, 0, values)
        extremes = int(values.min()), int(values.max())
    return extremes


def _look_closer(entry: IndexRange, size: int, values: Array, sizes: Mapping[str, int]) -> None:
    """Raises an IndexError if a value is out of range, not ignored, and used by the operator."""
    wrong = (values < (-size if entry.from_end else 0)) | (values >= size)
    if entry.ignored is not None:
        wrong &= values != entry.ignored
    if not wrong.any():
        return
    # Applying the steps to the positions of the elements shows which of them the operator uses.
    places = np.arange(values.size).reshape(values.shape)
    for name, arguments in entry.steps:
        places = STEPS[name](places, *_evaluated(arguments, sizes))
        if places.size > _MOST_ELEMENTS:
            raise ValueError(_too_many(name, places.size))
    places = places[places >= 0].reshape(-1)
    invalid = places[wrong.reshape(-1)[places]]
    if not len(invalid):
        return
    place = [int(number) for number in np.unravel_index(invalid[0], values.shape)]
    others = f" (and {len(invalid) - 1} more out of range)" if len(invalid) > 1 else ""
    ignored = "" if entry.ignored is None else f", or {entry.ignored} (ignored)"
    raise IndexError(
        f"input {entry.input!r} has the value {int(values.flat[invalid[0]])} at {place}{others}, but {entry.operator} "
        f"uses it as an index, which must be from {-size if entry.from_end else 0} to {size - 1}{ignored}"
        f"{'; ' if entry.source else ''}{entry.source}"
    )


def _too_many(step: str, count: int) -> str:
    """Returns the message for a step that derives too many elements."""
    return (
        f"the step {step!r} of an index range makes {count} elements, and at most {_MOST_ELEMENTS} are looked at: the "
        "model is damaged, or debug.check_indices must be off for it"
    )


def _evaluated(arguments: Sequence[Any], sizes: Mapping[str, int]) -> list[Any]:
    """Returns arguments with expressions over symbolic sizes evaluated."""
    return [
        _evaluated(value, sizes)
        if isinstance(value, (list, tuple))
        else evaluate(value, sizes)
        if isinstance(value, str)
        else value
        for value in arguments
    ]


def _expand(values: Array, shape: Sequence[int], implicit: bool = False) -> Array:
    # ``implicit`` is PyTorch's mark of an expand() that the user did not write; it has no effect.
    old_shape = (1,) * (len(shape) - values.ndim) + values.shape
    return np.broadcast_to(values, [old if new == -1 else new for old, new in zip(old_shape, shape, strict=True)])


def _flatten(values: Array, start: int = 0, end: int = -1) -> Array:
    shape = values.shape or (1,)  # a scalar becomes a vector of one
    first, last = start % len(shape), end % len(shape)
    return values.reshape(*shape[:first], -1, *shape[last + 1 :])


def _pad(values: Array, pad: Sequence[int], value: int) -> Array:
    for number, amount in enumerate(pad):  # last dimension first, each with its start and its end
        axis, at_end = values.ndim - 1 - number // 2, number % 2
        if amount < 0:
            cut = slice(None, amount) if at_end else slice(-amount, None)
            values = values[(slice(None),) * axis + (cut,)]
        else:
            widths = [(0, 0)] * values.ndim
            widths[axis] = (0, amount) if at_end else (amount, 0)
            count = values.size // max(values.shape[axis], 1) * (values.shape[axis] + amount)
            if count > _MOST_ELEMENTS:
                raise ValueError(_too_many("constant_pad_nd", count))
            values = np.pad(values, widths, constant_values=value)
    return values


def _part(values: Array, axis: int, part: Any) -> Array:
    return values[(slice(None),) * (axis % values.ndim) + (part,)]


def _narrow(values: Array, axis: int, start: int, length: int) -> Array:
    first = start % values.shape[axis] if start < 0 else start
    return _part(values, axis, slice(first, first + length))


def _squeeze(values: Array, axes: int | Sequence[int] | None = None) -> Array:
    chosen = range(values.ndim) if axes is None else [axes] if isinstance(axes, int) else axes
    return values.squeeze(tuple({axis % values.ndim for axis in chosen if values.shape[axis] == 1}))


def _unflatten(values: Array, axis: int, shape: Sequence[int]) -> Array:
    axis %= values.ndim
    return values.reshape(*values.shape[:axis], *shape, *values.shape[axis + 1 :])


STEPS: dict[str, Callable[..., Array]] = {
    "constant_pad_nd": _pad,
    "expand": _expand,
    "flatten": _flatten,
    "flip": lambda values, axes: np.flip(values, tuple(axes)),
    "movedim": lambda values, old, new: np.moveaxis(values, old, new),
    "narrow": _narrow,
    "permute": lambda values, axes: values.transpose(axes),
    "reshape": lambda values, shape: values.reshape(shape),
    "roll": lambda values, shifts, axes=(): np.roll(values, shifts, axes or None),
    "select": lambda values, axis, index: _part(values, axis, index),
    "slice": lambda values, axis, start, end, step: _part(values, axis, slice(start, end, step)),
    "squeeze": _squeeze,
    "t": lambda values: values.T,
    "transpose": lambda values, first, second: values.swapaxes(first, second),
    "unflatten": _unflatten,
    "unsqueeze": lambda values, axis: np.expand_dims(values, axis),
    "view": lambda values, shape: values.reshape(shape),
}
"""NumPy versions of PyTorch's operators that only move, select or repeat values."""
