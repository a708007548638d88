"""``CheckpointState`` for old scripts: its mappings yield pairs of name and value."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any

from .. import api
from ..api.state import State

__all__ = ["CheckpointState", "Parameters", "Properties"]


class _Pairs:
    """Iterates over pairs; for both mappings."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items())

    def items(self) -> ItemsView[str, Any]:
        names: Iterator[str] = super().__iter__()  # type: ignore[misc]
        return {name: self[name] for name in names}.items()  # type: ignore[index]

    def keys(self) -> KeysView[str]:
        return dict(self.items()).keys()

    def values(self) -> ValuesView[Any]:
        return dict(self.items()).values()


class Parameters(_Pairs, api.Parameters):  # type: ignore[misc]
    """The parameters by name."""


class Properties(_Pairs, api.Properties):  # type: ignore[misc]
    """The user's own values by name."""


class CheckpointState(api.CheckpointState):
    """The state of training; see ``ort_trainer.api.CheckpointState``."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._parameters, self._properties = Parameters(state), Properties(state)
