"""Sets names on modules, makes missing modules, and undoes both."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ..engine.ort import process_undisturbed
from .missing import FailingParts, MissingParts

__all__ = ["is_changed", "module_named", "put_in_place", "restore", "set_name"]

_ABSENT = object()
# For undoing: (module or class, name, previous value), and the names of modules that were made.
_changed: list[tuple[Any, str, Any]] = []
_made: list[str] = []


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
    for module_name, values in names.items():
        module = module_named(module_name)
        lacking = {n: v for n, v in (if_missing or {}).get(module_name, {}).items() if not hasattr(module, n)}
        for name, value in {**values, **lacking}.items():
            set_name(module, name, value)
    sys.meta_path.insert(0, FailingParts)
    sys.meta_path.append(MissingParts)


def restore() -> None:
    """Undoes everything: removes the modules that were made, and restores the names that were set."""
    for finder in (FailingParts, MissingParts):
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
    while _changed:
        module, name, before = _changed.pop()
        if before is _ABSENT:
            delattr(module, name)
        else:
            setattr(module, name, before)
    while _made:
        sys.modules.pop(_made.pop(), None)
