"""``Origins``: the module of the user's model and the pass that each node of a training graph belongs to.

Only profiles use it, so graphs store it as text, which is parsed on demand.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

LOSS = "(loss)"
"""Stands for the path of the loss function, and of code outside the model's modules."""

FUSED = "(fused)"
"""Stands for the path of the module of operators that ONNX Runtime has fused, so that it is unknown."""

_UNKNOWN = -1


@dataclass(frozen=True)
class Origin:
    """The place in the model where something is computed.

    Attributes:
        module: Path of a module, as in ``model.named_modules()``; empty for the model itself.
        backward: Whether it belongs to the backward pass.
    """

    module: str
    backward: bool


class Origins:
    """The places of the nodes of one graph.

    Args:
        modules: Path and class name of every module that occurs and of its parents, in the model's order.
        nodes: Name of a node -> twice the index of its module, plus 1 in the backward pass; -1 if unknown. A node that
            calls a program has one number for each step of the program, any other node has one.
    """

    def __init__(self, modules: Sequence[tuple[str, str]], nodes: Mapping[str, Sequence[int]]) -> None:
        self.modules = tuple((path, kind) for path, kind in modules)
        self._nodes = nodes
        self._renamed: dict[str, str | None] = {}

    @classmethod
    def of(cls, places: Mapping[str, Sequence[Origin | None]], modules: Sequence[tuple[str, str]]) -> Origins:
        """Returns the origins of nodes.

        Args:
            places: Name of a node -> the places of its steps.
            modules: Path and class name of all modules that may occur, in the model's order.
        """
        inner = {place.module for several in places.values() for place in several if place is not None}
        paths = {path for module in inner for path in with_parents(module)}
        kept = [(path, kind) for path, kind in modules if path in paths]
        numbers = {path: 2 * index for index, (path, _) in enumerate(kept)}

        @functools.cache  # a graph has far more nodes than places
        def number(place: Origin | None) -> int:
            return _UNKNOWN if place is None else numbers[place.module] + place.backward

        return cls(kept, {name: [number(place) for place in several] for name, several in places.items()})

    @classmethod
    def from_text(cls, text: str) -> Origins:
        """Returns the origins from :meth:`to_text`; for empty text, all are unknown."""
        return cls(**json.loads(text)) if text else cls((), {})

    def to_text(self) -> str:
        """Returns the origins as text."""
        return json.dumps({"modules": self.modules, "nodes": self._nodes}, separators=(",", ":"))

    def place(self, node: str, step: int = 0) -> Origin | None:
        """Returns the place of a node, or of one of its steps; None if unknown.

        Args:
            node: Name of the node. ONNX Runtime renames nodes that it fuses; if the new name contains the name of one
                of them, the result is that node's place.
            step: Number of the step in a program.
        """
        name = node if node in self._nodes else self._known_within(node)
        number = _UNKNOWN if name is None else self._nodes[name][step]
        return None if number == _UNKNOWN else Origin(self.modules[number // 2][0], bool(number % 2))

    def _known_within(self, node: str) -> str | None:
        """Returns the longest name of a node that another name contains; None if there is none."""
        if node not in self._renamed:
            self._renamed[node] = max((name for name in self._nodes if name in node), key=len, default=None)
        return self._renamed[node]


def with_parents(path: str) -> Iterator[str]:
    """Yields the path of a module and of the modules around it, innermost first; the model's own is empty."""
    yield path
    while path not in ("", LOSS, FUSED):
        path = path.rpartition(".")[0]
        yield path
