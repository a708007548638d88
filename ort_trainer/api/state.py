"""All that training from artifacts reads and changes, in memory that keeps its place; the faces share one of them."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..schedules import learning_rate
from .artifact import OptimizerModel, Slot, StepModel
from .checkpoint_file import Array, Checkpoint, Value
from .engine import CPU, Device, StateTensor
from .random_numbers import RandomNumbers

__all__ = ["State"]

# Elements that an optimizer may keep for each one of a parameter; the known ones keep two or three.
_LARGEST_STATE = 16


class State:
    """The state of training.

    A training step writes the new buffers of the model, and gradients that are added up, into a second set of tensors,
    which takes the place of the first when the step has succeeded.

    Args:
        checkpoint: What is in the file; its tensors are taken over.
        name: What messages call the checkpoint.

    Attributes:
        export: What the artifacts of one export have in common.
        name: As given.
        device: Where the tensors are; that of the first module.
        values: Parameter or buffer -> tensor.
        parameters: Names of the parameters, and of the floating-point buffers among them.
        trainable: Names of those that are trained.
        missing: Names of those that have no values yet.
        gradients: Trained parameter -> the sum of its gradients; empty before there is a module.
        reset: Whether the next gradients take the place of these.
        micro_batches: How many training steps are in these gradients.
        gradient_side: Which of the two sets of gradients these are.
        buffer_side: The same of the buffers that training changes.
        optimizer: What the optimizer keeps; None before there is one.
        optimization_step: Updates done.
        learning_rates: Of each parameter group, and last of all other parameters.
        schedule: What they follow; None if they are constant.
        random: Draws the random numbers.
        properties: The user's own values.
        lock: Held by what reads or changes the tensors: a run releases Python's own lock, and what it is bound to must
            stay that.
    """

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self.export = checkpoint.export
        self.name = name
        self.device: Device = CPU
        self.parameters = tuple(checkpoint.parameters)
        self.trainable = tuple(checkpoint.trainable)
        self.missing = set(self.parameters) if checkpoint.nominal else set()
        self._buffers = tuple(checkpoint.buffers)
        self.values = {**_taken(checkpoint.parameters), **_taken(checkpoint.buffers)}
        strange = [name for name in (*self.trainable, *checkpoint.gradients) if name not in self.parameters]
        if strange:
            raise CheckpointError(f"{name} is damaged: it has no parameters {strange}")
        self.gradients = _taken(checkpoint.gradients)
        self.reset = not self.gradients
        self.micro_batches = checkpoint.micro_batches
        self.gradient_side = self.buffer_side = 0
        self._other_gradients: dict[str, StateTensor] = {}
        self._other_buffers: dict[str, StateTensor] = {}
        self.optimizer: dict[str, StateTensor] | None = None
        self._kept = checkpoint.optimizer
        self.optimization_step = checkpoint.optimization_step
        self.learning_rates = list(checkpoint.learning_rates)
        self.schedule = checkpoint.schedule
        self.random = RandomNumbers(checkpoint.random.get("state"))
        self.properties: dict[str, Value] = dict(checkpoint.properties)
        self._trainer = checkpoint.trainer
        self._in_use = False
        self.lock = threading.RLock()  # a handler of a signal may come back to the state

    def use(self, device: Device) -> None:
        """Moves the state to the device of a module.

        Raises:
            ValueError: If a module uses it on another one.
        """
        if device == self.device:
            self._in_use = True
            return
        if self._in_use:
            raise ValueError(
                f"the state is on device {str(self.device)!r}, where another module uses it: a second one must be made "
                f"with device={str(self.device)!r}, or with a state of its own, not with {str(device)!r}"
            )
        self.device = device
        self.values, self.gradients = (
            {name: StateTensor(tensor.view(), device) for name, tensor in tensors.items()}
            for tensors in (self.values, self.gradients)
        )
        self._in_use = True

    def check(self, model: StepModel | OptimizerModel, model_name: str) -> None:
        """Checks that a model is of the same export.

        Raises:
            ValueError: If it is not.
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
            raise CheckpointError(f"{self.name} is damaged: it lacks {unknown}, which {model_name} needs")

    def prepare_gradients(self, names: Iterable[str]) -> None:
        """Makes zeros of the gradients that are not there."""
        for name in names:
            if name not in self.gradients:
                self.gradients[name] = _zeros(self.values[name], self.device)

    def targets(self, model: StepModel) -> dict[str, StateTensor]:
        """Returns where the coming training step writes: graph output -> tensor."""
        if not self.reset and not self._other_gradients:
            self._other_gradients = {name: _zeros(self.gradients[name], self.device) for name in model.gradients}
        if not self._other_buffers:
            self._other_buffers = {name: _zeros(self.values[name], self.device) for name in model.buffer_updates}
        gradients = self.gradients if self.reset else self._other_gradients
        return {
            **{output: gradients[name] for name, (_, output) in model.gradients.items()},
            **{output: self._other_buffers[name] for name, output in model.buffer_updates.items()},
        }

    def advance(self) -> None:
        """Takes over what a training step has written."""
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
        """Makes the optimizer's tensors: those of the checkpoint, or their first values.

        Raises:
            CheckpointError: If those of the checkpoint are of something else.
        """
        if len(self.learning_rates) != rates:
            raise CheckpointError(
                f"{self.name} has {len(self.learning_rates)} learning rates, but the optimizer model takes {rates}"
            )
        if self.optimizer is not None:
            return
        kept = self._kept
        if kept is None:
            self._check_size(slots)
            kept = {key: np.full(slot.shape, slot.initial, slot.dtype) for key, slot in slots.items()}
        found = {key: (str(value.dtype), value.shape) for key, value in kept.items()}
        expected = {key: (slot.dtype, tuple(slot.shape)) for key, slot in slots.items()}
        if found != expected:
            wrong = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
            raise CheckpointError(f"{self.name} has another optimizer's state: {wrong} are not what the model keeps")
        self.optimizer = {key: StateTensor(kept[key], self.device) for key in slots}
        self._kept = None

    def _check_size(self, slots: Mapping[str, Slot]) -> None:
        """Checks that tensors that the optimizer model asks for, which no file has, are not absurdly large."""
        size = sum(math.prod(slot.shape) for slot in slots.values())
        largest = _LARGEST_STATE * (self.size(trainable_only=False) + len(slots))
        if size > largest:
            raise CheckpointError(
                f"the optimizer model asks for {size} elements of state, more than {_LARGEST_STATE} for each of the "
                f"parameters of {self.name}: it is damaged, or that of another export"
            )

    def rates(self) -> list[float]:
        """Returns the learning rates of the coming update."""
        if self.schedule is None:
            return self.learning_rates
        return [learning_rate(self.schedule, self.optimization_step, base) for base in self.learning_rates]

    def set_rate(self, rate: float) -> None:
        """Gives all parameters one constant learning rate."""
        self.learning_rates, self.schedule = [rate] * len(self.learning_rates), None

    def require_values(self) -> None:
        """Checks that all parameters have values.

        Raises:
            RuntimeError: If some have none.
        """
        if self.missing:
            names = [name for name in self.parameters if name in self.missing]
            what = "no parameter has" if len(names) == len(self.parameters) else f"the parameters {names} do not have"
            raise RuntimeError(
                f"{self.name} is a nominal checkpoint, and {what} values yet: fill the parameters with "
                "copy_buffer_to_parameters(buffer, trainable_only=False) or from_buffer(buffer), or set each of them"
            )

    def to_checkpoint(self, include_optimizer_state: bool) -> Checkpoint:
        """Returns what is written into a file; the tensors are the state's own.

        Raises:
            RuntimeError: If some parameters have values, and others do not.
        """
        nominal = set(self.parameters) == self.missing and bool(self.missing)
        if not nominal:
            self.require_values()
        random = self.random.get_state()
        found = Checkpoint(
            export=self.export,
            parameters=_viewed(self.values, self.parameters),
            trainable=list(self.trainable),
            buffers=_viewed(self.values, self._buffers),
            learning_rates=list(self.learning_rates),
            schedule=self.schedule,
            random={} if random is None else {"state": random},
            properties=dict(self.properties),
            trainer=self._trainer,
            nominal=nominal,
        )
        if not include_optimizer_state:
            return found
        return dataclasses.replace(
            found,
            optimizer=self._kept if self.optimizer is None else _viewed(self.optimizer, self.optimizer),
            optimization_step=self.optimization_step,
            gradients={} if self.reset else _viewed(self.gradients, self.gradients),
            micro_batches=0 if self.reset else self.micro_batches,
        )

    def names(self, trainable_only: bool) -> tuple[str, ...]:
        """Returns the parameters of a flat buffer, in order."""
        return self.trainable if trainable_only else self.parameters

    def size(self, trainable_only: bool) -> int:
        """Returns how many elements a flat buffer has."""
        return sum(int(np.prod(self.values[name].shape, dtype=np.int64)) for name in self.names(trainable_only))

    def flat_dtype(self, trainable_only: bool) -> np.dtype[Any]:
        """Returns the element type of a flat buffer.

        Raises:
            ValueError: If the parameters have several.
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
        """Returns the values of the parameters, one after the other."""
        flat = np.empty(self.size(trainable_only), self.flat_dtype(trainable_only))
        start = 0
        for name in self.names(trainable_only):
            values = self.values[name].view()
            flat[start : start + values.size] = values.reshape(-1)
            start += values.size
        return flat

    def fill(self, flat: Array, trainable_only: bool) -> None:
        """Takes over the values of the parameters from a flat buffer of the right size and type."""
        start = 0
        for name in self.names(trainable_only):
            tensor = self.values[name]
            size = int(np.prod(tensor.shape, dtype=np.int64))
            tensor.write(flat[start : start + size])
            self.missing.discard(name)
            start += size


def _taken(arrays: dict[str, Array]) -> dict[str, StateTensor]:
    """Returns tensors of arrays, which are let go one by one."""
    names = list(arrays)
    return {name: StateTensor(arrays.pop(name), CPU) for name in names}


def _viewed(tensors: Mapping[str, StateTensor], names: Iterable[str]) -> dict[str, Array]:
    return {name: tensors[name].view() for name in names}


def _zeros(like: StateTensor, device: Device) -> StateTensor:
    return StateTensor(np.zeros(like.shape, like.dtype), device)
