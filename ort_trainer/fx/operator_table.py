"""The table of operators: what happens to each PyTorch operator on its way to ONNX.

There are five kinds of entries, in the order in which they take effect:

- A *replacement* replaces a function of Python or torch while the model is captured: a function that reads the values
  of tensors, or turns symbolic sizes into numbers, can't be captured itself.
- A *composite* replaces an operator before PyTorch differentiates, so that no gradient is written by hand. Most make up
  for gaps in ONNX; PyTorch's own kernels need few, and some to stay whole.
- A *decomposition* replaces an operator after PyTorch has differentiated; this includes backward operators. If it
  returns ``NotImplemented``, the operator stays.
- A *random operator* is removed from the graph, and its numbers become an input.
- A *translation* turns what is left into ONNX nodes.

Every other file of this folder is a family of operators, with its entries of all kinds. New files are found
automatically.

Translations are written with ``op`` and ``ir``, which stand for onnxscript and onnx_ir. These take a second to import,
and may be missing where only PyTorch's kernels train, so they are imported when the first graph is translated, while
the other kinds are needed for every capture.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch

Operator = Any
"""An overload such as ``torch.ops.aten.add.Tensor``, or a function of Python on symbolic sizes."""
Size = Any
"""An int, or a symbolic one."""
Value = Any
"""A tensor in a translation: a value of the ONNX graph."""

_Function = TypeVar("_Function", bound=Callable[..., Any] | None)
_Any = TypeVar("_Any")


class _Imported:
    """A module, which is imported when a name of it is used."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


class _Opset(_Imported):
    """The ONNX operators, as functions that add a node to the graph that is being translated."""

    def __getattr__(self, name: str) -> Any:
        return getattr(super().__getattr__("opset18"), name)

    @staticmethod
    def add(node: Any) -> Sequence[Any]:
        """Adds an existing node, for operators whose number of outputs the signature does not tell."""
        from onnxscript import evaluator

        recorder: Any = evaluator.default()
        recorder.nodes.append(node)
        return node.outputs  # type: ignore[no-any-return]


op: Any = _Opset("onnxscript")
ir: Any = _Imported("onnx_ir")


class _Table:
    """Operator -> function, for one kind of entry; a user's entries take precedence over the package's."""

    def __init__(self) -> None:
        self.package: dict[Operator, Callable[..., Any] | None] = {}
        self.user: dict[Operator, Callable[..., Any] | None] = {}

    def add(self, *operators: Operator) -> Callable[[_Function], _Function]:
        """Decorates a function of the package; applied to None, it registers that there is no function."""

        def register(function: _Function) -> _Function:
            for operator in operators:
                if operator in self.package:
                    raise ValueError(f"{operator} is in the table twice: as {self.package[operator]} and as {function}")
                self.package[operator] = function
            return function

        return register

    def all(self) -> dict[Operator, Callable[..., Any] | None]:
        """Returns all entries, after importing the families."""
        _find_families()
        return {**self.package, **self.user}


_TABLES = _composites, _decompositions, _translations = _Table(), _Table(), _Table()
_random_operators, _whole = _Table(), _Table()
_for_pytorch: set[Operator] = set()
_replacements: dict[tuple[ModuleType | type, str], Any] = {}
_revision = 0


def composite(*operators: Operator, for_pytorch: bool = False) -> Callable[[_Function], _Function]:
    """Registers a function of the operators' arguments, made of operators that PyTorch can differentiate.

    Args:
        operators: The operators, or the names of operators that another library defines when it is imported.
        for_pytorch: Whether PyTorch's own kernels need it, too. Usually they are faster and take less memory.
    """
    _for_pytorch.update(operators if for_pytorch else ())
    return _composites.add(*operators)


def whole(*operators: Operator) -> Callable[[_Function], _Function]:
    """Registers a function that runs operators on PyTorch's own kernels, though PyTorch would decompose them.

    PyTorch does so before it differentiates, where an export differs from an eager run.
    """
    return _whole.add(*operators)


def decomposition(*operators: Operator) -> Callable[[_Function], _Function]:
    """Registers a function of the operators' arguments, made of operators with a translation."""
    return _decompositions.add(*operators)


def keep(*operators: Operator) -> None:
    """Keeps operators whole that PyTorch would decompose, because the result would be worse."""
    _decompositions.add(*operators)(None)


def random_operator(*operators: Operator) -> Callable[[_Function], _Function]:
    """Registers a function of a ``Lifter`` and a node, which replaces the node with inputs of the graph."""
    keep(*operators)
    return _random_operators.add(*operators)


def translation(*operators: Operator) -> Callable[[_Function], _Function]:
    """Registers a function that writes ONNX nodes with ``op``: its tensors are ONNX values, its numbers are numbers."""
    return _translations.add(*operators)


def untranslated(*operators: Operator) -> None:
    """Rejects torch.onnx's own translation of operators."""
    _translations.add(*operators)(None)


def replacement(module: ModuleType | type, name: str) -> Callable[[_Any], _Any]:
    """Registers what replaces a function or setting of a module or class while a model is captured."""

    def register(function: _Any) -> _Any:
        _replacements[module, name] = function
        return function

    return register


def register_operator(
    operator: Operator,
    *,
    composite: Callable[..., Any] | None = None,
    decomposition: Callable[..., Any] | None = None,
    translation: Callable[..., Any] | None = None,
) -> None:
    """Registers how a PyTorch operator is exported to ONNX, for all later exports of this process.

    The functions take the operator's own arguments. They take precedence over what this package, PyTorch or torch.onnx
    does with the operator; a later call replaces functions of the same kind.

    Args:
        operator: An overload: ``torch.ops.aten.linalg_det.default``, or one of your own library.
        composite: Replaces the operator before PyTorch differentiates the model: tensors in, tensors out, made of
            operators that PyTorch can differentiate. Prefer this if you have the choice.
        decomposition: Replaces the operator after differentiation: for backward operators, or for operators that are
            not differentiated. It may return ``NotImplemented`` to keep the operator.
        translation: Translates the operator to ONNX, written with ``onnxscript.opset18``.

    Raises:
        TypeError: If the operator is not an overload, or a function is not callable.
        ValueError: If no function is given.

    Example:
        >>> def determinant(matrix):
        ...     a, b, c = matrix.unbind(-1)
        ...     return (a * torch.linalg.cross(b, c)).sum(-1)  # of 3 x 3 matrices
        >>> register_operator(torch.ops.aten.linalg_det.default, composite=determinant)
    """
    global _revision
    if isinstance(operator, torch._ops.OpOverloadPacket):
        overloads = operator.overloads()  # type: ignore[no-untyped-call]
        names = ", ".join(f"torch.ops.{operator}.{overload}" for overload in overloads)
        raise TypeError(f"operator must be one overload of {operator}: {names}")
    if not isinstance(operator, torch._ops.OpOverload):
        raise TypeError(f"operator must be an overload, such as torch.ops.aten.add.Tensor, but is {operator!r}")
    functions = {"composite": composite, "decomposition": decomposition, "translation": translation}
    for kind, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"{kind} must be a function of the arguments of {operator}, but is {function!r}")
    if all(function is None for function in functions.values()):
        raise ValueError(f"nothing is registered for {operator}: give composite=, decomposition= or translation=")
    last = max(place for place, function in enumerate(functions.values()) if function is not None)
    for place, (table, function) in enumerate(zip(_TABLES, functions.values(), strict=True)):
        if function is not None:
            table.user[operator] = function
        elif place < last:
            table.user.setdefault(operator, None)  # otherwise an earlier kind, by the package or PyTorch, would win
    _revision += 1


def composites(for_onnx: bool = True) -> Mapping[Operator, Callable[..., Any] | None]:
    """Returns the composites for ONNX, or those for PyTorch's own kernels; a user's are among both."""
    table = _composites.all()
    if for_onnx:
        return table
    return _whole.all() | {name: f for name, f in table.items() if name in _for_pytorch or name in _composites.user}


def has_users_operators() -> bool:
    """Returns whether :func:`register_operator` was called."""
    return any(table.user for table in _TABLES)


def is_registered_by_user(operator: Operator) -> bool:
    """Returns whether a user has registered a decomposition or a translation of an operator."""
    return operator in _decompositions.user or operator in _translations.user


def decompositions() -> Mapping[Operator, Callable[..., Any] | None]:
    """Returns the decompositions; None for what is kept whole."""
    return _decompositions.all()


def translations() -> Mapping[Operator, Callable[..., Any] | None]:
    """Returns the translations; None rejects the one that torch.onnx has."""
    return _translations.all()


def random_operators() -> Mapping[Operator, Callable[..., Any]]:
    """Returns the functions that replace random operators."""
    return {operator: function for operator, function in _random_operators.all().items() if function is not None}


def replacements() -> Mapping[tuple[ModuleType | type, str], Any]:
    """Returns what is replaced while a model is captured: (module or class, name) -> replacement."""
    _find_families()
    return _replacements


def is_extended() -> bool:
    """Returns whether a user has registered anything."""
    return any(table.user for table in _TABLES)


def revision() -> int:
    """Returns a number that changes with every call of ``register_operator``, for what is derived from the table."""
    return _revision


@functools.cache
def _find_families() -> None:
    """Imports the files of ``operators/``, which fill the tables."""
    package = importlib.import_module("..operators", __package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
