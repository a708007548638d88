"""Adds the optimizer's update to a training graph: one ONNX model that does what a whole training step does.

The trainer itself updates with PyTorch's fused kernels, which are faster than nodes; this is the same arithmetic as a
model that can be looked at, and run elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import onnx_ir.tape

from .names import Names
from .training_graph import TrainingGraph

__all__ = ["ALL_FINITE", "DIVISOR", "LEARNING_RATE", "STEP", "ParameterUpdate", "with_optimizer"]

# The names that the legacy trainer gave these.
LEARNING_RATE = "__learning_rate"
ALL_FINITE = "__all_finite"
STEP = "Step"
DIVISOR = "__gradient_divisor"


@dataclass(frozen=True)
class ParameterUpdate:
    """How one parameter is updated.

    Attributes:
        rule: ``SGDOptimizer``, ``AdamOptimizer`` or ``LambOptimizer``.
        group: Index of its learning rate.
        hyper: The hyper-parameters of its group, as the optimizer config has them.
        limit: What the global gradient norm is clipped to; infinite for not at all.
    """

    rule: str
    group: int
    hyper: Mapping[str, Any]
    limit: float


def with_optimizer(
    graph: TrainingGraph,
    updates: Mapping[str, ParameterUpdate],
    *,
    rates: int = 1,
    accumulate: bool = False,
    check_finite: bool = False,
) -> ir.Model:
    """Returns a copy of a training graph that also updates the weights.

    Beside the inputs of the graph it has, for a parameter ``p``: ``p.Moment_1`` and ``p.Moment_2`` (Adam, LAMB),
    ``p.Update_Count`` (Adam) or one ``Step`` (LAMB), both int64 of shape [1], updates done plus 1 as in the state dict;
    ``__learning_rate`` of shape [rates]. Its outputs are the described ones, the new buffers, and ``p.updated``,
    ``p.Moment_1.updated`` and so on instead of the gradients.

    Args:
        graph: A training graph; it is not changed.
        updates: Parameter name -> its update, for all parameters with a gradient.
        rates: Number of learning rates.
        accumulate: Whether the step ends a window: then ``p.grad.accumulated`` is an input, the sum of the gradients
            before, and ``__gradient_divisor``, what the sum is divided by. Without, that is the loss scale.
        check_finite: Whether to output ``__all_finite``, and old values where it is false.
    """
    return _Writer(graph, updates, rates, accumulate, check_finite).write()


class _Writer:
    """Appends nodes to a copy of a graph."""

    def __init__(
        self,
        source: TrainingGraph,
        updates: Mapping[str, ParameterUpdate],
        rates: int,
        accumulate: bool,
        check_finite: bool,
    ) -> None:
        self._source = source
        self._updates = updates
        self._rates = rates
        self._accumulate = accumulate
        self._check_finite = check_finite
        self._model = source.model.clone()
        self._graph = self._model.graph
        self._inputs = {value.name: value for value in self._graph.inputs}
        self._outputs = {value.name: value for value in self._graph.outputs}
        self._tape = onnx_ir.tape.Tape()
        self._number = 0
        self._constants: dict[tuple[Any, ir.DataType], ir.Value] = {}
        self._corrections: dict[tuple[int, float], ir.Value] = {}
        values = [value for node in self._graph.all_nodes() for value in node.outputs]
        taken = (*values, *self._graph.inputs, *self._graph.initializers.values())
        self._names = Names([value.name or "" for value in taken])

    def write(self) -> ir.Model:
        gradients = self._gradients()
        norm = self._norm(gradients.values())
        finite = None
        if self._check_finite:
            finite = self._op("Not", self._op("Or", self._op("IsNaN", norm), self._op("IsInf", norm)))
        rates = self._input(LEARNING_RATE, ir.DataType.FLOAT, [self._rates])
        results: dict[str, ir.Value] = {}
        step = None
        if any(update.rule == "LambOptimizer" for update in self._updates.values()):
            step = self._input(STEP, ir.DataType.INT64, [1])
        for name, gradient in gradients.items():
            update = self._updates[name]
            weight = self._inputs[self._source.state[name]]
            rate = self._op("Gather", rates, self._constant(update.group, ir.DataType.INT64))
            rate = self._like(rate, weight)
            if math.isfinite(update.limit):
                excess = self._op("Div", norm, self._constant(update.limit, ir.DataType.FLOAT))
                excess = self._op("Max", excess, self._constant(1.0, ir.DataType.FLOAT))
                gradient = self._op("Div", gradient, self._like(excess, weight))
            changed: dict[str, tuple[ir.Value, ir.Value]] = {}
            if update.rule == "SGDOptimizer":
                new = self._op("Sub", weight, self._op("Mul", rate, gradient))
            else:
                count = step if step is not None else self._input(f"{name}.Update_Count", ir.DataType.INT64, [1])
                first, second = (self._input(f"{name}.{m}", weight.dtype, weight.shape) for m in _MOMENTS)
                new_first = self._average(first, gradient, update.hyper["alpha"])
                new_second = self._average(second, self._op("Mul", gradient, gradient), update.hyper["beta"])
                changed |= {f"{name}.Moment_1": (first, new_first), f"{name}.Moment_2": (second, new_second)}
                if step is None:
                    changed[f"{name}.Update_Count"] = (count, self._next(count))
                apply = self._adam if update.rule == "AdamOptimizer" else self._lamb
                new = apply(weight, new_first, new_second, count, rate, update.hyper)
            changed[name] = (weight, new)
            for key, (old, value) in changed.items():
                results[f"{key}.updated"] = self._chosen(finite, old, value)
        if step is not None:
            results[f"{STEP}.updated"] = self._chosen(finite, step, self._next(step))
        if finite is not None:
            finite.shape = ir.Shape([])
            results[ALL_FINITE] = finite
        return self._finish(results)

    def _finish(self, results: Mapping[str, ir.Value]) -> ir.Model:
        self._graph.extend(self._tape.nodes)
        gradients = set(self._source.gradients.values())
        kept = [value for value in self._graph.outputs if value.name not in gradients]
        self._graph.outputs.clear()
        self._graph.outputs.extend(kept)
        for name, value in results.items():
            named = self._tape.op("Identity", [value])
            named.name = self._names.unique(name)
            named.type, named.shape = _type(value), value.shape
            node = named.producer()
            assert node is not None
            self._graph.append(node)
            self._graph.outputs.append(named)
        common_passes.RemoveUnusedNodesPass()(self._model)
        return self._model

    def _gradients(self) -> dict[str, ir.Value]:
        """Returns the gradients, accumulated and divided."""
        if self._accumulate:
            divisor = self._input(DIVISOR, ir.DataType.FLOAT, [])
        else:
            assert self._source.loss_scale is not None
            scale = self._inputs[self._source.loss_scale.name]
            divisor = self._op("Squeeze", scale) if self._source.loss_scale.shape else scale
        found = {}
        for name, output in self._source.gradients.items():
            gradient = self._outputs[output]
            weight = self._inputs.get(self._source.state.get(name, ""))
            if weight is None:
                continue  # its gradient does not depend on it, and nothing else does: it has no place to come in
            gradient.type = _type(weight)
            if self._accumulate:
                earlier = self._input(f"{name}.grad.accumulated", weight.dtype, weight.shape)
                gradient = self._op("Add", gradient, earlier)
            found[name] = self._op("Div", gradient, self._like(divisor, weight))
        return found

    def _norm(self, gradients: Iterable[ir.Value]) -> ir.Value:
        squares = [self._op("ReduceSumSquare", gradient, keepdims=0) for gradient in gradients]
        squares = [self._cast(square, ir.DataType.FLOAT) for square in squares]
        return self._op("Sqrt", self._op("Sum", *squares))

    def _average(self, moment: ir.Value, value: ir.Value, decay: float) -> ir.Value:
        kept = self._op("Mul", moment, self._number_like(decay, moment))
        return self._op("Add", kept, self._op("Mul", value, self._number_like(1.0 - decay, moment)))

    def _correction(self, count: ir.Value, decay: float, like: ir.Value) -> ir.Value:
        """Returns 1 - decay^count; in float64, as fp32 would lose its digits for the first counts."""
        key = (id(count), decay)
        if key not in self._corrections:
            exponent = self._cast(self._op("Squeeze", count), ir.DataType.DOUBLE)
            power = self._op("Pow", self._constant(decay, ir.DataType.DOUBLE), exponent)
            self._corrections[key] = self._op("Sub", self._constant(1.0, ir.DataType.DOUBLE), power)
        return self._like(self._corrections[key], like)

    def _corrected(
        self, first: ir.Value, second: ir.Value, count: ir.Value, hyper: Mapping[str, Any]
    ) -> tuple[ir.Value, ir.Value]:
        if not hyper["do_bias_correction"]:
            return first, second
        return (
            self._op("Div", first, self._correction(count, hyper["alpha"], first)),
            self._op("Div", second, self._correction(count, hyper["beta"], second)),
        )

    def _adam(
        self,
        weight: ir.Value,
        first: ir.Value,
        second: ir.Value,
        count: ir.Value,
        rate: ir.Value,
        hyper: Mapping[str, Any],
    ) -> ir.Value:
        decay = self._op("Mul", rate, self._number_like(hyper["lambda_coef"], weight))
        epsilon = self._number_like(hyper["epsilon"], weight)
        if hyper["weight_decay_mode"] == 0:
            first, second = self._corrected(first, second, count, hyper)
            step = self._op("Div", first, self._op("Add", self._op("Sqrt", second), epsilon))
            moved = self._op("Sub", weight, self._op("Mul", rate, step))
            return self._op("Sub", moved, self._op("Mul", decay, weight))
        step = self._op("Div", first, self._op("Add", self._op("Sqrt", second), epsilon))
        if hyper["do_bias_correction"]:
            numerator = self._op("Sqrt", self._correction(count, hyper["beta"], weight))
            rate = self._op("Mul", rate, self._op("Div", numerator, self._correction(count, hyper["alpha"], weight)))
        moved = self._op("Sub", weight, self._op("Mul", rate, step))
        return self._op("Sub", moved, self._op("Mul", decay, moved))

    def _lamb(
        self,
        weight: ir.Value,
        first: ir.Value,
        second: ir.Value,
        count: ir.Value,
        rate: ir.Value,
        hyper: Mapping[str, Any],
    ) -> ir.Value:
        first, second = self._corrected(first, second, count, hyper)
        denominator = self._op("Add", self._op("Sqrt", second), self._number_like(hyper["epsilon"], weight))
        direction = self._op("Div", first, denominator)
        decay = self._op("Mul", weight, self._number_like(hyper["lambda_coef"], weight))
        direction = self._op("Add", direction, decay)
        norms = [self._op("Sqrt", self._op("ReduceSumSquare", v, keepdims=0)) for v in (weight, direction)]
        ratio = self._op("Div", *norms)
        zero = self._number_like(0.0, weight)
        usable = self._op("And", *(self._op("Greater", norm, zero) for norm in norms))
        for bound, op_type in ((hyper["ratio_min"], "Max"), (hyper["ratio_max"], "Min")):
            if math.isfinite(bound):
                ratio = self._op(op_type, ratio, self._number_like(bound, weight))
        ratio = self._op("Where", usable, ratio, self._number_like(1.0, weight))
        return self._op("Sub", weight, self._op("Mul", self._op("Mul", rate, ratio), direction))

    def _next(self, count: ir.Value) -> ir.Value:
        return self._op("Add", count, self._constant(1, ir.DataType.INT64))

    def _chosen(self, finite: ir.Value | None, old: ir.Value, new: ir.Value) -> ir.Value:
        chosen = new if finite is None else self._op("Where", finite, new, old)
        chosen.type, chosen.shape = _type(old), old.shape
        return chosen

    def _op(self, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        result = self._tape.op(op_type, inputs, attributes)
        result.name = self._names.unique(f"optimizer_{self._number}")
        self._number += 1
        logical = op_type in ("And", "Greater", "IsInf", "IsNaN", "Not", "Or")
        like = inputs[1 if op_type == "Where" else 0]
        result.type = ir.TensorType(ir.DataType.BOOL) if logical else _type(like)
        return result

    def _cast(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        if value.dtype == dtype:
            return value
        assert dtype is not None
        result = self._op("Cast", value, to=int(dtype))
        result.type = ir.TensorType(dtype)
        return result

    def _like(self, value: ir.Value, other: ir.Value) -> ir.Value:
        return self._cast(value, other.dtype)

    def _number_like(self, number: float, other: ir.Value) -> ir.Value:
        assert other.dtype is not None
        return self._constant(number, other.dtype)

    def _constant(self, number: float, dtype: ir.DataType) -> ir.Value:
        key = (number, dtype)
        if key not in self._constants:
            name = self._names.unique(f"optimizer_constant_{len(self._constants)}")
            tensor = ir.tensor(np.array(number, dtype=dtype.numpy()), name=name)
            value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([]), const_value=tensor)
            self._graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def _input(self, name: str, dtype: ir.DataType | None, shape: Any) -> ir.Value:
        assert dtype is not None
        value = ir.Value(name=self._names.unique(name), type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._graph.inputs.append(value)
        return value


def _type(value: ir.Value) -> ir.TensorType:
    """Returns a type of its own: a type object that two values share would be changed for both."""
    assert value.dtype is not None
    return ir.TensorType(value.dtype)


_MOMENTS = ("Moment_1", "Moment_2")
