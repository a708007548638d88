"""``Program``: the computation of one node with PyTorch's kernels, as data for an ONNX file.

A node calls several operators in a row, because a call from ONNX Runtime into Python costs ten microseconds. A program
is stored as JSON (not as Python code, because files must not hold code)::

    {"inputs":  [["float32", null], ["bool", [0, 2, 1]], ...],
     "symbols": {"batch": [0, 0], ...},
     "steps":   [["aten.addmm.default", [{"x": 1}, {"x": 0}, {"v": 3}], {"beta": 0.5}], ...],
     "results": [[4, null], [6, [0, 2, 1]], ...],
     "outputs": {"1": "fc.weight.grad", ...}}

``symbols`` maps a symbolic size to an input and its axis. An argument is a number, a string, null, a list of arguments,
or one of ``{"x": input}``, ``{"v": step}``, ``{"dim": expression over the symbols}`` (a size), ``{"number":
expression}`` (a float, such as the ratio of two sizes) and ``{"torch": "float32"}``, an attribute of torch. Between
nodes, tensors are contiguous; an input or result whose dimensions are in another order in memory has that order as a
permutation beside it. Booleans are passed as bytes. ``outputs`` maps results to names of outputs of the whole graph.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.dims import evaluate, evaluate_number
from .operators import LIBRARY, OWN

__all__ = ["GETITEM", "Order", "Program", "find_operator", "may_call"]

GETITEM = "getitem"
"""Target of a step that selects one of several results of another step."""

# Libraries of operators that a file may name; all but one operator read and write only tensors.
_LIBRARIES = ("aten", "mkldnn", LIBRARY)
_READS_FILES = "from_file"
_ATTRIBUTES = (torch.dtype, torch.layout, torch.memory_format)
_COMPUTED: dict[str, Callable[[str, Mapping[str, int]], float]] = {"dim": evaluate, "number": evaluate_number}

Order = Sequence[int] | None
"""The dimensions in memory order, largest stride first; None for a contiguous tensor."""


@dataclass(frozen=True)
class Program:
    """A sequence of calls of PyTorch's operators.

    Attributes:
        inputs: Element type (an attribute of torch) and memory order of every input.
        symbols: Symbolic size -> an input and an axis that have it.
        steps: Operator, positional and named arguments of every call.
        results: Step and memory order of every result.
        outputs: Index of a result (as str) -> name of its graph output.
    """

    inputs: list[tuple[str, Order]] = field(default_factory=list)
    symbols: dict[str, tuple[int, int]] = field(default_factory=dict)
    steps: list[tuple[str, list[Any], dict[str, Any]]] = field(default_factory=list)
    results: list[tuple[int, Order]] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)

    def to_text(self) -> str:
        """Returns the program as JSON."""
        return json.dumps(vars(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Program:
        """Returns the program from :meth:`to_text`.

        Raises:
            ValueError: If the text is not a program, or the program calls anything else than operators on tensors.
        """
        try:
            program = cls(**json.loads(text))
            for target, _, _ in program.steps:
                find_operator(target)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"this is not a program of PyTorch's operators ({error}): {text[:200]}") from error
        return program

    @property
    def key(self) -> str:
        """Key of the program; equal programs have equal keys."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()[:20]

    def compiled(self, timed: bool = False) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Returns the program as a function of its inputs from ONNX Runtime.

        Args:
            timed: Whether the function takes an additional first argument, which it calls with the time in nanoseconds:
                before the first step, after each step, and after the conversion of each result.
        """
        return _Compiler(self, timed).function()


def may_call(library: str, name: str) -> bool:
    """Returns whether a program may call an operator."""
    return library in _LIBRARIES and name != _READS_FILES


@functools.cache
def find_operator(target: str) -> Callable[..., Any]:
    """Returns the operator that a step names.

    Raises:
        ValueError: If a program may not use the operator's library, or the operator opens a file.
    """
    if target == GETITEM:
        return operator.getitem
    library, name, overload = target.split(".")
    if not may_call(library, name):
        raise ValueError(f"{target} is not an operator on tensors of the libraries {_LIBRARIES}")
    own = OWN.get(target)
    if own is not None:  # without PyTorch's dispatcher, which takes longer than many of these operators
        return own
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, library), name), overload)
    # It returns what its backward operator needs only while gradients are recorded; it has no argument for that.
    return torch.enable_grad()(found) if target == "aten.mkldnn_rnn_layer.default" else found


class _Compiler:
    """Compiles a program to Python source, which makes a call ten times cheaper than an interpreter would.

    Everything in the program that is not a number becomes a name in the function's globals, so that no text from a file
    gets into the source.
    """

    def __init__(self, program: Program, timed: bool) -> None:
        self._program = program
        self._timed = timed
        self._names: dict[str, Any] = {"now": time.perf_counter_ns}
        self._dims: dict[tuple[str, str], str] = {}
        self._last_uses = self._find_last_uses()

    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        program = self._program
        body: list[str] = []
        for index, (dtype, order) in enumerate(program.inputs):
            if dtype == "bool":
                body.append(f"x{index} = x{index}.view({self._name(torch.bool)})")
            if order is not None:
                back = [list(order).index(axis) for axis in range(len(order))]
                body.append(f"x{index} = x{index}.permute({back})")
        mark = ["mark(now())"] if self._timed else []
        body += mark
        for index, (target, args, kwargs) in enumerate(program.steps):
            given = [self._argument(argument) for argument in args]
            given += [f"{_identifier(name)}={self._argument(argument)}" for name, argument in kwargs.items()]
            body.append(f"v{index} = {self._name(find_operator(target))}({', '.join(given)})")
            body += [f"del {name}" for name in self._last_uses.get(index, ())]
            body += mark
        # The form in which results are passed between nodes.
        flags, as_bytes = self._name(torch.bool), self._name(torch.uint8)
        for index, (step, order) in enumerate(program.results):
            permuted = "" if order is None else f".permute({[int(axis) for axis in order]})"
            body.append(f"r{index} = v{step}{permuted}.contiguous()")
            body.append(f"if r{index}.dtype is {flags}: r{index} = r{index}.view({as_bytes})")
            body += mark
        body.append(f"return ({', '.join(f'r{index}' for index in range(len(program.results)))},)")
        if self._dims:
            self._names["sizes"] = _size_function(list(program.symbols), list(self._dims))
            read = [f"x{source}.shape[{axis}]" for source, axis in program.symbols.values()]
            body.insert(0, f"{', '.join(self._dims.values())}, = sizes({', '.join(read)})")
        inputs = ["mark"] * self._timed + [f"x{index}" for index in range(len(program.inputs))]
        source = f"def program({', '.join(inputs)}):\n" + "\n".join(f"    {line}" for line in body)
        exec(compile(source, f"<{program.key}>", "exec"), self._names)
        function: Callable[..., tuple[torch.Tensor, ...]] = self._names["program"]
        return function

    def _name(self, value: Any) -> str:
        name = f"g{id(value)}"
        self._names[name] = value
        return name

    def _argument(self, value: Any) -> str:
        if value is None or isinstance(value, (bool, int)):
            return repr(value)
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else f"float('{value!r}')"
        if isinstance(value, str):
            return self._name(value)
        if isinstance(value, list):
            return f"[{', '.join(self._argument(entry) for entry in value)}]"
        ((kind, what),) = value.items()
        if kind in ("x", "v"):
            return f"{kind}{int(what)}"
        if kind in _COMPUTED:
            return self._dims.setdefault((kind, what), f"d{len(self._dims)}")
        attribute = getattr(torch, what) if kind == "torch" else None
        if not isinstance(attribute, _ATTRIBUTES):
            raise ValueError(f"{value!r} is not a valid argument in a program")
        return self._name(attribute)

    def _find_last_uses(self) -> dict[int, list[str]]:
        """Returns for every step the values that no later step uses, so that their memory can be freed after it."""
        last: dict[str, int] = {}
        for index, (_, args, kwargs) in enumerate(self._program.steps):
            last[f"v{index}"] = index
            for kind, what in _references([args, list(kwargs.values())]):
                last[f"{kind}{what}"] = index
        kept = {f"v{step}" for step, _ in self._program.results}
        found: dict[int, list[str]] = {}
        for name, index in last.items():
            if name not in kept:
                found.setdefault(index, []).append(name)
        return found


def _references(value: Any) -> list[tuple[str, int]]:
    if isinstance(value, list):
        return [reference for entry in value for reference in _references(entry)]
    if isinstance(value, Mapping):
        ((kind, what),) = value.items()
        return [(kind, what)] if kind in ("x", "v") else []
    return []


def _identifier(name: str) -> str:
    if not name.isidentifier():
        raise ValueError(f"{name!r} is not a valid argument name")
    return name


def _size_function(symbols: list[str], expressions: list[tuple[str, str]]) -> Callable[..., tuple[float, ...]]:
    """Returns a function from the sizes of the symbols to the values of expressions, which it remembers."""

    @functools.lru_cache(maxsize=256)
    def sizes(*given: int) -> tuple[float, ...]:
        known = dict(zip(symbols, given, strict=True))
        return tuple(_COMPUTED[kind](expression, known) for kind, expression in expressions)

    return sizes
