"""An exported graph as bytes, with remarks about it. Imports little: the process that waits for an export uses it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping

from ...core.dims import holds, symbols_of

__all__ = ["Export", "violated"]


@dataclasses.dataclass(frozen=True)
class Export:
    """An exported graph, and remarks about it.

    Attributes:
        graph: The bytes of a :class:`~ort_trainer.step.Step`.
        guards: Conditions on the symbolic sizes under which the graph is valid.
        fixed: Symbol -> the only size for which the graph is valid.
        reasons: The same symbols with the places where the model fixes them.
        modes_read: Names of the step's modules whose mode the graph depends on. A cached graph may come from a model
            with other names; these are the names in the captured model.
        kept: The path of the graph in the cache; empty if it is not cached.
        found: Whether the graph was in the cache already.
        remarks: Messages about the cache.
    """

    graph: bytes
    guards: tuple[str, ...]
    fixed: Mapping[str, int]
    reasons: Mapping[str, str]
    modes_read: tuple[str, ...] = ()
    kept: str = ""
    found: bool = False
    remarks: tuple[str, ...] = ()

    def accepts(self, sizes: Mapping[str, int]) -> bool:
        """Returns whether the graph is valid for these sizes of all symbolic dimensions."""
        return all(sizes.get(symbol) == size for symbol, size in self.fixed.items()) and not violated(
            self.guards, sizes
        )

    def to_bytes(self) -> bytes:
        """Serializes the export."""
        head = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "graph"}
        text = json.dumps(head).encode()
        return len(text).to_bytes(8, "little") + text + self.graph

    @classmethod
    def from_bytes(cls, data: bytes) -> Export:
        """Reads what :meth:`to_bytes` wrote.

        Raises:
            ValueError: If ``data`` is not an export.
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
            raise ValueError(f"this is not an export: {error!r}") from error
        return found


def violated(guards: Iterable[str], sizes: Mapping[str, int]) -> set[str]:
    """Returns the symbols in all conditions that these sizes violate."""
    return {symbol for guard in guards if not holds(guard, sizes) for symbol in symbols_of(guard)}
