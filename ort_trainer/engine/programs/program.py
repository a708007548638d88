"""``Program``: the computation of one node with PyTorch's kernels, as data for an ONNX file.

A node calls several operators in a row. A program is stored as JSON (not as Python code, because files must not hold
code)::

    {"inputs":  [null, [0, 2, 1], ...],
     "symbols": {"batch": [0, 0], ...},
     "steps":   [["aten.addmm.default", [{"x": 1}, {"x": 0}, {"v": 3}], {"beta": 0.5}], ...],
     "results": [[4, null], [6, [0, 2, 1]], ...]}

``symbols`` maps a symbolic size to an input and its axis. An argument is a number, a string, null, a list of arguments,
or one of ``{"x": input}``, ``{"v": step}``, ``{"dim": expression over the symbols}`` (a size), ``{"number":
expression}`` (a float, such as the ratio of two sizes) and ``{"torch": "float32"}``, an attribute of torch. Between
nodes, tensors are contiguous; an input or result whose dimensions are in another order in memory has that order as a
permutation beside it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...step.program_graph import LOOPS
from .collectives import COLLECTIVES, waiting
from .loops import load
from .operators import LIBRARY, OWN
from .strides import with_contiguous_tensors

CPU = torch.device("cpu")
GETITEM = "getitem"
"""Target of a step that selects one of several results of another step."""

# A file may name operators of these libraries that take and return tensors and plain values, except those that open a
# file or don't check that their result lies within memory.
_LIBRARIES = ("aten", "mkldnn", LIBRARY, COLLECTIVES)
_PLAIN = frozenset({"Tensor", "number", "int", "float", "bool", "str", "Device"})
# The name of a group of processes, since torch 2.12.
_ALSO_PLAIN = {COLLECTIVES: frozenset({"Any"})}
_EXCLUDED = frozenset({"from_file", "_reshape_alias"})

# The most frequent operators that have a function in ``torch``, which takes the same arguments: calling it takes 0.3 to
# 0.8 microseconds less than through ``torch.ops``.
_HAVE_FUNCTIONS = {
    "default": "_log_softmax _softmax addmm bmm cat convolution embedding mm native_layer_norm neg permute relu relu_ "
    "reshape rsqrt sigmoid stack t tanh unsqueeze",
    "Tensor": "add div mul sub",
    "Tensor_Scalar": "pow",
    "dim": "mean squeeze",
    "dim_IntList": "sum",
    "int": "select transpose unbind",
    "out": "add div mul sub",
    "self": "where",
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"aten.{name}.{overload}": getattr(torch, name)
    for overload, names in _HAVE_FUNCTIONS.items()
    for name in names.split()
}

# What surrounds a plain type in the text of a schema's type: Optional[List[Tensor]].
_WRAPPED = re.compile(r"Optional\[|List\[|\]")

Order = Sequence[int] | None
"""The dimensions in memory order, largest stride first; None for a contiguous tensor."""


@dataclass(frozen=True)
class Program:
    """A sequence of calls of PyTorch's operators.

    Attributes:
        inputs: Memory order of every input.
        symbols: Symbolic size -> an input and an axis that have it.
        steps: Operator, positional and named arguments of every call.
        results: Step and memory order of every result.
        loops: Compiled loops, which steps call whose target begins with ``loops.``; mostly empty.
    """

    inputs: list[Order] = field(default_factory=list)
    symbols: dict[str, tuple[int, int]] = field(default_factory=dict)
    steps: list[tuple[str, list[Any], dict[str, Any]]] = field(default_factory=list)
    results: list[tuple[int, Order]] = field(default_factory=list)
    loops: str = ""

    def to_text(self) -> str:
        """Returns the program as JSON."""
        return json.dumps(vars(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str, device: torch.device = CPU) -> Program:
        """Returns the program from :meth:`to_text`, for a device.

        Raises:
            ValueError: If the text is not a program, or the program calls anything else than operators on tensors.
        """
        try:
            program = cls(**json.loads(text))
            for target, _, _ in program.steps:
                program.function(target, device)
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"this is not a program of PyTorch's operators ({error}): {text[:200]}") from error
        return program

    def function(self, target: str, device: torch.device = CPU) -> Callable[..., Any]:
        """Returns what a step with this target calls on a device.

        Raises:
            ValueError: If a program may not call it.
        """
        return load(self.loops, device)[target] if target.startswith(LOOPS) else find_operator(target)

    @property
    def key(self) -> str:
        """Key of the program; equal programs have equal keys."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()[:20]


@functools.cache
def makes_tensors(target: str) -> bool:
    """Returns whether a step with this target makes a tensor on a device that it must be told."""
    if target == GETITEM or target.startswith(LOOPS):
        return False
    kinds = {argument.name: str(argument.type) for argument in _overload(target)._schema.arguments}
    return "device" in kinds and not any("Tensor" in kind for kind in kinds.values())


def may_call(called: Any) -> bool:
    """Returns whether a program may call something: it must be one of PyTorch's operators on tensors."""
    if not isinstance(called, torch._ops.OpOverload) or called.namespace not in _LIBRARIES:
        return False
    schema, plain = called._schema, _PLAIN | _ALSO_PLAIN.get(called.namespace, frozenset())
    return (
        called.overloadpacket.__name__ not in _EXCLUDED
        and {str(part.type) for part in schema.returns} in ({"Tensor"}, {"Tensor", "int"}, {"List[Tensor]"})
        and all(_WRAPPED.sub("", str(part.type)) in plain for part in schema.arguments)
    )


@functools.cache
def find_operator(target: str) -> Callable[..., Any]:
    """Returns the operator that a step names.

    Raises:
        ValueError: If it is anything else than an operator that a program may call (:func:`may_call`).
    """
    if target == GETITEM:
        return operator.getitem
    if target.startswith(f"{COLLECTIVES}."):
        return waiting(_overload(target))
    overload = _overload(target)
    # The package's own are called as they are: PyTorch's dispatcher takes longer than many of them.
    called = OWN.get(target) or _FUNCTIONS.get(target) or overload._op
    function = with_contiguous_tensors(target.rpartition(".")[0], called)
    # Only in grad mode does this operator return what its backward operator needs; it has no argument for that.
    return torch.enable_grad()(function) if target == "aten.mkldnn_rnn_layer.default" else function


def _overload(target: str) -> Any:
    """Returns the operator of PyTorch that a step names; raises as :func:`find_operator`."""
    library, name, overload = target.split(".")
    packet = getattr(getattr(torch.ops, library), name, None) if library in _LIBRARIES else None
    # Only packets of operators: the attributes of any other object could lead anywhere.
    named = getattr(packet, overload, None) if isinstance(packet, torch._ops.OpOverloadPacket) else None
    if not may_call(named):
        raise ValueError(f"{target} is not an operator on tensors of the libraries {_LIBRARIES}")
    return named
