"""Compiles the programs of a graph to one Python function, which runs them directly.

A call of an operator from Python source costs a tenth of a call through an interpreter of programs. Everything in a
program that is not a number becomes a name in the function's globals, so no text from a file gets into the source.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...core.dims import evaluate, evaluate_number
from ...step.program_graph import Constant, ProgramGraph
from .loops import takes_addresses
from .program import CPU, Order, Program, makes_tensors

_ATTRIBUTES = (torch.dtype, torch.layout, torch.memory_format)
_COMPUTED: dict[str, Callable[[str, Mapping[str, int]], float]] = {"dim": evaluate, "number": evaluate_number}


class LoadedCall(NamedTuple):
    """A node of a graph: a program with the names of the graph's values that it takes and returns."""

    name: str
    program: Program
    inputs: Sequence[str]
    outputs: Sequence[str]


def loaded(graph: ProgramGraph, device: torch.device = CPU) -> tuple[list[LoadedCall], dict[str, torch.Tensor]]:
    """Returns the nodes of a graph, in order, and its constants by name, on a device.

    Raises:
        ValueError: If a program calls anything else than operators on tensors, or a constant is damaged.
    """
    programs = {key: Program.from_text(text, device) for key, text in graph.programs.items()}
    calls = [LoadedCall(call.name, programs[call.program], call.inputs, call.outputs) for call in graph.calls]
    return calls, {name: _tensor(name, constant).to(device) for name, constant in graph.constants.items()}


def _tensor(name: str, constant: Constant) -> torch.Tensor:
    """Returns a constant of a graph as a tensor."""
    dtype, shape = getattr(torch, constant.dtype, None), constant.shape
    if not isinstance(dtype, torch.dtype) or math.prod(shape) * dtype.itemsize != len(constant.data):
        raise ValueError(
            f"constant {name!r} is damaged: {len(constant.data)} bytes of {constant.dtype}, shape {list(shape)}"
        )
    if not constant.data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(constant.data), dtype=dtype).reshape(shape)


class _Line(NamedTuple):
    """A line of the source; it is omitted if no needed line reads the variable that it sets, unless it is to stay."""

    sets: str
    expression: str
    reads: Sequence[str]
    stays: bool


def compiled(
    calls: Sequence[LoadedCall],
    inputs: Sequence[str],
    outputs: Sequence[str],
    constants: Mapping[str, torch.Tensor] = {},
    timed: bool = False,
    device: torch.device = CPU,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Returns a graph of programs as a function. It frees every value after the operator that reads it last.

    Args:
        calls: The nodes, in topological order.
        inputs: Names of the graph's inputs.
        outputs: Names of the values to return.
        constants: Values of the graph that are no inputs, by name.
        timed: Whether to record times.
        device: Where new tensors are made.

    Returns:
        A function of a list of tensors, the values of ``inputs``, which it empties so that it can free them. If
        ``timed``, it also takes a function, which it calls with the time in nanoseconds: for each program before the
        first step, after each step, and after the conversion of each result.

    Raises:
        ValueError: If a program is damaged, or has an invalid argument.
    """
    try:
        return _Compiler(constants, timed, device).function(calls, inputs, outputs)
    except (AttributeError, LookupError, RecursionError, SyntaxError, TypeError) as error:
        raise ValueError(f"a program of the graph is damaged: {error!r}") from error


class _Compiler:
    """Writes the source of a function: ``v1``, ``v2``, ... are its variables, ``g`` and an id its globals."""

    def __init__(self, constants: Mapping[str, torch.Tensor], timed: bool, device: torch.device) -> None:
        self._timed, self._device = timed, device
        self._globals: dict[str, Any] = {"now": time.perf_counter_ns}
        self._values = {name: self._name(value) for name, value in constants.items()}
        self._lines: list[_Line] = []
        self._count = 0

    def function(
        self, calls: Sequence[LoadedCall], inputs: Sequence[str], outputs: Sequence[str]
    ) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Returns the function; see :func:`compiled`."""
        arguments = [self._variable() for _ in inputs]
        self._values.update(zip(inputs, arguments, strict=True))
        for call in calls:
            self._call(call)
        results = [self._values[name] for name in outputs]
        body = [*([f"{', '.join(arguments)}, = values"] if arguments else []), "values.clear()"]
        body += _freeing(self._lines, arguments, results)
        body.append(f"return ({''.join(f'{result}, ' for result in results)})")
        source = f"def run(values{', mark' * self._timed}):\n" + "\n".join(f"    {line}" for line in body)
        exec(compile(source, "<programs>", "exec"), self._globals)
        run: Callable[..., tuple[torch.Tensor, ...]] = self._globals["run"]
        return run

    def _call(self, call: LoadedCall) -> None:
        """Adds the lines of one node."""
        program = call.program
        taken = [self._values[name] for name in call.inputs]
        dims = self._dims(program, taken)
        sources = {
            ("x", index): self._permuted(value, order and _inverse(order))
            for index, (value, order) in enumerate(zip(taken, program.inputs, strict=True))
        }
        for index, order in enumerate(program.inputs if program.loops else ()):
            if order is None:  # unlike operators, loops expect the strides that they were compiled for
                sources["x", index] = self._set(f"{taken[index]}.contiguous()", [taken[index]])
        self._mark()
        for index, (target, args, kwargs) in enumerate(program.steps):
            reads: list[str] = []
            write = functools.partial(self._argument, sources, dims, reads)
            is_loop = takes_addresses(target)
            arguments = [f"{write(argument)}{'.data_ptr()' * (is_loop and _is_tensor(argument))}" for argument in args]
            arguments += [f"{_identifier(name)}={write(argument)}" for name, argument in kwargs.items()]
            if self._device != CPU and makes_tensors(target):
                arguments.append(f"device={self._name(self._device)}")
            call_of = f"{self._name(program.function(target, self._device))}({', '.join(arguments)})"
            # Between loops, a step may write memory that others read.
            sources["v", index] = self._set(call_of, reads, stays=bool(program.loops))
            self._mark()
        for name, (step, order) in zip(call.outputs, program.results, strict=True):
            value = self._permuted(sources["v", step], order)
            self._values[name] = self._set(f"{value}.contiguous()", [value])
            self._mark()

    def _dims(self, program: Program, taken: Sequence[str]) -> dict[tuple[str, str], str]:
        """Returns the variables of the expressions over sizes in a program."""
        expressions = list(dict.fromkeys(_expressions(program.steps)))
        if not expressions:
            return {}
        sizes = self._name(_size_function(list(program.symbols), expressions))
        read = [taken[source] for source, _ in program.symbols.values()]
        axes = [axis for _, axis in program.symbols.values()]
        shapes = ", ".join(f"{value}.shape[{int(axis)}]" for value, axis in zip(read, axes, strict=True))
        numbers = self._set(f"{sizes}({shapes})", read)
        return {expression: f"{numbers}[{index}]" for index, expression in enumerate(expressions)}

    def _permuted(self, value: str, order: Order) -> str:
        """Returns the variable of a value with permuted dimensions; the same one if the order is None."""
        return value if order is None else self._set(f"{value}.permute({[int(axis) for axis in order]})", [value])

    def _set(self, expression: str, reads: Sequence[str], stays: bool = False) -> str:
        """Adds a line that computes something; returns the variable."""
        variable = self._variable()
        self._lines.append(_Line(variable, expression, reads, stays))
        return variable

    def _mark(self) -> None:
        """Adds a line that records the time, if times are recorded."""
        if self._timed:
            self._set("mark(now())", (), stays=True)

    def _variable(self) -> str:
        """Returns the name of a new variable."""
        self._count += 1
        return f"v{self._count}"

    def _name(self, value: Any) -> str:
        """Returns the name of a global with this value."""
        name = f"g{id(value)}"
        self._globals[name] = value
        return name

    def _argument(
        self,
        sources: Mapping[tuple[str, int], str],
        dims: Mapping[tuple[str, str], str],
        reads: list[str],
        value: Any,
    ) -> str:
        """Returns the source of an argument; adds the variables that it reads to ``reads``."""
        if value is None or isinstance(value, (bool, int)):
            return repr(value)
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else f"float('{value!r}')"
        if isinstance(value, str):
            return self._name(value)
        if isinstance(value, list):
            return f"({''.join(f'{self._argument(sources, dims, reads, entry)}, ' for entry in value)})"
        ((kind, what),) = value.items()
        if kind in ("x", "v"):
            reads.append(sources[kind, what])
            return reads[-1]
        if kind in _COMPUTED:
            reads.append(dims[kind, what].partition("[")[0])
            return dims[kind, what]
        attribute = getattr(torch, what) if kind == "torch" else None
        if not isinstance(attribute, _ATTRIBUTES):
            raise ValueError(f"{value!r} is not a valid argument in a program")
        return self._name(attribute)


def _freeing(lines: Sequence[_Line], inputs: Sequence[str], results: Sequence[str]) -> list[str]:
    """Returns the text of the lines that the results need, with deletions of variables after their last use."""
    needed = set(results)
    kept: list[str] = []  # from the last line to the first, so that the first read that is met is the last one
    for line in reversed(lines):
        is_read = line.sets in needed
        if not is_read and not line.stays:
            continue
        last = [name for name in dict.fromkeys(line.reads) if name not in needed and not name.startswith("g")]
        needed.update(line.reads)
        kept += [f"del {', '.join(last)}"] if last else []
        kept.append(f"{line.sets} = {line.expression}" if is_read else line.expression)
    unused = [name for name in inputs if name not in needed]
    kept += [f"del {', '.join(unused)}"] if unused else []
    return kept[::-1]


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, dict) and argument.keys() <= {"x", "v"}


def _inverse(order: Sequence[int]) -> list[int]:
    """Returns the permutation that undoes another one."""
    return [list(order).index(axis) for axis in range(len(order))]


def _expressions(value: Any) -> list[tuple[str, str]]:
    """Returns the expressions over sizes in the arguments of steps."""
    if isinstance(value, (list, tuple)):
        return [expression for entry in value for expression in _expressions(entry)]
    if not isinstance(value, Mapping):
        return []
    return [
        expression
        for kind, what in value.items()
        for expression in ([(kind, what)] if kind in _COMPUTED else _expressions(what))
    ]


def _identifier(name: str) -> str:
    """Returns the name of an argument, after checking that it can be nothing else in the source."""
    if not name.isidentifier():
        raise ValueError(f"{name!r} is not a valid argument name")
    return name


def _size_function(symbols: list[str], expressions: list[tuple[str, str]]) -> Callable[..., tuple[float, ...]]:
    """Returns a function from the sizes of the symbols to the values of expressions; it caches the results."""

    @functools.lru_cache(maxsize=256)
    def sizes(*values: int) -> tuple[float, ...]:
        sizes_of_symbols = dict(zip(symbols, values, strict=True))
        return tuple(_COMPUTED[kind](expression, sizes_of_symbols) for kind, expression in expressions)

    return sizes
