"""What an export depends on and leaves outside tensors: JSON values, which a child process can send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .leftovers import Code, Leftovers
from .numbers import Expression
from .places import Access, Place


@dataclass(frozen=True)
class Notes:
    """Notes of an export.

    Attributes:
        reads: Places on whose values the graph depends.
        conditions: Comparisons of numbers that may change, their types, and whether two places hold one object, with
            the results on which the graph depends.
        tensors: Name of an input of the graph that counts as a buffer -> the place of the tensor.
        scalars: Name of such an input -> the expression that is its value, and its dtype.
        leftovers: What each run leaves. Its tensors are the last results of the graph.
        tables: Places where a run leaves a tensor that depends on sizes alone, such as a mask that is made when it is
            first needed: what a run has left there counts as what was there before.
        settled: A place in ``reads`` -> what a run leaves there, for which the graph is the same.
        outline: The captured operators, where several processes compare them.
        result: The module's return value, encoded; None if it can't be encoded.
    """

    reads: tuple[Place, ...] = ()
    conditions: tuple[tuple[Expression, Any], ...] = ()
    tensors: Mapping[str, Place] = field(default_factory=dict)
    scalars: Mapping[str, tuple[Expression, str]] = field(default_factory=dict)
    leftovers: Leftovers = field(default_factory=Leftovers)
    result: Code | None = None
    tables: tuple[Place, ...] = ()
    settled: tuple[tuple[Place, Any], ...] = ()
    outline: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> Any:
        """Returns the notes as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Any) -> Notes:
        """Returns the notes from :meth:`to_json`, perhaps after a way through JSON text."""
        left = fields["leftovers"]
        return cls(
            tuple(map(_place, fields["reads"])),
            tuple((expression, result) for expression, result in fields["conditions"]),
            {name: _place(place) for name, place in fields["tensors"].items()},
            {name: (expression, dtype) for name, (expression, dtype) in fields["scalars"].items()},
            Leftovers(tuple((_place(place), code) for place, code in left["writes"]), left["tensors"]),
            fields["result"],
            tuple(map(_place, fields["tables"])),
            tuple((_place(place), value) for place, value in fields["settled"]),
            fields["outline"],
        )


def _place(steps: Any) -> Place:
    return tuple(Access(kind, key) for kind, key in steps)
