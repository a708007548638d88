"""The state of training from artifacts, at fixed addresses; the public classes of this package share it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.errors import CheckpointError, shown
from ..core.foreign import UPSTREAM
from ..core.schedules import learning_rate
from ..core.sealed import digest
from ..core.threads import turns
from ..engine.numpy_memory import StateTensor
from ..engine.ort import CPU, Device
from ..state.state import Array, State, Value
from ..state.training_api import as_stored
from ..step.contract import OptimizerModel, Slot, Step
from .random_numbers import RandomNumbers

# The property of an adapter's file with a digest of its base.
BASE = "ort_trainer.base"
# Limit of an optimizer's elements per element of a parameter; known optimizers keep two or three.
_LARGEST_STATE = 16


class LiveState:
    """The state of training.

    A training step writes the model's new buffers and the accumulated gradients into a second set of tensors, which
    replaces the first when the step has succeeded.

    Args:
        checkpoint: The checkpoint. The state takes its tensors, so it can't be used again.
        name: Name of the checkpoint in error messages.

    Attributes:
        export: Identifies the export; the same in all its artifacts.
        name: Name of the checkpoint in error messages.
        device: The device of the tensors, chosen by the first module.
        values: Parameter or buffer -> tensor.
        parameters: Names of the parameters, including the floating-point buffers.
        trainable: Names of the trained parameters.
        missing: Names of the parameters that have no values yet.
        gradients: Trained parameter -> the sum of its gradients; empty before there is a module.
        reset: Whether the next gradients overwrite these.
        micro_batches: Number of training steps accumulated in these gradients.
        gradient_side: Which of the two sets of gradients is current.
        buffer_side: Which of the two sets of the buffers that training changes is current.
        optimizer: The optimizer's tensors; None before there is an optimizer.
        optimization_step: Number of updates done.
        learning_rates: One for each parameter group, then one for all other parameters.
        schedule: The schedule of the learning rates; None if they are constant.
        random: The random number generator.
        properties: The user's own values.
        statistics: Names of parameters and buffers that training steps change; None before there is a module.
        lock: Held to read or change tensors. A run releases Python's global lock, so otherwise another thread could
            change the tensors bound to it.
    """

    def __init__(self, checkpoint: State, name: str) -> None:
        self.export = checkpoint.export
        self.name = name
        self.device: Device = CPU
        self.parameters = tuple(checkpoint.parameters)
        self.trainable = tuple(checkpoint.trainable)
        self.missing = set(self.parameters) if checkpoint.nominal else set()
        self._buffers = tuple(checkpoint.buffers)
        self.values = {**_taken(checkpoint.parameters), **_taken(checkpoint.buffers)}
        unknown = [name for name in (*self.trainable, *checkpoint.gradients) if name not in self.parameters]
        if unknown:
            raise CheckpointError(f"{name} is damaged: the parameters {unknown} are missing")
        self.gradients = _taken(checkpoint.gradients)
        self.reset = not self.gradients
        self.micro_batches = checkpoint.micro_batches
        self.gradient_side = self.buffer_side = 0
        self._other_gradients: dict[str, StateTensor] = {}
        self._other_buffers: dict[str, StateTensor] = {}
        self.optimizer: dict[str, StateTensor] | None = None
        self._saved_optimizer = checkpoint.optimizer
        self._slots: Mapping[str, Slot] = {}
        self.optimization_step = checkpoint.optimization_step or 0
        self.learning_rates = list(checkpoint.learning_rates)
        self.schedule = checkpoint.schedule
        self.random = RandomNumbers(checkpoint.random)
        self.properties: dict[str, Value] = dict(checkpoint.properties)
        self.statistics: set[str] | None = None
        # What only a trainer uses: it is written back to checkpoints unchanged.
        self._rest = State(
            transient=checkpoint.transient,
            idle=checkpoint.idle,
            window=checkpoint.window,
            trainer_options=checkpoint.trainer_options,
        )
        self._base = ""  # the digest of all that is frozen, once it has been needed
        self._in_use = False
        self.lock = turns()

    @property
    def is_upstream(self) -> bool:
        """Whether the checkpoint is one of onnxruntime-training."""
        return self.export == UPSTREAM

    @property
    def frozen(self) -> list[str]:
        """Names of the parameters and buffers that training doesn't change."""
        return sorted(self.values.keys() - {*self.trainable, *(self.statistics or ())})

    def complete(self, inputs: Sequence[Any]) -> None:
        """Completes an upstream checkpoint from the inputs of the training model.

        Upstream's checkpoints lack the order of parameters in a flat buffer, and the shapes of a nominal checkpoint.
        """
        if not self.is_upstream:
            return
        places = {value.name: place for place, value in enumerate(inputs)}
        self.parameters, self.trainable = (
            tuple(sorted(names, key=lambda name: places.get(name, len(places))))
            for names in (self.parameters, self.trainable)
        )
        for value in inputs:
            is_fixed = all(isinstance(size, int) for size in value.shape)
            if is_fixed and value.name in self.missing and self.values[value.name].shape != tuple(value.shape):
                dtype = self.values[value.name].dtype
                self.values[value.name] = StateTensor(np.zeros(value.shape, dtype), self.device)

    def use(self, device: Device) -> None:
        """Moves the state to the device of a module.

        Raises:
            ValueError: If another module uses it on a different device.
        """
        if device == self.device:
            self._in_use = True
            return
        if self._in_use:
            raise ValueError(
                f"the state is in use by a module on device {str(self.device)!r}, so it can't move to {str(device)!r}: "
                f"use device={str(self.device)!r}, or load a separate state"
            )
        self.device = device
        self.values, self.gradients = (
            {name: StateTensor(tensor.view(), device) for name, tensor in tensors.items()}
            for tensors in (self.values, self.gradients)
        )
        self._in_use = True

    def check(self, model: Step | OptimizerModel, model_name: str) -> None:
        """Checks that a model comes from the same export.

        Raises:
            ValueError: If it does not.
            CheckpointError: If the state lacks a parameter or buffer of the model.
        """
        if model.export != self.export:
            raise ValueError(
                f"{model_name} and {self.name} come from different exports ({model.export[:12]!r} and "
                f"{self.export[:12]!r}): use the models and the checkpoint that were written together"
            )
        names = [*model.gradients, *(model.weights if isinstance(model, OptimizerModel) else model.state)]
        names += [] if isinstance(model, OptimizerModel) else model.buffer_updates
        unknown = [name for name in dict.fromkeys(names) if name not in self.values]
        if unknown:
            what = "has an adapter alone, for Adapters.load(name, path)" if BASE in self.properties else "is damaged"
            raise CheckpointError(f"{self.name} {what}: {unknown}, which {model_name} needs, are missing")
        if isinstance(model, Step):
            self.statistics = {*(self.statistics or ()), *model.buffer_updates}
            self._base = ""  # these are no part of it

    def prepare_gradients(self, names: Iterable[str]) -> None:
        """Sets missing gradients to zeros."""
        for name in names:
            if name not in self.gradients:
                self.gradients[name] = _zeros(self.values[name], self.device)

    def targets(self, model: Step) -> dict[str, StateTensor]:
        """Returns the tensors that the next training step writes: graph output -> tensor."""
        if not self.reset and not self._other_gradients:
            self._other_gradients = {name: _zeros(self.gradients[name], self.device) for name in model.gradients}
        if not self._other_buffers:
            self._other_buffers = {name: _zeros(self.values[name], self.device) for name in model.buffer_updates}
        gradients = self.gradients if self.reset else self._other_gradients
        return {
            **{output: gradients[name] for name, output in model.gradients.items()},
            **{output: self._other_buffers[name] for name, output in model.buffer_updates.items()},
        }

    def advance(self) -> None:
        """Switches to the tensors that a training step has written."""
        if self.reset:
            self.reset, self.micro_batches = False, 1
        else:
            self.micro_batches += 1
            self.gradients, self._other_gradients = self._other_gradients, self.gradients
            self.gradient_side ^= 1
        if self._other_buffers:
            for name, tensor in self._other_buffers.items():
                self.values[name], self._other_buffers[name] = tensor, self.values[name]
            self.buffer_side ^= 1

    def prepare_optimizer(self, slots: Mapping[str, Slot], rates: int) -> None:
        """Creates the optimizer's tensors, from the checkpoint or with their initial values.

        Raises:
            CheckpointError: If the checkpoint holds the state of a different optimizer.
        """
        if len(self.learning_rates) != rates:
            raise CheckpointError(
                f"{self.name} has {len(self.learning_rates)} learning rates, but the optimizer model takes {rates}"
            )
        if self.optimizer is not None:
            return
        self._slots = slots
        if self._saved_optimizer is None:
            self._check_size(slots)
        arrays = self._optimizer_arrays(self._saved_optimizer, self.name)
        self.optimizer = {key: StateTensor(arrays[key], self.device) for key in slots}
        self._saved_optimizer = None

    def _optimizer_arrays(self, arrays: Mapping[str, Array] | None, name: str) -> Mapping[str, Array]:
        """Returns an optimizer's state, or the initial one for None.

        Raises:
            CheckpointError: If it is that of a different optimizer.
        """
        slots = self._slots
        if arrays is None:
            return {key: np.full(slot.shape, slot.initial, slot.dtype) for key, slot in slots.items()}
        array_specs = _specs(arrays)
        model_specs = {key: (slot.dtype, tuple(slot.shape)) for key, slot in slots.items()}
        if array_specs != model_specs:
            wrong = sorted(
                key for key in array_specs.keys() | model_specs.keys() if array_specs.get(key) != model_specs.get(key)
            )
            raise CheckpointError(f"{name} holds the state of another optimizer: {wrong} don't match the model")
        return arrays

    def adapter(self) -> State:
        """Returns copies of the trained parameters and the optimizer's state, and a digest of all that is frozen.

        Raises:
            RuntimeError: If a parameter has no value.
        """
        self.require_values()
        whole = self.to_checkpoint(include_optimizer_state=True)
        return State(
            {name: whole.parameters[name].copy() for name in self.trainable},
            list(self.trainable),
            optimizer=None
            if whole.optimizer is None
            else {key: value.copy() for key, value in whole.optimizer.items()},
            learning_rates=list(self.learning_rates),
            properties={BASE: self._digest()},
            export=self.export,
        )

    def _digest(self) -> str:
        """Returns a digest of all that is frozen."""
        if not self._base:
            arrays = ((name, self.values[name].view()) for name in self.frozen)
            self._base = digest((name, as_stored(np.asarray(array, order="C"))) for name, array in arrays)
        return self._base

    def check_adapter(self, adapter: State, name: str) -> None:
        """Checks that an adapter fits these models and this base.

        Raises:
            ValueError: If it does not.
        """
        trained = {name: self.values[name] for name in self.trainable}
        if adapter.nominal or _specs(adapter.parameters) != _specs(trained):
            raise ValueError(
                f"{name} is no adapter of these models: it has {shown(list(adapter.parameters))}, and what is trained "
                f"is {shown(list(self.trainable))}. Adapters.save(name, path) writes one"
            )
        if (adapter.export, adapter.properties.get(BASE)) != (self.export, self._digest()):
            raise ValueError(
                f"{name} is an adapter of another base: load it with the models and the checkpoint that it was trained "
                "on"
            )
        if self.optimizer is not None:
            self._optimizer_arrays(adapter.optimizer, name)

    def replace_adapter(self, adapter: State) -> None:
        """Writes the trained parameters, and the optimizer's state or its initial one."""
        arrays = adapter.optimizer if self.optimizer is None else self._optimizer_arrays(adapter.optimizer, self.name)
        for name, array in adapter.parameters.items():
            self.values[name].write(array)
        if self.optimizer is None:
            # An optimizer that is made later takes the arrays themselves.
            self._saved_optimizer = None if arrays is None else {key: array.copy() for key, array in arrays.items()}
            return
        assert arrays is not None
        for key, tensor in self.optimizer.items():
            tensor.write(arrays[key])

    def _check_size(self, slots: Mapping[str, Slot]) -> None:
        """Checks that the optimizer model describes a state of plausible size, before it is allocated."""
        size = sum(math.prod(slot.shape) for slot in slots.values())
        largest = _LARGEST_STATE * (self.size(trainable_only=False) + len(slots))
        if size > largest:
            raise CheckpointError(
                f"the optimizer model asks for {size} elements of state, more than {_LARGEST_STATE} for each of the "
                f"parameters of {self.name}: it is damaged or from another export"
            )

    def rates(self) -> list[float]:
        """Returns the learning rates of the next update."""
        if self.schedule is None:
            return self.learning_rates
        return [learning_rate(self.schedule, self.optimization_step, base) for base in self.learning_rates]

    def set_rate(self, rate: float) -> None:
        """Sets one constant learning rate for all parameters."""
        self.learning_rates, self.schedule = [rate] * len(self.learning_rates), None

    def require_values(self) -> None:
        """Checks that all parameters have values.

        Raises:
            RuntimeError: If a parameter has none.
        """
        if self.missing:
            names = [name for name in self.parameters if name in self.missing]
            what = "no parameter has" if len(names) == len(self.parameters) else f"the parameters {names} do not have"
            raise RuntimeError(
                f"{self.name} is a nominal checkpoint, and {what} values yet: fill the parameters with "
                "copy_buffer_to_parameters(buffer, trainable_only=False) or from_buffer(buffer), or set each of them"
            )

    def to_checkpoint(self, include_optimizer_state: bool) -> State:
        """Returns a checkpoint that shares the state's tensors.

        Raises:
            RuntimeError: If only some of the parameters have values.
        """
        nominal = set(self.parameters) == self.missing and bool(self.missing)
        if not nominal:
            self.require_values()
        checkpoint = dataclasses.replace(
            self._rest,
            export=self.export,
            parameters=_viewed(self.values, self.parameters),
            trainable=list(self.trainable),
            buffers=_viewed(self.values, self._buffers),
            learning_rates=list(self.learning_rates),
            schedule=self.schedule,
            random=self.random.get_state(),
            properties=dict(self.properties),
            nominal=nominal,
        )
        if not include_optimizer_state:
            return checkpoint
        return dataclasses.replace(
            checkpoint,
            optimizer=self._saved_optimizer if self.optimizer is None else _viewed(self.optimizer, self.optimizer),
            optimization_step=self.optimization_step,
            gradients={} if self.reset else _viewed(self.gradients, self.gradients),
            micro_batches=0 if self.reset else self.micro_batches,
        )

    def names(self, trainable_only: bool) -> tuple[str, ...]:
        """Returns the parameters of a flat buffer, in order."""
        return self.trainable if trainable_only else self.parameters

    def size(self, trainable_only: bool) -> int:
        """Returns the number of elements of a flat buffer."""
        return sum(int(np.prod(self.values[name].shape, dtype=np.int64)) for name in self.names(trainable_only))

    def flat_dtype(self, trainable_only: bool) -> np.dtype[Any]:
        """Returns the element type of a flat buffer.

        Raises:
            ValueError: If the parameters have different dtypes.
        """
        dtypes = {self.values[name].dtype: name for name in self.names(trainable_only)}
        if len(dtypes) > 1:
            raise ValueError(
                "a flat buffer holds parameters of one dtype, but these have "
                + " and ".join(f"{dtype} ({name!r})" for dtype, name in dtypes.items())
                + ": read and set them one by one in state.parameters"
            )
        return next(iter(dtypes), np.dtype(np.float32))

    def flat(self, trainable_only: bool) -> Array:
        """Returns the values of the parameters as one flat buffer."""
        flat = np.empty(self.size(trainable_only), self.flat_dtype(trainable_only))
        start = 0
        for name in self.names(trainable_only):
            values = self.values[name].view()
            flat[start : start + values.size] = values.reshape(-1)
            start += values.size
        return flat

    def fill(self, flat: Array, trainable_only: bool) -> None:
        """Sets the values of the parameters from a flat buffer of the right size and type."""
        start = 0
        for name in self.names(trainable_only):
            tensor = self.values[name]
            size = int(np.prod(tensor.shape, dtype=np.int64))
            self.write(name, flat[start : start + size])
            start += size

    def write(self, name: str, array: Array) -> None:
        """Sets the values of a parameter from an array of the right size and type."""
        self.values[name].write(array)
        self.missing.discard(name)
        if name not in self.trainable:
            self._base = ""


def _taken(arrays: dict[str, Array]) -> dict[str, StateTensor]:
    """Moves arrays into tensors, and removes each array from its dict to free its memory."""
    names = list(arrays)
    return {name: StateTensor(arrays.pop(name), CPU) for name in names}


def _specs(arrays: Mapping[str, Array | StateTensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (str(array.dtype), array.shape) for name, array in arrays.items()}


def _viewed(tensors: Mapping[str, StateTensor], names: Iterable[str]) -> dict[str, Array]:
    return {name: tensors[name].view() for name in names}


def _zeros(like: StateTensor, device: Device) -> StateTensor:
    return StateTensor(np.zeros(like.shape, like.dtype), device)
