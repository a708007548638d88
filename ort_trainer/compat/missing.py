"""Says what is missing where a script imports a part of ``onnxruntime.training`` that nobody provides."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MissingParts"]

_PREFIX = "onnxruntime.training."


class MissingParts:
    """The last finder that an import asks, so that only names get here which no other one knows.

    ``from package import name`` asks for a module of that name, too, before it gives up.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns None for what is of no concern here.

        Raises:
            ModuleNotFoundError: For any part of ``onnxruntime.training``.
        """
        # Of what the package itself looks for and does without, such as a private name, nothing is said.
        if not name.startswith(_PREFIX) or name.rpartition(".")[2].startswith("_"):
            return None
        # With the name of the module, `from package import name` would take it for a name that may be missing.
        raise ModuleNotFoundError(f"{name} can't be imported: {_reason(name)}", name="onnxruntime.training")


def _reason(name: str) -> str:
    if importlib.util.find_spec("torch") is None:
        return (
            "torch is not installed, and without it ort_trainer.compat.install() provides onnxruntime.training.api "
            "alone, which trains from artifacts. To make artifacts or to train a model, install ort_trainer with the "
            "extra [cpu], [cuda] or [stock] instead of [api]"
        )
    if "ortmodule" in name.lower():
        return (
            "ort_trainer has no ORTModule, and that of onnxruntime-training 1.19.2, the last release, needs parts of "
            "torch that torch 2.13 no longer has: train the model with ORTTrainer"
        )
    from ..runtime.installed import can_call_pytorch  # with torch

    if can_call_pytorch():
        return "neither ort_trainer nor the installed onnxruntime-training has it"
    return (
        "the installed engine is a stock onnxruntime, in whose place ort_trainer.compat.install() provides ORTTrainer, "
        "the training API and what belongs to them, and nothing else. If onnxruntime-training has it, uninstall "
        "onnxruntime and install onnxruntime-training-cpu==1.19.2, for Python up to 3.12"
    )
