"""``onnxruntime.training.api``: the classes that train from artifacts. Nothing here needs PyTorch.

The mappings of a ``CheckpointState`` yield pairs of name and value, as upstream's do.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any

from .. import api
from ..api.live_state import LiveState

_PACKAGE = "onnxruntime.training.api"
_PUBLIC = ("CheckpointState", "LinearLRScheduler", "Module", "Optimizer")
_SUBMODULES = {
    "checkpoint_state": ("CheckpointState", "Parameter", "Parameters", "Properties"),
    "lr_scheduler": ("LinearLRScheduler",),
    "module": ("Module",),
    "optimizer": ("Optimizer",),
}


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

    def __init__(self, state: LiveState) -> None:
        super().__init__(state)
        self._parameters, self._properties = Parameters(state), Properties(state)


_WITH_PAIRS = {"CheckpointState": CheckpointState, "Parameters": Parameters, "Properties": Properties}


def training_api_names() -> dict[str, dict[str, Any]]:
    """Returns modules of ``onnxruntime.training``, with the names to set in them."""
    modules = {_PACKAGE: _PUBLIC, **{f"{_PACKAGE}.{name}": names for name, names in _SUBMODULES.items()}}
    return {
        module: {name: _WITH_PAIRS.get(name) or getattr(api, name) for name in names}
        for module, names in modules.items()
    }
