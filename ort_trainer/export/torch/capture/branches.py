"""Captures branches on the values of tensors, which are unknown during a capture.

A graph has the branches that its sample takes. If a capture meets a condition on values, the model runs once in PyTorch
(``answers.py``), and another capture gives the same answers in the same places. Each condition becomes an additional
result of the step, so that every run of the graph shows whether its batch takes the same branches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch

from ..fx.explain import LIBRARIES, shown_place

__all__ = ["Answers", "Assumption", "Branches", "Line", "Number", "ValuesAsked", "reads_watched"]

Line = tuple[CodeType, int]
"""A line of a function: where values are read. (An instruction has another offset when Python has specialized it.)"""
Number = bool | int | float
Answers = Mapping[Line, list[Number]]
"""The values that were read at each place, in order."""


# Questions about one number that torch answers without its value, or not at all: comparisons with itself, which only
# NaN fails, and functions of ``math``. Each is computed from a number, or from a tensor.
_OF_NUMBERS: dict[tuple[Any, str], Callable[[Any], Any]] = {
    (torch.SymFloat, "__eq__"): lambda value: value == value,
    (torch.SymFloat, "__ne__"): lambda value: value != value,
    (math, "isnan"): lambda value: value != value,
    (math, "isinf"): lambda value: (value == math.inf) | (value == -math.inf),
    (math, "isfinite"): lambda value: value - value == 0,
}


_CONVERSIONS = ("__float__", "__int__", "__index__", "tolist", "numpy")
"""Methods of tensors that return values, besides those that :func:`reads_watched` watches."""


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
        self._running = self._left = False
        self._counts: dict[Line, int] = {}
        self._conditions: list[torch.Tensor] = []
        # Symbol of a number that was taken from a tensor -> the tensor, and the number in PyTorch's run, if known.
        self._numbers: dict[Any, tuple[torch.Tensor, Number | None]] = {}
        self._sizes: dict[Any, torch.SymInt] = {}
        self.assumptions: list[Assumption] = []

    @contextlib.contextmanager
    def forward_pass(self, inputs: tuple[torch.Tensor, ...]) -> Iterator[list[torch.Tensor]]:
        """A context for a forward pass; yields a list that collects its conditions."""
        for collected in (self._counts, self._conditions, self._numbers, self._sizes, self.assumptions):
            collected.clear()
        sizes: list[Any] = [size for value in inputs for size in value.shape if isinstance(size, torch.SymInt)]
        self._sizes.update((size.node.expr, size) for size in sizes)
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
        from torch._subclasses.functional_tensor import FunctionalTensor
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        size_is_true: Any = torch.SymBool.__bool__

        def bool_of_size(value: torch.SymBool) -> bool:
            return self._truth_of_size(size_is_true, value, sys._getframe(1))

        def bool_of_float(value: torch.SymFloat) -> bool:
            nonzero: Any = value != 0.0
            return self._truth_of_size(size_is_true, nonzero, sys._getframe(1))

        def check_with(error: Any, condition: Any, message: Any = None) -> None:
            if isinstance(condition, torch.SymBool) and self._depends_on_numbers(condition):
                condition = self._truth_of_size(size_is_true, condition, sys._getframe(1)) and condition
            checks[1](error, condition, message)

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
                if of_torch or not itself or not self._depends_on_numbers(value):
                    return original(value, *others)
                answer = self._decided(value.node.expr, question, frame)
                if answer is None:
                    raise GuardOnDataDependentSymNode(value.node.expr, "it may be nan")
                return answer

            return answered

        def converted(method: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
            def reads(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                if self._running and not _is_unknown(tensor):
                    self._constant_read(tensor)
                return method(tensor, *args, **kwargs)

            return reads

        checks: Any = torch._assert_async, torch._check_with
        self._left = False
        try:
            with (
                contextlib.ExitStack() as stack,
                mock.patch.object(torch, "_assert_async", assert_async),
                mock.patch.object(torch, "_check_with", check_with),
                reads_watched(self._read, torch.Tensor, FunctionalTensor),
                mock.patch.object(torch.SymBool, "__bool__", bool_of_size),
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
        answer = self._next(frame)
        if self._running and not _is_unknown(tensor):
            self._constant_read(tensor)
        if method.__name__ == "__bool__":
            if not _is_unknown(tensor):
                return method(tensor)
            if answer is None:
                self._leave()
                return method(tensor)  # raises
            self._assume(tensor != 0, bool(answer), frame)
            return bool(answer)
        number = method(tensor)
        if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            for symbol in number.node.expr.free_symbols:
                self._numbers[symbol] = (tensor.detach().clone(), answer)
        return number

    def _truth_of_size(self, is_true: Callable[[Any], bool], value: torch.SymBool, frame: FrameType) -> bool:
        """Returns the value of a condition on sizes and numbers."""
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        try:
            return is_true(value)
        except GuardOnDataDependentSymNode:
            if not self._depends_on_numbers(value):
                raise  # it is of a size that depends on values
            answer = self._decided(value.node.expr, lambda condition: condition, frame)
            if answer is None:
                raise
            return answer

    def _decided(self, expression: Any, question: Callable[[Any], Any], frame: FrameType) -> bool | None:
        """Returns what PyTorch's run answers, and assumes it; None if it has not read a number.

        Args:
            expression: Of numbers and sizes.
            question: What is asked of its value, a number or a tensor.
            frame: Where.
        """
        self._leave()
        numbers = {symbol: self._numbers[symbol] for symbol in expression.free_symbols & self._numbers.keys()}
        if any(number is None for _, number in numbers.values()):
            return None
        sizes = {symbol: self._sizes[symbol] for symbol in expression.free_symbols & self._sizes.keys()}
        sample_sizes = {symbol: size.node.hint for symbol, size in sizes.items()}
        values = {**sample_sizes, **{symbol: number for symbol, (_, number) in numbers.items()}}
        answer = bool(question(_computed(expression, values)))
        # item() returns a Python number, so the tensors are computed in float64 and int64, too.
        tensors = {s: t.double() if t.is_floating_point() else t.long() for s, (t, _) in numbers.items()}
        # The sizes as tensors: kernels can use a symbolic size only as the size of a tensor.
        counts = {symbol: torch.ones(size, dtype=torch.int64).sum() for symbol, size in sizes.items()}
        self._assume(question(_computed(expression, {**counts, **tensors})), answer, frame)
        return answer

    def _depends_on_numbers(self, value: torch.SymBool | torch.SymFloat) -> bool:
        """Returns whether a condition or number is computed from numbers read from tensors, and perhaps sizes."""
        symbols = value.node.expr.free_symbols
        return bool(symbols & self._numbers.keys()) and symbols <= self._numbers.keys() | self._sizes.keys()

    def _next(self, frame: FrameType) -> Number | None:
        """Returns what PyTorch's run has read here; None if that is unknown."""
        place = (frame.f_code, frame.f_lineno)
        numbers_read = (self._answers or {}).get(place, [])
        if not self._running:  # a checkpoint runs again in the backward pass
            return numbers_read[0] if len(set(numbers_read)) == 1 else None
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


@contextlib.contextmanager
def reads_watched(
    read: Callable[[Callable[[torch.Tensor], Any], torch.Tensor, FrameType], Any], *kinds: type[torch.Tensor]
) -> Iterator[None]:
    """Calls a function in place of the methods of tensors by which ``if``, ``assert`` and ``item()`` read a value.

    Args:
        read: Takes the method, the tensor and the frame that reads it; returns the value.
        kinds: Classes of tensors that have their own methods.
    """
    inside = False

    def watched(method: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def reads(tensor: torch.Tensor) -> Any:
            nonlocal inside
            if inside:  # PyTorch's modes call the method again
                return method(tensor)
            inside = True
            try:
                return read(method, tensor, sys._getframe(1))
            finally:
                inside = False

        return reads

    with contextlib.ExitStack() as stack:
        methods = [(kind, name, getattr(kind, name)) for kind in kinds for name in ("__bool__", "item")]
        for kind, name, method in methods:
            stack.enter_context(mock.patch.object(kind, name, watched(method)))
        yield


def _line(frame: FrameType) -> str:
    """Returns the line that a frame executes; if it is PyTorch's, the model's line that called it."""
    torchs, packages = LIBRARIES
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.startswith(torchs):
        caller = caller.f_back
    if caller is not None and not caller.f_code.co_filename.startswith(packages):
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
        def to_dtype(value: Any, dtype: torch.dtype) -> Any:
            return value.to(dtype) if isinstance(value, torch.Tensor) else float(value)

    return sympy_interp(Operators, dict(values), condition)
