"""Sets names on modules, makes modules that are missing, and undoes both."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ..undisturbed import process_undisturbed
from .missing import MissingParts

__all__ = ["is_changed", "module_named", "put_in_place", "restore", "set_name"]

_ABSENT = object()
# What to do backwards: (module, name, what it was), and the modules that were made.
_changed: list[tuple[ModuleType, str, Any]] = []
_made: list[str] = []


def is_changed() -> bool:
    """Returns whether there is anything to undo."""
    return bool(_changed)


def module_named(name: str) -> ModuleType:
    """Returns a module: the one that is installed, or a new one that is entered into its parent."""
    if name in sys.modules:
        return sys.modules[name]
    parent, _, child = name.rpartition(".")
    if parent:
        module_named(parent)  # or the module could not be looked for
    with process_undisturbed():
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    module = ModuleType(name, f"Made by ort_trainer.compat.install() in place of the legacy module {name}.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    sys.modules[name] = module
    _made.append(name)
    set_name(module_named(parent), child, module)
    return module


def set_name(module: ModuleType, name: str, value: Any) -> None:
    """Sets a name, also for ``from module import *``, and remembers what it was."""
    _changed.append((module, name, vars(module).get(name, _ABSENT)))
    setattr(module, name, value)
    exported = vars(module).get("__all__")
    if exported is not None and name not in exported:
        _changed.append((module, "__all__", exported))
        module.__all__ = [*exported, name]  # type: ignore[attr-defined]


def put_in_place(
    names: Mapping[str, Mapping[str, Any]], if_missing: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Sets names on modules, and lets an import of what is still missing say why.

    Args:
        names: Module -> its names.
        if_missing: The same for names that are set only where the module does not have them.
    """
    for module_name, values in names.items():
        module = module_named(module_name)
        lacking = {n: v for n, v in (if_missing or {}).get(module_name, {}).items() if not hasattr(module, n)}
        for name, value in {**values, **lacking}.items():
            set_name(module, name, value)
    sys.meta_path.append(MissingParts)


def restore() -> None:
    """Undoes everything: modules that were made are gone, names that were set are what they were."""
    if MissingParts in sys.meta_path:
        sys.meta_path.remove(MissingParts)
    while _changed:
        module, name, before = _changed.pop()
        if before is _ABSENT:
            delattr(module, name)
        else:
            setattr(module, name, before)
    while _made:
        sys.modules.pop(_made.pop(), None)
