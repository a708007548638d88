"""Sets names on modules, creates missing modules, undoes both, and explains imports that fail."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from ..engine.ort import has_training, process_undisturbed

_ABSENT = object()
# For undoing: (module or class, name, previous value), and the names of modules that were created.
_changed: list[tuple[Any, str, Any]] = []
_created: list[str] = []
_PACKAGE = "onnxruntime.training"
# The installed ones need parts of torch that are gone.
_REPLACED = (f"{_PACKAGE}.ortmodule", f"{_PACKAGE}.experimental")
_PREFIX = f"{_PACKAGE}."


def is_changed() -> bool:
    """Returns whether any name was set."""
    return bool(_changed)


def module_named(name: str) -> ModuleType:
    """Returns the installed module, or a new one, which becomes an attribute of its parent."""
    if name in sys.modules:
        return sys.modules[name]
    parent, _, child = name.rpartition(".")
    if parent:
        module_named(parent)  # find_spec needs it
    if not name.startswith(_REPLACED):
        with process_undisturbed():
            if importlib.util.find_spec(name) is not None:
                return importlib.import_module(name)
    module = ModuleType(name, f"Made by ort_trainer.compat.install() in place of the legacy module {name}.")
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    sys.modules[name] = module
    _created.append(name)
    set_name(module_named(parent), child, module)
    return module


def set_name(module: Any, name: str, value: Any) -> None:
    """Sets a name of a module or class, also in ``__all__``, and records the previous value."""
    _changed.append((module, name, vars(module).get(name, _ABSENT)))
    setattr(module, name, value)
    exported = vars(module).get("__all__")
    if exported is not None and name not in exported:
        _changed.append((module, "__all__", exported))
        module.__all__ = [*exported, name]


def put_in_place(
    names: Mapping[str, Mapping[str, Any]], if_missing: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Sets names on modules, and adds finders that explain failed imports.

    Args:
        names: Module -> its names.
        if_missing: Module -> names that are set only if the module does not have them.
    """
    if_missing = if_missing or {}
    for module_name in {**names, **if_missing}:
        module = module_named(module_name)
        lacking = {n: v for n, v in if_missing.get(module_name, {}).items() if not hasattr(module, n)}
        for name, value in {**names.get(module_name, {}), **lacking}.items():
            set_name(module, name, value)
    sys.meta_path.insert(0, FailingParts)
    sys.meta_path.append(MissingParts)


def restore() -> None:
    """Undoes everything: removes the modules that were created, and restores the names that were set."""
    for finder in (FailingParts, MissingParts):
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
    while _changed:
        module, name, before = _changed.pop()
        if before is _ABSENT:
            delattr(module, name)
        else:
            setattr(module, name, before)
    while _created:
        sys.modules.pop(_created.pop(), None)


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
    """Loads a module, and explains why it fails if it does."""

    def exec_module(self, module: ModuleType) -> None:
        try:
            super().exec_module(module)
        except Exception as error:
            if getattr(error, "name", None) == _PACKAGE:
                raise  # the error is explained already
            reason = f"the module of the installed onnxruntime-training fails: {error}"
            raise _missing(self.name, reason) from error


def _missing(name: str, reason: str) -> ModuleNotFoundError:
    """Returns the error for a module that can't be imported."""
    # With the module's own name in the error, `from package import name` would treat it as a name that may be missing.
    return ModuleNotFoundError(f"{name} can't be imported: {reason}", name=_PACKAGE)


_OF_REPLACED = (
    "ort_trainer has ORTModule, DebugOptions, LogLevel and export_gradient_graph of these packages, which need no "
    "extensions to be built, but nothing else that was experimental or internal: leave it out"
)


def _reason(name: str) -> str:
    """Returns why a part of ``onnxruntime.training`` is missing, and what to do."""
    if importlib.util.find_spec("torch") is None:
        return (
            "torch is not installed, and without torch ort_trainer.compat.install() provides only "
            "onnxruntime.training.api, which trains from artifacts. To make artifacts or to train a model, "
            "pip install 'ort_trainer[onnx]', which keeps the ONNX Runtime that is there"
        )
    if name.startswith(_REPLACED):
        return _OF_REPLACED
    if has_training():
        return "neither ort_trainer nor the installed onnxruntime-training has it"
    return (
        "the installed engine is a stock onnxruntime, which has no training package; ort_trainer.compat.install() "
        "provides only ORTTrainer, the training API and their parts. If onnxruntime-training has it, uninstall "
        "onnxruntime and install onnxruntime-training-cpu==1.19.2, for Python up to 3.12"
    )
