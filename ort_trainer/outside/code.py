"""What the code of a function names: global variables, attributes, modules that it imports."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

LIBRARY_NAMES = frozenset(
    {"torch", "numpy", "sympy", "mpmath", "ort_trainer", "torchgen", "functorch", "_pytest", "pluggy"}
)
"""Libraries whose settings are not watched; pytest rewrites assertions so that they read its own state."""
_NOT_USERS = sys.stdlib_module_names | LIBRARY_NAMES
# With these, code looks up attributes and global variables by strings.
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "attrgetter", "vars", "__dict__", "globals"})

# What code names that handles the error of an absent attribute or variable.
_ABSENT = frozenset({"AttributeError", "NameError", "Exception"})


def is_users(module: str | None) -> bool:
    """Returns whether code of a Python module is a user's or a library's, not Python's or PyTorch's."""
    return bool(module) and str(module).partition(".")[0] not in _NOT_USERS


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """Returns the names of globals and attributes in code, also in the functions and comprehensions in it.

    Those of Python's own, such as ``__name__``, are left out.
    """
    names = frozenset(name for name in code.co_names if not name.startswith("__") or not name.endswith("__"))
    if "getenv" in names:  # a function of Python's own, which reads os.environ
        names |= {"environ"}
    return names.union(_texts(code, _BY_NAME), *map(names_of, _inner(code)))


@functools.lru_cache(maxsize=4096)
def optional_in(code: types.CodeType) -> frozenset[str]:
    """Returns those of the names in code that may be absent: it looks them up by strings, or handles errors."""
    names = _texts(code, _BY_NAME)
    names |= frozenset(code.co_names) if not _ABSENT.isdisjoint(code.co_names) else frozenset()
    return frozenset(name for name in names if not name.startswith("__")).union(*map(optional_in, _inner(code)))


@functools.lru_cache(maxsize=4096)
def globals_of(code: types.CodeType) -> frozenset[str]:
    """Returns the names in code that are global variables; slow."""
    names = {
        each.argval for each in dis.get_instructions(code) if "GLOBAL" in each.opname or each.opname == "LOAD_NAME"
    }
    return frozenset(names).union(_texts(code, {"globals"}), *map(globals_of, _inner(code)))


@functools.lru_cache(maxsize=4096)
def assigned_in(code: types.CodeType) -> frozenset[str]:
    """Returns the names of the attributes that code may assign; slow."""
    names = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}
    return frozenset(names).union(_texts(code, {"setattr", "__setattr__"}), *map(assigned_in, _inner(code)))


@functools.lru_cache(maxsize=4096)
def _imported(code: types.CodeType) -> frozenset[str]:
    """Returns the names in import statements of code, and of the functions in it."""
    names = {each.argval for each in dis.get_instructions(code) if each.opname.startswith("IMPORT_")}
    return frozenset(names).union(*map(_imported, _inner(code)))


def imports_of(code: types.CodeType, values: dict[str, Any]) -> frozenset[str]:
    """Returns the names of a user's modules that code imports as it runs, if they have been imported before.

    Args:
        code: The code.
        values: Its global variables.
    """
    package, names = str(values.get("__package__") or ""), names_of(code)
    if not any(name in sys.modules or f"{package}.{name}" in sys.modules for name in names):
        return frozenset()  # saves disassembling the code
    modules = {full for name in _imported(code) for full in (name, f"{package}.{name}") if is_users(full)}
    return frozenset(modules & sys.modules.keys())


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    return (part for part in code.co_consts if isinstance(part, types.CodeType))


def _texts(code: types.CodeType, functions: frozenset[str] | set[str]) -> frozenset[str]:
    """Returns the strings in code that may be names, if the code names any of some functions; otherwise nothing."""
    if functions.isdisjoint(code.co_names):
        return frozenset()
    return frozenset(text for text in code.co_consts if isinstance(text, str) and text.isidentifier())
