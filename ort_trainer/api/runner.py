"""Runs the training or evaluation model of an export on the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from ..core.dims import holds, symbols_of
from ..core.indices import check_indices
from ..core.interrupts import uninterrupted
from ..engine.numpy_memory import NumPyMemory, OrtValueMemory
from ..engine.ort import OrtValue, RunOptions, element_type
from ..engine.runner import Binding, Plan, SessionRunner
from ..state.state import Array
from ..step import Step, TensorSpec
from .live_state import LiveState
from .load import Loaded, check_run_options

Input: TypeAlias = np.ndarray[Any, Any] | OrtValue
"""The type of a step's inputs and outputs."""
# The largest number of cached plans, one for each combination of input shapes.
_PLANS = 1000


class StepRunner:
    """A model, bound to the state.

    State and gradients stay at fixed addresses, so each set of tensors that a step reads and writes is bound only once.
    A step binds only its inputs, random numbers and outputs.

    Args:
        loaded: The model.
        state: The state that it reads and changes.
    """

    def __init__(self, loaded: Loaded[Step], state: LiveState) -> None:
        self.name = loaded.name
        self.data = loaded.data
        self.model = model = loaded.model
        self.inputs = tuple(spec.name for spec in model.inputs)
        self.outputs = tuple(spec.name for spec in model.outputs)
        self._session = loaded.session
        self._state = state
        self._dtypes = [np.dtype(spec.dtype) for spec in model.inputs]
        self._plans: dict[tuple[bool, tuple[tuple[int, ...], ...]], Plan] = {}
        # All plans share these bindings of the state, because each step binds its inputs, random numbers and outputs.
        self._bindings: dict[Any, Binding] = {}
        self._reset = {flag: np.array([flag]) for flag in (False, True)}

    def run(self, inputs: Sequence[Input], options: RunOptions | None = None) -> list[Any]:
        """Runs a step.

        Args:
            inputs: The inputs in order.
            options: ONNX Runtime's options for this run.

        Returns:
            The outputs in order: arrays if any input is an array, otherwise OrtValues.

        Raises:
            TypeError: If an input is not a tensor, or has the wrong dtype.
            ValueError: If an input has the wrong shape.
            IndexError: If an input contains an index out of range.
            RuntimeError: If the parameters have no values yet.
        """
        if self._state.missing:
            self._state.require_values()
        check_run_options(options)
        values = self._checked(inputs)
        with self._state.lock:
            return self._run(values, options)

    def _run(self, values: Sequence[Input], options: RunOptions | None) -> list[Any]:
        state = self._state
        as_arrays = not values or any(isinstance(value, np.ndarray) for value in values)
        shapes = tuple([_shape(value) for value in values])
        plan = self._plans.get((as_arrays, shapes)) or self._plan(as_arrays, shapes)
        values_by_name = dict(zip(self.inputs, values, strict=True))
        if plan.indices:
            check_indices(plan.indices, lambda name: _array(values_by_name[name]), plan.sizes)
        training = self.model.training
        sides = (state.reset, state.gradient_side, state.buffer_side) if training else (True, 0, state.buffer_side)
        if sides not in self._bindings:
            self._bind(plan, sides)
        with uninterrupted():
            try:
                results, _ = plan.runner.run(
                    plan, values_by_name, destination_key=sides, generator=state.random, options=options
                )
            except BaseException:
                if plan.random:  # a failed step leaves the generator as it was
                    state.random.undo()
                raise
            if training:
                state.advance()
        return list(results.values())

    def _checked(self, inputs: Sequence[Input]) -> list[Input]:
        """Returns the inputs as contiguous tensors, after checking their types."""
        if len(inputs) != len(self.inputs):
            raise TypeError(
                f"{len(inputs)} inputs were given, but {self.name} takes {len(self.inputs)}: {self._listed()}"
            )
        values: list[Input] = []
        for name, dtype, value in zip(self.inputs, self._dtypes, inputs, strict=True):
            if isinstance(value, (np.ndarray, np.generic)):
                if isinstance(value, np.ma.MaskedArray):
                    raise TypeError(f"input {name!r} is a masked array, whose mask would be lost: call filled()")
                array = np.asarray(value, order="C")
                if array.dtype != dtype:
                    raise TypeError(_wrong_dtype(name, array.dtype, dtype))
                values.append(array)
            elif isinstance(value, OrtValue):
                element = element_type(value.data_type())
                if element != dtype.name:
                    raise TypeError(_wrong_dtype(name, element, dtype))
                values.append(value)
            else:
                kind = type(value).__name__
                raise TypeError(
                    f"input {name!r} must be a numpy array or an OrtValue, but a {kind} was given: "
                    + ("pass tensor.numpy()" if kind == "Tensor" else f"pass np.array(..., dtype=np.{dtype})")
                )
        return values

    def _listed(self) -> str:
        return ", ".join(f"{spec.name} ({spec.dtype} {list(spec.shape or ())})" for spec in self.model.inputs)

    def _plan(self, as_arrays: bool, shapes: tuple[tuple[int, ...], ...]) -> Plan:
        """Checks new shapes and caches a plan for them."""
        self._check_shapes(shapes)
        memory = NumPyMemory() if as_arrays else OrtValueMemory(self._state.device)
        runner = SessionRunner(self.model, {}, memory, session=self._session)
        plan = replace(runner.plan(dict(zip(self.inputs, shapes, strict=True)), self.outputs), bindings=self._bindings)
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        self._plans[as_arrays, shapes] = plan
        return plan

    def _check_shapes(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        """Raises a ValueError if the model can't take inputs of these shapes."""
        sizes: dict[str, int] = {}
        for spec, shape in zip(self.model.inputs, shapes, strict=True):
            _check_shape(spec, shape, sizes)
        for dimension, size in self.model.fixed.items():
            if sizes.get(dimension, size) != size:
                raise ValueError(
                    f"dimension {dimension!r} is {sizes[dimension]}, but {self.name} has it fixed at {size}: use "
                    f"batches of that size, or export again with a batch of another {dimension!r}"
                )
        for guard in self.model.guards:
            if symbols_of(guard) <= sizes.keys() and not holds(guard, sizes):
                raise ValueError(
                    f"{self.name} is valid only if {guard}, but the inputs have {_size_list(sizes)}: export again with "
                    "a batch of these sizes"
                )

    def _bind(self, plan: Plan, sides: Any) -> None:
        """Binds the state that a step reads and writes."""
        state, model = self._state, self.model
        inputs: dict[str, Input] = {name: state.values[key].value for key, name in model.state.items()}
        outputs = {}
        if model.training:
            inputs |= {name: state.gradients[key].value for key, name in model.sums.items()}
            if model.gradients:
                inputs[model.reset] = self._reset[state.reset]
            outputs = {name: tensor.value for name, tensor in state.targets(model).items()}
        assert isinstance(plan.runner, SessionRunner)
        plan.runner.bind(plan, sides, inputs, outputs)


def _shape(value: Input) -> tuple[int, ...]:
    return value.shape if isinstance(value, np.ndarray) else tuple(value.shape())


def _array(value: Input) -> Array:
    return value if isinstance(value, np.ndarray) else np.asarray(value.numpy())


def _wrong_dtype(name: str, actual: object, expected: np.dtype[Any]) -> str:
    return f"input {name!r} has dtype {actual}, but the model takes {expected}: use .astype(numpy.{expected})"


def _check_shape(spec: TensorSpec, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    """Checks the shape of an input, and records the sizes of its named dimensions in ``sizes``."""
    described = list(spec.shape or ())
    if len(shape) != len(described):
        raise ValueError(
            f"input {spec.name!r} has {len(shape)} dimensions, shape {list(shape)}, but the model takes "
            f"{len(described)}: {described}"
        )
    for axis, (size, expected) in enumerate(zip(shape, described, strict=True)):
        if size == 0:
            raise ValueError(f"input {spec.name!r} is empty: its shape is {list(shape)}. Skip empty batches")
        if isinstance(expected, int):
            if size != expected:
                raise ValueError(
                    f"input {spec.name!r} has size {size} in dimension {axis}, but the model takes {expected}: "
                    f"{described}. If it may change, give it a name in the model description, and export again"
                )
        elif sizes.setdefault(expected, size) != size:
            raise ValueError(
                f"input {spec.name!r} has shape {list(shape)}, which makes dimension {expected!r} {size}, but it is "
                f"{sizes[expected]} in another input: the model takes {described}"
            )


def _size_list(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())
