"""Runs the training or evaluation model of an export on the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..core.dims import evaluate, holds, symbols_of
from ..core.errors import shown
from ..core.indices import IndexRange, check_indices
from ..core.interrupts import uninterrupted
from ..engine.ort import CPU, OrtValue, RunOptions
from ..state.state import Array
from ..step.contract import RandomInput, Step, TensorSpec
from .live_state import LiveState
from .load import Loaded, check_run_options

__all__ = ["Input", "StepRunner"]

Input: TypeAlias = np.ndarray[Any, Any] | OrtValue
"""The type of a step's inputs and outputs."""
# Number of batch shapes whose plans are cached.
_PLANS = 1000
_SIDES = tuple[bool, int, int]
_ELEMENT_TYPES = {"float": "float32", "double": "float64"}


class _Output(NamedTuple):
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None


class _Plan(NamedTuple):
    """A plan for runs with inputs of certain shapes.

    Attributes:
        outputs: The outputs with their shapes; a shape is None if only ONNX Runtime can determine it.
        random: The random inputs with their shapes.
        indices: The valid ranges of inputs used as indices, with their sizes.
        sizes: The sizes of the named dimensions.
    """

    outputs: tuple[_Output, ...]
    random: tuple[tuple[RandomInput, tuple[int, ...]], ...]
    indices: tuple[tuple[IndexRange, int], ...]
    sizes: Mapping[str, int]


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
        self._training = model.kind == "training"
        self._dtypes = [np.dtype(spec.dtype) for spec in model.inputs]
        self._plans: dict[tuple[tuple[int, ...], ...], _Plan] = {}
        self._bindings: dict[_SIDES, Any] = {}
        self._reset = {flag: np.array([flag]) for flag in (False, True)}

    def run(self, given: Sequence[Input], options: RunOptions | None = None) -> list[Any]:
        """Runs a step.

        Args:
            given: The inputs in order.
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
        values = self._checked(given)
        with self._state.lock:
            return self._run(values, options)

    def _run(self, values: Sequence[Input], options: RunOptions | None) -> list[Any]:
        state = self._state
        shapes = tuple([_shape(value) for value in values])
        plan = self._plans.get(shapes) or self._plan(shapes)
        given = dict(zip(self.inputs, values, strict=True))
        if plan.indices:
            check_indices(plan.indices, lambda name: _array(given[name]), lambda: plan.sizes)
        binding = self._binding()
        for name, value in given.items():
            if isinstance(value, np.ndarray):
                binding.bind_cpu_input(name, value)
            else:
                binding.bind_ortvalue_input(name, value)
        as_arrays = not values or any(isinstance(value, np.ndarray) for value in values)
        results = [self._bind_output(binding, output, as_arrays) for output in plan.outputs]
        with uninterrupted():
            try:
                if plan.random:
                    for (spec, _), array in zip(plan.random, state.random.draw(plan.random), strict=True):
                        binding.bind_cpu_input(spec.name, array)
                self._session.run_with_iobinding(binding, options)
            except BaseException:
                if plan.random:
                    state.random.undo()
                raise
            if self._training:
                state.advance()
        if any(result is None for result in results):
            self._collect(binding, results, as_arrays)
        return results

    def _checked(self, given: Sequence[Input]) -> list[Input]:
        """Returns the inputs as contiguous tensors, after checking their types."""
        if len(given) != len(self.inputs):
            raise TypeError(
                f"{len(given)} inputs were given, but {self.name} takes {len(self.inputs)}: {self._listed()}"
            )
        values: list[Input] = []
        for name, dtype, value in zip(self.inputs, self._dtypes, given, strict=True):
            if isinstance(value, (np.ndarray, np.generic)):
                array = np.asarray(value, order="C")
                if array.dtype != dtype:
                    raise TypeError(_wrong_dtype(name, array.dtype, dtype))
                values.append(array)
            elif isinstance(value, OrtValue):
                found = value.data_type().removeprefix("tensor(").removesuffix(")")
                if _ELEMENT_TYPES.get(found, found) != dtype.name:
                    raise TypeError(_wrong_dtype(name, found, dtype))
                values.append(value)
            else:
                raise TypeError(f"input {name!r} must be a numpy array or an OrtValue, but {shown(value)} was given")
        return values

    def _listed(self) -> str:
        return ", ".join(f"{spec.name} ({spec.dtype} {list(spec.shape or ())})" for spec in self.model.inputs)

    def _plan(self, shapes: tuple[tuple[int, ...], ...]) -> _Plan:
        """Checks new shapes and caches a plan for them."""
        sizes = self._sizes(shapes)
        plan = _Plan(
            tuple(
                _Output(spec.name, np.dtype(spec.dtype), _evaluated(spec.shape, sizes)) for spec in self.model.outputs
            ),
            tuple((spec, _evaluated(spec.shape, sizes) or ()) for spec in self.model.random),
            tuple((entry, evaluate(entry.size, sizes)) for entry in self.model.index_ranges),
            sizes,
        )
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        self._plans[shapes] = plan
        return plan

    def _sizes(self, shapes: tuple[tuple[int, ...], ...]) -> dict[str, int]:
        """Returns the sizes of the named dimensions.

        Raises:
            ValueError: If the model can't take inputs of these shapes.
        """
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
                    f"{self.name} is valid only if {guard}, but the inputs have {_said(sizes)}: export again with a "
                    "batch of these sizes"
                )
        return sizes

    def _binding(self) -> Any:
        """Returns the binding of the state that the next step reads and writes."""
        state = self._state
        sides = (
            (state.reset, state.gradient_side, state.buffer_side) if self._training else (True, 0, state.buffer_side)
        )
        known = self._bindings.get(sides)
        if known is not None:
            return known
        binding = self._session.io_binding()
        for name, graph_input in self.model.state.items():
            binding.bind_ortvalue_input(graph_input, state.values[name].value)
        if self._training:
            for name, graph_input in self.model.sums.items():
                binding.bind_ortvalue_input(graph_input, state.gradients[name].value)
            if self.model.gradients:
                binding.bind_cpu_input(self.model.reset, self._reset[state.reset])
            for output, tensor in state.targets(self.model).items():
                binding.bind_ortvalue_output(output, tensor.value)
        self._bindings[sides] = binding
        return binding

    def _bind_output(self, binding: Any, output: _Output, as_array: bool) -> Array | None:
        """Binds new memory for an output and returns it, or None where ONNX Runtime allocates it."""
        if output.shape is not None and as_array:
            array = np.empty(output.shape, output.dtype)
            address = array.__array_interface__["data"][0]
            binding.bind_output(output.name, "cpu", 0, output.dtype.type, output.shape, address)
            return array
        # An OrtValue must own its memory: views of one over an array could outlive the array.
        device = CPU if as_array else self._state.device
        binding.bind_output(output.name, device.type, device.number)
        return None

    def _collect(self, binding: Any, results: list[Any], as_arrays: bool) -> None:
        """Replaces each None in the results with the output that ONNX Runtime has allocated."""
        found = binding.get_outputs_as_ortvaluevector()
        # Outputs come in the order in which they were first bound, the user's last.
        first = len(found) - len(results)
        for index, result in enumerate(results):
            if result is None:
                value = found[first + index]
                results[index] = value.numpy() if as_arrays else OrtValue(value)


def _shape(value: Input) -> tuple[int, ...]:
    return value.shape if isinstance(value, np.ndarray) else tuple(value.shape())


def _array(value: Input) -> Array:
    return value if isinstance(value, np.ndarray) else np.asarray(value.numpy())


def _evaluated(shape: Sequence[int | str] | None, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    return None if shape is None else tuple(evaluate(size, sizes) for size in shape)


def _wrong_dtype(name: str, found: object, expected: np.dtype[Any]) -> str:
    return f"input {name!r} has dtype {found}, but the model takes {expected}: use .astype(numpy.{expected})"


def _check_shape(spec: TensorSpec, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
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


def _said(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())
