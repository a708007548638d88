"""Captures branches on the values of tensors, which are unknown during a capture.

A graph has the branches that its sample takes. If a capture meets a condition on values, the model runs once in PyTorch
(``answers.py``), and another capture gives the same answers in the same places. Each condition becomes an additional
result of the step, so that every run of the graph shows whether its batch takes the same branches.

An integer that ``item()`` or ``tolist()`` reads, as in ``x.split(sizes.tolist())``, becomes the size of a tensor
without elements (``ort_trainer::as_sizes``), so that it is symbolic like the number of rows in ``x[mask]``. What
PyTorch needs of such sizes, for example that those of a split add up, are conditions, too. If that fails, and for
``int()``, which can't return a symbolic number, the integer is a constant, and that it has this value a condition.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import linecache
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from ..core.errors import ExportError
from ..engine.programs import operators  # noqa: F401 - which defines the package's own
from ..fx.explain import COMPUTES, LIBRARIES, line_of_trace, shown_place

Line = tuple[CodeType, int, str]
"""A line of a function, and an operator whose result has a size that values decide, or ``""`` for a value that is read.

(An instruction has another offset when Python has specialized it.)
"""
Number = bool | int | float
Answers = Mapping[Line, list[Any]]
"""The values that were read at each place, or the shapes of results, in order."""


# Questions about one number that torch answers without its value, or not at all: comparisons with itself, which only
# NaN fails, and functions of ``math``. Each is computed from a number, or from a tensor.
_OF_NUMBERS: dict[tuple[Any, str], Callable[[Any], Any]] = {
    (torch.SymFloat, "__eq__"): lambda value: value == value,
    (torch.SymFloat, "__ne__"): lambda value: value != value,
    (math, "isnan"): lambda value: value != value,
    (math, "isinf"): lambda value: (value == math.inf) | (value == -math.inf),
    (math, "isfinite"): lambda value: value - value == 0,
}


_READS = ("__bool__", "item", "__int__", "__index__", "tolist")
"""Methods of tensors that return values, and whose values are answered."""
_PYTHON_INTEGERS = ("__int__", "__index__")
"""Those of them that must return an ``int``, not a symbolic one."""
_CONVERSIONS = ("__float__", "numpy")
"""Other such methods."""


READ_A_NUMBER = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
"""Operators that read the value of a tensor."""


_ASSUMED = "assumed by ort_trainer"
"""The message of conditions on sizes that are among the results already."""


def _itself(value: Any) -> Any:
    return value


class ValuesAsked(Exception):
    """A capture without answers met a condition on values, or a check of a number.

    The model must run once in PyTorch.
    """


@dataclasses.dataclass(frozen=True)
class Assumption:
    """A condition whose value a graph assumes.

    Attributes:
        value: The value.
        line: File, line and text of the condition.
    """

    value: bool
    line: str


class _Unanswered(BaseException):
    """Leaves a capture; the model's own handlers of exceptions must not catch it."""


class Branches:
    """Answers the conditions of a step while it is captured, and collects them.

    Args:
        answers: What a run in PyTorch has read; None if there was none.
        constant_read: Called with a tensor whose value is read and is known: it is made of constants, or of tensors
            from outside.

    Attributes:
        assumptions: The conditions of the last forward pass.
    """

    def __init__(
        self, answers: Answers | None = None, constant_read: Callable[[torch.Tensor], object] = lambda tensor: None
    ) -> None:
        self._answers, self._constant_read = answers, constant_read
        self._running = self._left = self._inside = False
        self._counts: dict[Line, int] = {}
        self._conditions: list[torch.Tensor] = []
        # Symbol of a number that was taken from a tensor -> the tensor, and the number in PyTorch's run, if known.
        self._numbers: dict[Any, tuple[torch.Tensor, Number | None]] = {}
        # Symbol of a size -> the size, and the size in PyTorch's run, if known.
        self._sizes: dict[Any, tuple[torch.SymInt, int | None]] = {}
        # Expression of numbers and sizes, and what is asked of its value -> the answer, and the line that asks.
        self._decisions: dict[tuple[Any, Callable[[Any], Any]], tuple[Number, str]] = {}
        self._has_integers = self._constant_integers = False
        self.assumptions: list[Assumption] = []

    @contextlib.contextmanager
    def forward_pass(self, inputs: tuple[torch.Tensor, ...]) -> Iterator[list[torch.Tensor]]:
        """A context for a forward pass; yields a list that collects its conditions."""
        noted = self._counts, self._conditions, self._numbers, self._sizes, self._decisions, self.assumptions
        for collected in noted:
            collected.clear()
        sizes: list[Any] = [size for value in inputs for size in value.shape if isinstance(size, torch.SymInt)]
        self._sizes.update((size.node.expr, (size, size.node.hint)) for size in sizes)
        self._running = True
        try:
            yield self._conditions
        finally:
            self._running = False

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """A context in which conditions on values of a step are answered.

        Raises:
            ValuesAsked: If there are no answers.
        """
        import sympy  # slow
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
        from torch._subclasses.functional_tensor import FunctionalTensor
        from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
        from torch.fx.experimental.symbolic_shapes import (
            GuardOnDataDependentSymNode,
            ShapeEnv,
            uninteresting_files,
        )

        uninteresting_files().add(__file__)  # or torch would take evaluate() for the line that caused a condition

        def evaluate(environment: ShapeEnv, expression: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return evaluates(environment, expression, *args, **kwargs)
            except GuardOnDataDependentSymNode:
                answer = self._decided(expression, _itself, sys._getframe(1), environment)
                if answer is None:
                    raise
                return sympy.sympify(answer)

        def bool_of_float(value: torch.SymFloat) -> bool:
            return bool(value != 0.0)

        def check_with(error: Any, condition: Any, message: Any = None) -> None:
            if isinstance(condition, torch.SymBool) and self._depends_on_numbers(condition.node.expr):
                condition = bool(condition) and condition
            checks[1](error, condition, message)

        def dispatch(mode: FakeTensorMode, operator: Any, *args: Any, **kwargs: Any) -> Any:
            return self._sized(lambda: dispatches(mode, operator, *args, **kwargs), operator, sys._getframe(1))

        def trace(mode: ProxyTorchDispatchMode, operator: Any, types: Any, args: Any = (), *rest: Any) -> Any:
            if operator in READ_A_NUMBER and self._running and not reads.inside:
                with mode:  # PyTorch has left it
                    return reads.number(args[0])
            return traces(mode, operator, types, args, *rest)

        def assert_async(tensor: torch.Tensor, *message: str) -> None:
            if _is_unknown(tensor):
                self._leave()
                self._assume(tensor != 0, True, sys._getframe(1))
            checks[0](tensor, *message)

        def of_number(question: Callable[[Any], Any], original: Callable[..., Any]) -> Callable[..., Any]:
            def answered(value: Any, *others: Any) -> Any:
                frame = sys._getframe(1)
                itself = isinstance(value, torch.SymFloat) and all(
                    isinstance(other, torch.SymFloat) and other.node.expr == value.node.expr for other in others
                )
                of_torch = frame.f_code.co_filename.startswith(LIBRARIES[0])
                if of_torch or not itself or not self._depends_on_numbers(value.node.expr):
                    return original(value, *others)
                answer = self._decided(value.node.expr, question, frame)
                if answer is None:
                    raise GuardOnDataDependentSymNode(value.node.expr, "it may be nan")
                return answer

            return answered

        def converted(method: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
            def converts(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                if self._running and not _is_unknown(tensor):
                    self._constant_read(tensor)
                with reads.unanswered():  # no other batch would have the same
                    return method(tensor, *args, **kwargs)

            return converts

        checks: Any = torch._assert_async, torch._check_with
        evaluates, dispatches = ShapeEnv.evaluate_expr, FakeTensorMode.dispatch
        traces = ProxyTorchDispatchMode.__torch_dispatch__
        self._left = False
        try:
            with (
                contextlib.ExitStack() as stack,
                mock.patch.object(torch, "_assert_async", assert_async),
                mock.patch.object(torch, "_check_with", check_with),
                Reads(self._read, torch.Tensor, FakeTensor, FunctionalTensor) as reads,
                mock.patch.object(ProxyTorchDispatchMode, "__torch_dispatch__", trace),
                mock.patch.object(ShapeEnv, "evaluate_expr", evaluate),
                mock.patch.object(FakeTensorMode, "dispatch", dispatch),
                mock.patch.object(torch.SymFloat, "__bool__", bool_of_float),
            ):
                for name in _CONVERSIONS:
                    method = converted(getattr(torch.Tensor, name))
                    stack.enter_context(mock.patch.object(torch.Tensor, name, method))
                for (owner, name), question in _OF_NUMBERS.items():
                    function = of_number(question, getattr(owner, name))
                    stack.enter_context(mock.patch.object(owner, name, function))
                yield
        finally:
            if self._left:  # whatever has become of the exception on its way
                raise ValuesAsked from None

    def _read(self, method: Callable[[torch.Tensor], Any], tensor: torch.Tensor, frame: FrameType) -> Any:
        """Returns a value that is read; a number without a known value if ``item()`` reads it."""
        answer = self._next(frame, kind_of_read(method))
        if answer is None and self._running:  # torch.export reads an index by a method, PyTorch by an operator
            answer = self._next(frame, "" if method in READ_A_NUMBER else str(READ_A_NUMBER[0]))
        if not _is_unknown(tensor):
            if self._running:
                self._constant_read(tensor)
            return method(tensor)
        if method.__name__ == "__bool__":
            if answer is None:
                self._leave()
                return method(tensor)  # raises
            self._assume(tensor != 0, bool(answer), frame)
            return bool(answer)
        python = method.__name__ in _PYTHON_INTEGERS
        if python or not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
            self._leave()
            if answer is not None:
                return self._integers(tensor, answer, frame, constant=python)
        number = method(tensor)
        if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            for symbol in number.node.expr.free_symbols:
                self._numbers[symbol] = (tensor.detach().clone(), answer)
        return number

    def _integers(self, tensor: torch.Tensor, answer: Any, frame: FrameType, constant: bool) -> Any:
        """Returns integers that are read, as sizes; as constants if they must be, or can't be sizes."""
        values, numbers = tensor.detach().long().reshape(-1).clone(), pytree.tree_leaves(answer)
        if int(values.shape[0]) != len(numbers):
            raise ExportError(f"another number of values is read here than in PyTorch: {_line(frame)}")
        if not numbers:
            return answer
        if constant or self._constant_integers or min(numbers) < 0:
            equal = [value == number for value, number in zip(values, numbers, strict=True)]
            self._assume(functools.reduce(torch.logical_and, equal), True, frame)
            return answer
        self._assume((values >= 0).all(), True, frame)
        self._has_integers = True
        sizes = [part.shape[0] for part in torch.ops.ort_trainer.as_sizes(values)]
        read = zip(sizes, values, numbers, strict=True)
        self._numbers |= {size.node.expr: (value, number) for size, value, number in read}
        return pytree.tree_unflatten(sizes, pytree.tree_structure(answer))

    def fix_integers(self) -> bool:
        """Makes integers constants in the next capture; returns whether that can make a difference."""
        changes = self._has_integers and not self._constant_integers
        self._constant_integers = self._constant_integers or changes
        return changes

    def _sized(self, run: Callable[[], Any], operator: Any, frame: FrameType) -> Any:
        """Runs an operator, and notes the sizes of its result that values decide."""
        if not self._running or self._inside or torch.Tag.dynamic_output_shape not in operator.tags:
            return run()
        self._inside = True
        try:
            result = run()
        finally:
            self._inside = False
        shape = self._next(users_frame(frame), str(operator))
        for axis, size in enumerate(result.shape if isinstance(result, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr not in self._sizes:
                self._sizes[size.node.expr] = (size, None if shape is None else shape[axis])
        return result

    def assume_decisions(self) -> None:
        """Adds the conditions on numbers and sizes, and what PyTorch has deferred to the run, to the results.

        Only now, as PyTorch also decides while it infers shapes, where no operator is captured.

        Raises:
            ExportError: If a condition that PyTorch needs is false in PyTorch's run.
        """
        environments = {id(e): e for size, _ in self._sizes.values() if (e := size.node.shape_env) is not None}
        for condition in (
            c for e in environments.values() for each in e.deferred_runtime_asserts.values() for c in each
        ):
            if condition.msg == _ASSUMED or not self._depends_on_numbers(condition.expr):
                continue
            line = line_of_trace("".join(condition.stack.summary().format()))
            if self._answer(condition.expr, _itself) is False:
                raise ExportError(f"a graph needs a condition on sizes that is false for this batch: {line}")
            self._decisions[condition.expr, _itself] = True, line
        for (expression, question), (answer, line) in self._decisions.items():
            value = question(_computed(expression, self._as_tensors(expression.free_symbols)))
            is_condition = isinstance(answer, bool)
            self._conditions.append((value if is_condition else value == answer).detach().reshape(()))
            self.assumptions.append(Assumption(bool(answer) if is_condition else True, line))

    def _decided(
        self, expression: Any, question: Callable[[Any], Any], frame: FrameType, environment: Any = None
    ) -> Number | None:
        """Returns what PyTorch's run answers, and assumes it; None if it has not read a number.

        Args:
            expression: Of numbers and sizes.
            question: What is asked of its value, a number or a tensor.
            frame: Where.
            environment: What knows the conditions on sizes; None if the question is not about these.
        """
        if not self._depends_on_numbers(expression):
            return None
        self._leave()
        answer: Number | None = self._answer(expression, question)
        if answer is None:
            return None
        line = _line(frame)
        if not self._running:  # a checkpoint runs again in the backward pass; others' conditions would not be checked
            return answer if (answer, line) in self._decisions.values() else None
        self._decisions[expression, question] = answer, line
        if environment is not None and all(symbol.is_integer for symbol in expression.free_symbols):
            import sympy  # slow

            is_bool = isinstance(answer, bool)
            held = sympy.Eq(expression, answer) if not is_bool else expression if answer else sympy.Not(expression)
            environment.guard_or_defer_runtime_assert(held, _ASSUMED)
        return answer

    def _answer(self, expression: Any, question: Callable[[Any], Any]) -> Any:
        """Returns the answer to a question about an expression in PyTorch's run; None if that is unknown."""
        known = {symbol: value for symbol, (_, value) in (*self._sizes.items(), *self._numbers.items())}
        values = {symbol: known[symbol] for symbol in expression.free_symbols}
        if any(value is None for value in values.values()):
            return None
        answer = question(_computed(expression, values))
        if isinstance(answer, float):  # no other batch would have it
            return None
        return int(answer) if not isinstance(answer, bool) and expression.is_integer else bool(answer)

    def _as_tensors(self, symbols: Set[Any]) -> dict[Any, torch.Tensor]:
        """Returns numbers and sizes as tensors of the graph."""
        # Kernels can use a symbolic size only as the size of a tensor.
        sizes = {s: torch.ones(self._sizes[s][0], dtype=torch.int64).sum() for s in symbols & self._sizes.keys()}
        # item() returns a Python number, so the tensors are computed in float64 and int64, too.
        numbers = {s: self._numbers[s][0] for s in symbols & self._numbers.keys()}
        return {**sizes, **{s: t.double() if t.is_floating_point() else t.long() for s, t in numbers.items()}}

    def as_tensor(self, value: torch.SymInt | torch.SymFloat) -> torch.Tensor:
        """Returns a number that the run computes as a tensor of the graph."""
        dtype = torch.int64 if isinstance(value, torch.SymInt) else torch.float64
        symbols = value.node.expr.free_symbols
        if self._numbers.keys().isdisjoint(symbols) or not symbols <= self._numbers.keys() | self._sizes.keys():
            return torch.scalar_tensor(value, dtype=dtype)  # type: ignore[arg-type]
        # Compiled loops can't pass on a number that is read from a tensor.
        computed: torch.Tensor = _computed(value.node.expr, self._as_tensors(symbols))
        return computed.to(dtype)

    def _depends_on_numbers(self, expression: Any) -> bool:
        """Returns whether an expression has numbers read from tensors, or sizes that values decide."""
        symbols = expression.free_symbols
        known = symbols <= self._numbers.keys() | self._sizes.keys()
        return known and any(s in self._numbers or self._sizes[s][0].node.hint is None for s in symbols)

    def _next(self, frame: FrameType, operator: str = "") -> Any:
        """Returns what PyTorch's run has read here; None if that is unknown."""
        place = (frame.f_code, frame.f_lineno, operator)
        numbers_read = (self._answers or {}).get(place, [])
        if not self._running:  # a checkpoint runs again in the backward pass
            return (
                numbers_read[0] if numbers_read and numbers_read.count(numbers_read[0]) == len(numbers_read) else None
            )
        number = self._counts.get(place, 0)
        self._counts[place] = number + 1
        return numbers_read[number] if number < len(numbers_read) else None

    def _leave(self) -> None:
        """Leaves the capture if the model has to run first."""
        if self._answers is None and self._running:
            self._left = True
            raise _Unanswered

    def _assume(self, condition: torch.Tensor, value: bool, frame: FrameType) -> None:
        """Adds a condition to the results of the step, with the value that the graph assumes."""
        if not self._running:
            return
        self._conditions.append(condition.detach().reshape(()))
        self.assumptions.append(Assumption(value, _line(frame)))


def kind_of_read(method: Callable[[torch.Tensor], Any]) -> str:
    """Returns what tells apart the values that a line's methods read, and those that an operator reads."""
    return str(method) if method in READ_A_NUMBER else ""


class Reads:
    """A context that calls a function in place of what reads values of tensors: ``if``, ``int()``, ``item()`` and more.

    Args:
        read: Takes the method, the tensor and the frame that reads it; returns the value.
        kinds: Classes of tensors that have their own methods.

    Attributes:
        inside: Whether a value is read now: PyTorch's modes call methods and operators again.
    """

    def __init__(
        self, read: Callable[[Callable[[torch.Tensor], Any], torch.Tensor, FrameType], Any], *kinds: type[torch.Tensor]
    ) -> None:
        self._read, self._kinds, self._stack = read, kinds, contextlib.ExitStack()
        self.inside = False

    def __enter__(self) -> Reads:
        methods = [(kind, name, getattr(kind, name)) for kind in self._kinds for name in _READS]
        for kind, name, method in methods:
            self._stack.enter_context(mock.patch.object(kind, name, self._watched(method)))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def number(self, tensor: torch.Tensor) -> Any:
        """Reads a tensor that stands for a number, as in ``arange(n)``: PyTorch calls an operator, and no method."""
        return self._value(READ_A_NUMBER[0], tensor, sys._getframe(1))

    @contextlib.contextmanager
    def unanswered(self) -> Iterator[None]:
        """A context in which PyTorch reads values by itself."""
        inside, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = inside

    def _watched(self, method: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def reads(tensor: torch.Tensor) -> Any:
            return method(tensor) if self.inside else self._value(method, tensor, sys._getframe(1))

        return reads

    def _value(self, method: Callable[[torch.Tensor], Any], tensor: torch.Tensor, frame: FrameType) -> Any:
        with self.unanswered():
            return self._read(method, tensor, users_frame(frame, COMPUTES))


def users_frame(frame: FrameType, among: tuple[str, ...] = ()) -> FrameType:
    """Returns the innermost frame that is neither PyTorch's nor this package's; the given one if all are.

    Args:
        frame: Where to begin.
        among: Files and folders of these libraries whose frames count as the user's.
    """
    caller: FrameType | None = frame
    while caller is not None and (file := caller.f_code.co_filename).startswith(LIBRARIES):
        if file.startswith(among):
            break
        caller = caller.f_back
    return caller or frame


def _line(frame: FrameType) -> str:
    """Returns the line that a frame executes; if it is PyTorch's, the model's line that called it."""
    torchs, *packages = LIBRARIES
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.startswith(torchs):
        caller = caller.f_back
    if caller is not None and not caller.f_code.co_filename.startswith(tuple(packages)):
        frame = caller
    file, line = frame.f_code.co_filename, frame.f_lineno
    return shown_place((file, str(line), frame.f_code.co_name, linecache.getline(file, line)))


def _is_unknown(value: torch.Tensor) -> bool:
    """Returns whether a tensor is traced and has no value; constants keep theirs."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    if isinstance(value, FunctionalTensor):
        value = torch._from_functional_tensor(value.elem)  # type: ignore[no-untyped-call]
    return isinstance(value, FakeTensor) and value.constant is None


def _computed(condition: Any, values: Mapping[Any, Any]) -> Any:
    """Computes a condition of sympy with Python's operators, from numbers or from tensors."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    class Operators(PythonReferenceAnalysis):
        @staticmethod
        def not_(value: Any) -> Any:
            return torch.logical_not(value) if isinstance(value, torch.Tensor) else not value

        @staticmethod
        def minimum(a: Any, b: Any) -> Any:
            return torch.where(a < b, a, b) if _of_tensors(a, b) else min(a, b)

        @staticmethod
        def maximum(a: Any, b: Any) -> Any:
            return torch.where(a > b, a, b) if _of_tensors(a, b) else max(a, b)

        @staticmethod
        def to_dtype(value: Any, dtype: torch.dtype) -> Any:
            return value.to(dtype) if isinstance(value, torch.Tensor) else float(value)

    return sympy_interp(Operators, dict(values), condition)


def _of_tensors(*values: Any) -> bool:
    return any(isinstance(value, torch.Tensor) for value in values)
