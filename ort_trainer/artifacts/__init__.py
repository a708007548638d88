"""Writes what ``ort_trainer.api`` trains from: models of step, evaluation and update, and a checkpoint."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .convert import convert_checkpoint, trainer_state_dict
    from .generate import generate_artifacts
    from .kinds import LossType, OptimType

__all__ = ["LossType", "OptimType", "convert_checkpoint", "generate_artifacts", "trainer_state_dict"]

# Public name -> the module that has it. Checkpoints are converted where there is no torch, too, and
# ``python -m ort_trainer.artifacts.convert`` must find its module not imported yet.
_PLACES = {
    "LossType": "kinds",
    "OptimType": "kinds",
    "convert_checkpoint": "convert",
    "generate_artifacts": "generate",
    "trainer_state_dict": "convert",
}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is asked for first."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
