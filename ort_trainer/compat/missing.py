"""Says what is missing where a script imports a part of ``onnxruntime.training`` that nobody provides."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from ..runtime.installed import can_call_pytorch

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
        if "ortmodule" in name.lower():
            reason = (
                "ort_trainer has no ORTModule, and that of onnxruntime-training 1.19.2, the last release, needs parts "
                "of torch that torch 2.13 no longer has: train the model with ORTTrainer"
            )
        elif can_call_pytorch():
            reason = "neither ort_trainer nor the installed onnxruntime-training has it"
        else:
            reason = (
                "the installed engine is a stock onnxruntime, in whose place ort_trainer.compat.install() provides "
                "ORTTrainer, the training API and what belongs to them, and nothing else. If onnxruntime-training has "
                "it, uninstall onnxruntime and install onnxruntime-training-cpu==1.19.2, for Python up to 3.12"
            )
        # With the name of the module, `from package import name` would take it for a name that may be missing.
        raise ModuleNotFoundError(f"{name} can't be imported: {reason}", name="onnxruntime.training")
