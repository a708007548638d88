"""An exported graph as bytes, with what is said about it. Light: the process that waits for an export reads it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping

from ...dims import holds, symbols_of

__all__ = ["Export", "violated"]


@dataclasses.dataclass(frozen=True)
class Export:
    """An exported graph, and what is said about it.

    Attributes:
        graph: The bytes of a :class:`~ort_trainer.graph.TrainingGraph`.
        guards: Conditions on the symbolic sizes under which it is the right one.
        fixed: Symbol -> the only size that it has for it.
        reasons: The same symbols with the places where the model fixes them.
        kept: Where the graph was found, or is kept from now on; empty if nowhere.
        found: Whether it was found rather than made.
        remarks: What there is to say about the cache.
    """

    graph: bytes
    guards: tuple[str, ...]
    fixed: Mapping[str, int]
    reasons: Mapping[str, str]
    kept: str = ""
    found: bool = False
    remarks: tuple[str, ...] = ()

    def accepts(self, sizes: Mapping[str, int]) -> bool:
        """Returns whether the graph is right for these sizes of all symbolic dimensions."""
        return all(sizes.get(symbol) == size for symbol, size in self.fixed.items()) and not violated(
            self.guards, sizes
        )

    def to_bytes(self) -> bytes:
        """Returns all of it as bytes."""
        head = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "graph"}
        text = json.dumps(head).encode()
        return len(text).to_bytes(8, "little") + text + self.graph

    @classmethod
    def from_bytes(cls, data: bytes) -> Export:
        """Returns what :meth:`to_bytes` wrote.

        Raises:
            ValueError: If it is something else.
        """
        end = 8 + int.from_bytes(data[:8], "little")
        try:
            head = json.loads(data[8:end])
            lists = {name: tuple(value) for name, value in head.items() if isinstance(value, list)}
            found = cls(graph=data[end:], **{**head, **lists})
            for guard in found.guards:
                symbols_of(guard)
            dict(found.fixed), dict(found.reasons)
        except (TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"this is no export: {error!r}") from error
        return found


def violated(guards: Iterable[str], sizes: Mapping[str, int]) -> set[str]:
    """Returns the symbols of all conditions that do not hold for these sizes."""
    return {symbol for guard in guards if not holds(guard, sizes) for symbol in symbols_of(guard)}
