"""Writes the optimizer model of an export, which computes new weights from old ones, gradients and learning rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch

from ..core.optimizer_keys import STEP, UPDATE_COUNT
from ..optim.update_writer import ParameterUpdate, UpdateWriter
from ..state.state import Array
from ..step.contract import IR_VERSION, OptimizerModel, Slot
from ..step.names import Names

_OPSETS = {"": 18}
_RATES = "learning_rate"
_MICRO_BATCHES = "micro_batches"


@dataclass(frozen=True)
class Updated:
    """A parameter and its update.

    Attributes:
        update: How it is updated.
        weight: Its value.
        slots: The optimizer's state tensors for it, by slot.
        count: Number of updates done; None if the optimizer keeps no count.
    """

    update: ParameterUpdate
    weight: torch.Tensor
    slots: Mapping[str, Array]
    count: int | None


def optimizer_model(
    name: str, parameters: Mapping[str, Updated], rates: int, window: int = 1, norm_epsilon: float = 0.0
) -> tuple[ir.Model, OptimizerModel, dict[str, Array]]:
    """Returns a model that updates all parameters, and its description.

    If all counts are equal, the parameters share one, so values derived from it are computed only once.

    Args:
        name: Name of the optimizer.
        parameters: The parameters with a gradient.
        rates: Number of learning rates.
        window: The number N by which the training model already divides each micro-batch's gradients. If it is more
            than 1, the model takes the number n of micro-batches as an input, and multiplies by N / n: the mean of an
            incomplete window.
        norm_epsilon: Added to the norm of the gradients before they are clipped by it.

    Returns:
        The model, its description, and the optimizer's current state, for the checkpoint.
    """
    return _Builder(parameters, rates, window, norm_epsilon).build(name)


class _Builder:
    """Collects the inputs, outputs and state of the optimizer model while the updates are written."""

    def __init__(self, parameters: Mapping[str, Updated], rates: int, window: int, norm_epsilon: float) -> None:
        self._parameters, self._rates, self._window = parameters, rates, window
        self._norm_epsilon = norm_epsilon
        self._names = Names([])
        self._writer = UpdateWriter(_OPSETS, self._names)
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._counts: dict[str, ir.Value] = {}
        self._one_count = len({updated.count for updated in parameters.values() if updated.count is not None}) <= 1
        self._state: dict[str, Slot] = {}
        self._kept: dict[str, Array] = {}

    def build(self, name: str) -> tuple[ir.Model, OptimizerModel, dict[str, Array]]:
        writer = self._writer
        rates = self._input(_RATES, ir.DataType.FLOAT, [self._rates])
        weights, gradients = {}, {}
        for parameter, updated in self._parameters.items():
            dtype = ir.tensor_adapters.from_torch_dtype(updated.weight.dtype)
            weights[parameter] = self._input(parameter, dtype, updated.weight.shape)
            gradients[parameter] = self._input(f"{parameter}_grad", dtype, updated.weight.shape)
        gradient_names = {parameter: str(value.name) for parameter, value in gradients.items()}
        number = self._input(_MICRO_BATCHES, ir.DataType.INT64, [1]) if self._window > 1 else None
        if number is not None:
            gradients = {name: writer.mean(value, number, self._window) for name, value in gradients.items()}
        clips = any(math.isfinite(updated.update.limit) for updated in self._parameters.values())
        norm = writer.norm(gradients.values()) if clips else None
        if norm is not None and self._norm_epsilon:
            norm = writer.op("Add", norm, writer.constant(self._norm_epsilon, np.float32))
        results = {}
        for parameter, updated in self._parameters.items():
            weight = weights[parameter]
            slots = {
                slot: self._input(f"{parameter}.{slot}", weight.dtype, updated.weight.shape) for slot in updated.slots
            }
            count = self._count(parameter, updated)
            new, new_slots = writer.update(updated.update, weight, gradients[parameter], slots, count, rates, norm)
            results[parameter] = self._output(new, weight)
            for slot, value in slots.items():
                self._keep(f"{parameter}.{slot}", updated.slots[slot], value, self._output(new_slots[slot], value))
        model = ir.Model(
            ir.Graph(self._inputs, self._outputs, nodes=writer.nodes, name="optimizer", opset_imports=_OPSETS),
            ir_version=IR_VERSION,
            producer_name="ort_trainer",
        )
        description = OptimizerModel(
            export="",
            name=name,
            weights={parameter: (str(weights[parameter].name), results[parameter]) for parameter in results},
            gradients=gradient_names,
            state=self._state,
            rates=self._rates,
            learning_rate=str(rates.name),
            micro_batches=None if number is None else str(number.name),
        )
        return model, description, self._kept

    def _count(self, parameter: str, updated: Updated) -> ir.Value | None:
        """Returns the number of the next update."""
        if updated.count is None:
            return None
        shared = STEP if updated.update.rule.shares_count else UPDATE_COUNT
        key = shared if self._one_count else f"{parameter}.{shared}"
        if key not in self._counts:
            count = self._input(key, ir.DataType.INT64, [1])
            following = self._writer.next(count)
            # Computed from the new count, because the runtime writes that into the old count's memory.
            coming = self._writer.op("Sub", following, self._writer.constant(1))
            self._counts[key] = coming
            done = np.array([updated.count + 1], np.int64)
            self._keep(key, done, count, self._output(following, count), initial=1.0)
        return self._counts[key]

    def _keep(self, key: str, kept: Array, value: ir.Value, output: str, initial: float = 0.0) -> None:
        assert value.dtype is not None and value.shape is not None
        shape = tuple(size for size in value.shape if isinstance(size, int))
        self._state[key] = Slot(str(value.name), output, value.dtype.numpy().name, shape, initial)
        self._kept[key] = kept

    def _input(self, name: str, dtype: ir.DataType | None, shape: object) -> ir.Value:
        assert dtype is not None
        value = ir.Value(name=self._names.unique(name), type=ir.TensorType(dtype), shape=ir.Shape(list(shape)))  # type: ignore[call-overload]
        self._inputs.append(value)
        return value

    def _output(self, value: ir.Value, like: ir.Value) -> str:
        """Makes the new value of an input an output, without a copy, and returns its name."""
        assert like.dtype is not None
        value.name = self._names.unique(f"{like.name}.updated")
        value.type, value.shape = ir.TensorType(like.dtype), like.shape
        self._outputs.append(value)
        return value.name
