"""``IndexRange``: which values an input of a training graph may have, where an operator takes them for indices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["IndexRange"]

Steps = tuple[tuple[str, tuple[Any, ...]], ...]


@dataclass(frozen=True)
class IndexRange:
    """What an operator allows in an integer input that it indexes with: class labels, rows of an embedding.

    Attributes:
        input: Name of the input.
        size: How many rows, classes or elements there are: a number, or an expression over symbolic dimensions.
        from_end: Whether negative values count from the end, so that ``-size`` is allowed; otherwise 0 is the least.
        ignored: A value that is allowed all the same, as one that does not count; None for none.
        operator: Name of the operator.
        source: Where it is in the user's code; empty where that is not known.
        outputs: Names of the described outputs that depend on the operator.
        steps: How the operator sees a part of the input only: operators with their arguments behind the tensor, in
            which sizes may be expressions. Empty if it sees all of it.
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
        """Returns what JSON has made of one, with lists where there were tuples."""
        return cls(**{key: _frozen(value) for key, value in values.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
