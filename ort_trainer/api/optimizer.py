"""``Optimizer``: updates the weights of a module from its gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.errors import shown
from ..core.interrupts import uninterrupted
from ..engine.ort import RunOptions
from ..step.contract import OptimizerModel
from .live_state import LiveState
from .load import ModelSource, check_options, check_run_options, load_model
from .module import Module

_LARGEST = float(np.finfo(np.float32).max)


class Optimizer:
    """Updates the parameters of a module from their accumulated gradients.

    Args:
        optimizer_uri: The optimizer model: path or bytes.
        module: The module to update.

    Raises:
        TypeError: If an argument has the wrong type.
        FileNotFoundError: If the model does not exist.
        ValueError: If it is damaged, is not an optimizer model, or comes from another export than the module's state.
    """

    def __init__(self, optimizer_uri: ModelSource, module: Module) -> None:
        if not isinstance(module, Module):
            raise TypeError(f"module must be a Module, but {shown(module)} was given")
        self._state: LiveState = module._state
        device = self._state.device
        options = check_options(module._session_options, update=True)
        loaded = load_model(OptimizerModel, optimizer_uri, "optimizer_uri", "optimizer", options, self._state, device)
        self._state.check(loaded.model, loaded.name)
        with self._state.lock:
            self._state.prepare_optimizer(loaded.model.state, loaded.model.rates)
            self._state.prepare_gradients(loaded.model.gradients)
        self._session, self._model, self._name = loaded.session, loaded.model, loaded.name
        self._bindings: dict[int, Any] = {}

    def step(self, run_options: RunOptions | None = None) -> None:
        """Updates the parameters, and counts the update.

        It uses the current gradients, even if they have been used before or a reset is pending.

        Args:
            run_options: ONNX Runtime's options for this run.

        Raises:
            TypeError: If ``run_options`` is not a RunOptions.
            RuntimeError: If the parameters have no values yet.
        """
        check_run_options(run_options)
        state = self._state
        if state.missing:
            state.require_values()
        with state.lock, uninterrupted():
            binding = self._bindings.get(state.gradient_side) or self._bind()
            binding.bind_cpu_input(self._model.learning_rate, np.array(state.rates(), np.float32))
            if self._model.micro_batches is not None:
                binding.bind_cpu_input(self._model.micro_batches, np.array([state.micro_batches], np.int64))
            self._session.run_with_iobinding(binding, run_options)
            state.optimization_step += 1

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets a constant learning rate for all parameters, which replaces the schedule of the checkpoint.

        Raises:
            TypeError: If it is not a number.
            ValueError: If it is negative, or not finite in float32.
        """
        self._state.set_rate(check_rate("learning_rate", learning_rate))

    def get_learning_rate(self) -> float:
        """Returns the learning rate of the next update, for the parameters outside any parameter group."""
        return self._state.rates()[-1]

    def _bind(self) -> Any:
        """Binds the state to a run: outputs share the memory of inputs, so they overwrite them."""
        state, model = self._state, self._model
        binding = self._session.io_binding()
        for name, (graph_input, output) in model.weights.items():
            binding.bind_ortvalue_input(graph_input, state.values[name].value)
            binding.bind_ortvalue_output(output, state.values[name].value)
        for name, graph_input in model.gradients.items():
            binding.bind_ortvalue_input(graph_input, state.gradients[name].value)
        for key, slot in model.state.items():
            tensor = (state.optimizer or {})[key]
            binding.bind_ortvalue_input(slot.input, tensor.value)
            binding.bind_ortvalue_output(slot.output, tensor.value)
        self._bindings[state.gradient_side] = binding
        return binding

    def __repr__(self) -> str:
        return f"Optimizer({self._name}, {self._model.name}, learning_rate={self.get_learning_rate()})"


def check_rate(what: str, value: object) -> float:
    """Returns a valid learning rate.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is negative, or not finite in float32, the type that optimizer models take.
    """
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        raise TypeError(f"{what} must be a number, but {shown(value)} was given")
    # A NumPy scalar would compare in its own type, which may be unable to represent the limit.
    if not 0 <= (value if isinstance(value, int) else float(value)) <= _LARGEST:
        raise ValueError(
            f"{what} must be finite, at most {_LARGEST:.3g}, and not negative, but {shown(value)} was given"
        )
    return float(value)
