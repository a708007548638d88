"""Writes weight updates as ONNX nodes, also into a training graph: one ONNX model for a complete training step.

The trainer itself updates with PyTorch's fused kernels, which are faster than nodes. The nodes do the same arithmetic,
for inspection and for other runtimes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from ..core.optimizer_keys import STEP, UPDATE_COUNT
from ..step import Step
from ..step.arithmetic import one_minus_power
from ..step.emitter import Emitter
from ..step.names import Names
from .rule import ParameterNodes, Rule


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

        kind = ir.DataType.DOUBLE if gradient.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT

        def factor() -> ir.Value:
            number = self._cast(self.op("Squeeze", micro_batches), kind)
            number = self.op("Max", number, self.constant(1.0, kind.numpy()))
            return self.op("Div", self.constant(window, kind.numpy()), number)

        # The factor for a complete window is exactly 1.
        return self.op("Mul", gradient, self._like(self._once(("mean", kind), micro_batches, factor), gradient))

    def next(self, count: ir.Value) -> ir.Value:
        """Returns a count plus 1."""
        return self.op("Add", count, self.constant(1))

    def number(self, value: float, like: ir.Value) -> ir.Value:
        """Returns a constant of another value's type."""
        assert like.dtype is not None
        return self.constant(value, like.dtype.numpy())

    def power(self, base: float, exponent: ir.Value, like: ir.Value) -> ir.Value:
        """Returns 1 - base ** exponent."""
        wide = like.dtype == ir.DataType.DOUBLE
        power = self._once((base, wide), exponent, lambda: one_minus_power(self, base, exponent, wide))
        return self._like(power, like)

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


# Names from the legacy trainer.
LEARNING_RATE = "__learning_rate"
ALL_FINITE = "__all_finite"
DIVISOR = "__gradient_divisor"


def with_optimizer(
    graph: Step,
    updates: Mapping[str, ParameterUpdate],
    *,
    rates: int = 1,
    accumulate: bool = False,
    check_finite: bool = False,
) -> ir.Model:
    """Returns a copy of a training graph that also updates the weights.

    Its additional inputs are ``__learning_rate`` of shape [rates], and for a parameter ``p`` its state tensors, such as
    ``p.Moment_1``, and ``p.Update_Count``, or one ``Step`` for all (LAMB). Both counts are int64 of shape [1]: updates
    done plus 1, as in the state dict. Its outputs are the described outputs, the new buffers, and ``p.updated``,
    ``p.Moment_1.updated`` and so on instead of the gradients.

    Args:
        graph: A training graph; it is not changed.
        updates: Parameter name -> its update, for all parameters with a gradient.
        rates: Number of learning rates.
        accumulate: Whether the step ends an accumulation window. Then ``p.grad.accumulated``, the sum of the earlier
            gradients, and ``__gradient_divisor``, the divisor of the new sum, are inputs. Otherwise gradients are
            divided by the loss scale.
        check_finite: Whether to output ``__all_finite``, and to output old values if it is false.
    """
    return _Writer(graph, updates, rates, accumulate, check_finite).write()


class _Writer(UpdateWriter):
    """Appends nodes to a copy of a graph."""

    def __init__(
        self,
        source: Step,
        updates: Mapping[str, ParameterUpdate],
        rates: int,
        accumulate: bool,
        check_finite: bool,
    ) -> None:
        model = source.model.clone()
        super().__init__(model.opset_imports, Names(ir.convenience.create_value_mapping(model.graph)))
        self._source = source
        self._updates = updates
        self._rates = rates
        self._accumulate = accumulate
        self._check_finite = check_finite
        self._model, self._graph = model, model.graph
        self._inputs = {value.name: value for value in self._graph.inputs}
        self._outputs = {value.name: value for value in self._graph.outputs}

    def write(self) -> ir.Model:
        """Writes the updates of all parameters, and returns the model."""
        gradients = self._gradients()
        norm = self.norm(gradients.values())
        finite = None
        if self._check_finite:
            finite = self.op("Not", self.op("Or", self.op("IsNaN", norm), self.op("IsInf", norm)))
        rates = self._input(LEARNING_RATE, ir.DataType.FLOAT, [self._rates])
        results: dict[str, ir.Value] = {}
        step = None
        if any(update.rule.shares_count for update in self._updates.values()):
            step = self._input(STEP, ir.DataType.INT64, [1])
        for name, gradient in gradients.items():
            update = self._updates[name]
            weight = self._inputs[self._source.state[name]]
            slots = {slot: self._input(f"{name}.{slot}", weight.dtype, weight.shape) for slot in update.slots}
            count = step if update.rule.shares_count else None
            if update.counts and count is None:
                count = self._input(f"{name}.{UPDATE_COUNT}", ir.DataType.INT64, [1])
            new, kept = self.update(update, weight, gradient, slots, count, rates, norm)
            changed = {f"{name}.{slot}": (slots[slot], value) for slot, value in kept.items()}
            if count is not None and count is not step:
                changed[f"{name}.{UPDATE_COUNT}"] = (count, self.next(count))
            changed[name] = (weight, new)
            for key, (old, value) in changed.items():
                results[f"{key}.updated"] = self._chosen(finite, old, value)
        if step is not None:
            results[f"{STEP}.updated"] = self._chosen(finite, step, self.next(step))
        if finite is not None:
            finite.shape = ir.Shape([])
            results[ALL_FINITE] = finite
        return self._finish(results)

    def _finish(self, results: Mapping[str, ir.Value]) -> ir.Model:
        """Returns the model with the new nodes, and with results in place of the gradients among its outputs."""
        gradients = set(self._source.gradients.values())
        kept = [value for value in self._graph.outputs if value.name not in gradients]
        self._graph.outputs.clear()
        self._graph.outputs.extend(kept)
        for name, value in results.items():
            named = self.op("Identity", value)
            named.name, named.type, named.shape = self._names.unique(name), _type(value), value.shape
            self._graph.outputs.append(named)
        self._graph.extend(self.nodes)
        common_passes.RemoveUnusedNodesPass()(self._model)
        return self._model

    def _gradients(self) -> dict[str, ir.Value]:
        """Returns the gradients, accumulated and divided."""
        if self._accumulate:
            divisor = self._input(DIVISOR, ir.DataType.FLOAT, [])
        else:
            assert self._source.loss_scale is not None
            scale = self._inputs[self._source.loss_scale.name]
            divisor = self.op("Squeeze", scale) if self._source.loss_scale.shape else scale
        gradients = {}
        for name, output in self._source.gradients.items():
            gradient = self._outputs[output]
            weight = self._inputs.get(self._source.state.get(name, ""))
            if weight is None:
                continue  # its gradient does not depend on it, so the graph has no input for it
            gradient.type = _type(weight)
            if self._accumulate:
                earlier = self._input(f"{name}.grad.accumulated", weight.dtype, weight.shape)
                gradient = self.op("Add", gradient, earlier)
            gradients[name] = self.op("Div", gradient, self._like(divisor, weight))
        return gradients

    def _chosen(self, finite: ir.Value | None, old: ir.Value, new: ir.Value) -> ir.Value:
        chosen = new if finite is None else self.op("Where", finite, new, old)
        chosen.type, chosen.shape = _type(old), old.shape
        return chosen

    def _input(self, name: str, dtype: ir.DataType | None, shape: Any) -> ir.Value:
        assert dtype is not None
        value = ir.Value(name=self._names.unique(name), type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._graph.inputs.append(value)
        return value


def _type(value: ir.Value) -> ir.TensorType:
    """Returns a copy of a value's type; changing a shared type object would change both values."""
    assert value.dtype is not None
    return ir.TensorType(value.dtype)
