"""Explains why a part of ``onnxruntime.training`` can't be imported: it is missing or broken."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

__all__ = ["FailingParts", "MissingParts"]

_PACKAGE = "onnxruntime.training"
_PREFIX = f"{_PACKAGE}."


class MissingParts:
    """The last finder of an import: it gets only names that no other finder knows.

    ``from package import name`` also looks for a module of that name before it fails.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns None for names outside ``onnxruntime.training``, and for private ones.

        Raises:
            ModuleNotFoundError: For any part of ``onnxruntime.training``.
        """
        # The package itself looks for some private names, and works without them.
        if not name.startswith(_PREFIX) or name.rpartition(".")[2].startswith("_"):
            return None
        raise _missing(name, _reason(name))


class FailingParts:
    """The first finder of an import: it explains failures of parts of the installed onnxruntime-training."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns None for other modules, and for submodules of a part, which fails with them."""
        spec = PathFinder.find_spec(name, path, target) if name.rpartition(".")[0] == _PACKAGE else None
        if spec is None or not isinstance(spec.loader, SourceFileLoader) or name.startswith(f"{_PREFIX}_"):
            return None
        spec.loader = _Explaining(name, spec.loader.path)
        return spec


class _Explaining(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        try:
            super().exec_module(module)
        except Exception as error:
            if getattr(error, "name", None) == _PACKAGE:
                raise  # the error is explained already
            reason = f"the module of the installed onnxruntime-training fails: {error}"
            raise _missing(self.name, _ORTMODULE if _is_ortmodule(self.name) else reason) from error


def _missing(name: str, reason: str) -> ModuleNotFoundError:
    # With the module's own name in the error, `from package import name` would treat it as a name that may be missing.
    return ModuleNotFoundError(f"{name} can't be imported: {reason}", name=_PACKAGE)


def _is_ortmodule(name: str) -> bool:
    return "ortmodule" in name.lower()


_ORTMODULE = (
    "ort_trainer has no ORTModule, and the ORTModule of onnxruntime-training 1.19.2, the last release, needs parts of "
    "torch that torch 2.13 no longer has: train the model with ORTTrainer"
)


def _reason(name: str) -> str:
    if importlib.util.find_spec("torch") is None:
        return (
            "torch is not installed, and without torch ort_trainer.compat.install() provides only "
            "onnxruntime.training.api, which trains from artifacts. To make artifacts or to train a model, install "
            "ort_trainer with the extra [cpu], [cuda] or [stock] instead of [api]"
        )
    if _is_ortmodule(name):
        return _ORTMODULE
    from ..engine.ort import can_call_pytorch  # with torch

    if can_call_pytorch():
        return "neither ort_trainer nor the installed onnxruntime-training has it"
    return (
        "the installed engine is a stock onnxruntime, which has no training package; ort_trainer.compat.install() "
        "provides only ORTTrainer, the training API and their parts. If onnxruntime-training has it, uninstall "
        "onnxruntime and install onnxruntime-training-cpu==1.19.2, for Python up to 3.12"
    )
