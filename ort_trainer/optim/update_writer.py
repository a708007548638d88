"""Writes weight updates as ONNX nodes: the arithmetic of PyTorch's fused kernels, for other runtimes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ..step.emitter import Emitter
from ..step.names import Names
from .rule import ParameterNodes, Rule

__all__ = ["ParameterUpdate", "UpdateWriter"]


@dataclass(frozen=True)
class ParameterUpdate:
    """How one parameter is updated.

    Attributes:
        rule: Writes the update.
        group: Index of its learning rate.
        hyper: The hyper-parameters of its group, as the optimizer config has them.
        limit: Limit of the global gradient norm; infinite for none.
        max_value: Limit of the absolute value of each gradient element; infinite for none.
    """

    rule: Rule
    group: int
    hyper: Mapping[str, Any]
    limit: float
    max_value: float = math.inf

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the parameter's state tensors."""
        return self.rule.slots_for(self.hyper)

    @property
    def counts(self) -> bool:
        """Whether its updates are counted."""
        return self.rule.keeps_count(self.hyper)


class UpdateWriter(Emitter):
    """Writes updates of parameters.

    Args:
        opset_imports: The model's opset imports.
        names: Names in use.
    """

    op = Emitter.__call__

    def __init__(self, opset_imports: Mapping[str, int], names: Names) -> None:
        super().__init__(opset_imports, names, "optimizer")
        self._scalars: dict[tuple[Any, ...], ir.Value] = {}

    def update(
        self,
        update: ParameterUpdate,
        weight: ir.Value,
        gradient: ir.Value,
        slots: Mapping[str, ir.Value],
        count: ir.Value | None,
        rates: ir.Value,
        norm: ir.Value | None,
    ) -> tuple[ir.Value, Mapping[str, ir.Value]]:
        """Writes the update of a parameter.

        Args:
            update: How it is updated.
            weight: The parameter.
            gradient: Its gradient, divided.
            slots: Its state tensors.
            count: Updates done plus 1, an int64 of shape [1]; None if not counted.
            rates: The learning rates, of shape [rates].
            norm: The global norm of the gradients, float32; None if no norm is clipped.

        Returns:
            The new weight, and the new state tensors by slot.
        """
        if norm is not None and math.isfinite(update.limit):
            gradient = self.op("Mul", gradient, self._like(self._clipping(norm, update.limit), weight))
        if math.isfinite(update.max_value):
            bounds = [self.number(bound, weight) for bound in (-update.max_value, update.max_value)]
            gradient = self.op("Clip", gradient, *bounds)
        rate = self._like(self._rate(rates, update.group), weight)
        count = None if count is None else self._once("count", count, lambda: self.op("Squeeze", count))
        return update.rule.nodes(self, ParameterNodes(weight, gradient, slots, count, rate, update.hyper))

    def norm(self, gradients: Iterable[ir.Value]) -> ir.Value:
        """Returns the Euclidean norm of all gradients together, float32."""
        squares = [self.op("ReduceSumSquare", gradient, keepdims=0) for gradient in gradients]
        squares = [self._cast(square, ir.DataType.FLOAT) for square in squares]
        return self.op("Sqrt", self.op("Sum", *squares))

    def mean(self, gradient: ir.Value, micro_batches: ir.Value, window: int) -> ir.Value:
        """Returns the mean gradient over the micro-batches of a window, which may be incomplete.

        Args:
            gradient: The sum of their gradients, each divided by the size of the window.
            micro_batches: Number of micro-batches, an int64 of shape [1]; 0 counts as 1.
            window: The size of the window.
        """

        def factor() -> ir.Value:
            number = self._cast(self.op("Squeeze", micro_batches), ir.DataType.DOUBLE)
            number = self.op("Max", number, self.constant(1.0, np.float64))
            return self.op("Div", self.constant(window, np.float64), number)

        # The factor for a complete window is exactly 1.
        return self.op("Mul", gradient, self._like(self._once("mean", micro_batches, factor), gradient))

    def next(self, count: ir.Value) -> ir.Value:
        """Returns a count plus 1."""
        return self.op("Add", count, self.constant(1))

    def number(self, value: float, like: ir.Value) -> ir.Value:
        """Returns a constant of another value's type."""
        assert like.dtype is not None
        return self.constant(value, like.dtype.numpy())

    def power(self, base: float, exponent: ir.Value, like: ir.Value) -> ir.Value:
        """Returns 1 - base ** exponent, in float64 because float32 would lose digits for the first counts."""

        def lacking() -> ir.Value:
            wide = self._cast(exponent, ir.DataType.DOUBLE)
            power = self.op("Pow", self.constant(base, np.float64), wide)
            return self.op("Sub", self.constant(1.0, np.float64), power)

        return self._like(self._once(base, exponent, lacking), like)

    def _clipping(self, norm: ir.Value, limit: float) -> ir.Value:
        """Returns the factor that limits the gradients' norm."""

        def factor() -> ir.Value:
            excess = self.op("Div", norm, self.constant(limit, np.float32))
            excess = self.op("Max", excess, self.constant(1.0, np.float32))
            return self.op("Div", self.constant(1.0, np.float32), excess)

        return self._once(limit, norm, factor)

    def _rate(self, rates: ir.Value, group: int) -> ir.Value:
        return self._once(group, rates, lambda: self.op("Gather", rates, self.constant(group)))

    def _once(self, what: Any, of: ir.Value, write: Any) -> ir.Value:
        """Returns a scalar that many parameters use, and writes it only once."""
        if (what, of) not in self._scalars:
            self._scalars[what, of] = write()
        return self._scalars[what, of]

    def _cast(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        return value if value.dtype == dtype else self.op("Cast", value, to=dtype)

    def _like(self, value: ir.Value, other: ir.Value) -> ir.Value:
        wanted = other.dtype
        return value if value.dtype == wanted else self._once(wanted, value, lambda: self._cast(value, wanted))
