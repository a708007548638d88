"""``Module``: training and evaluation steps from the artifacts of an export."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np

from ..core.atomic import atomic_path
from ..core.errors import shown
from ..engine.ort import OrtValue, RunOptions, SessionOptions, parse_device, to_ort_value
from ..state.state import Array
from ..step.contract import Step
from .checkpoint_state import CheckpointState, state_of
from .load import ModelSource, check_options, load_model
from .runner import Input, StepRunner


class Module:
    """Training and evaluation of a model from its artifacts.

    Args:
        train_model_uri: The training model: path or bytes.
        state: The state to train. Several modules may share one.
        eval_model_uri: The evaluation model, for evaluation and :meth:`export_model_for_inferencing`.
        device: ``cpu``, ``cuda`` or ``cuda:N``; the state moves there.
        session_options: For ONNX Runtime's sessions, including that of an optimizer of this module.

    Attributes:
        training: Whether a call runs a training step; otherwise it runs an evaluation step.

    Raises:
        TypeError: If an argument has the wrong type.
        FileNotFoundError: If a model does not exist.
        ValueError: If a model is damaged, is not an artifact, or comes from another export than the state, or if the
            device is unknown or unavailable.
    """

    training: bool

    def __init__(
        self,
        train_model_uri: ModelSource,
        state: CheckpointState,
        eval_model_uri: ModelSource | None = None,
        device: str = "cpu",
        session_options: SessionOptions | None = None,
    ) -> None:
        self.training = True
        self._state = inner = state_of(state)
        self._session_options, options = session_options, check_options(session_options)
        place = parse_device(device)
        train = load_model(Step, train_model_uri, "train_model_uri", "training", options, inner, place)
        inner.check(train.model, train.name)
        evaluation = None
        if eval_model_uri is not None:
            evaluation = load_model(Step, eval_model_uri, "eval_model_uri", "evaluation", options, inner, place)
            inner.check(evaluation.model, evaluation.name)
        with inner.lock:
            inner.use(place)
            inner.complete(train.session.get_inputs())
            inner.prepare_gradients(train.model.gradients)
        self._train = StepRunner(train, inner)
        self._eval = None if evaluation is None else StepRunner(evaluation, inner)

    @overload
    def __call__(self, *user_inputs: Array, **named_inputs: Array) -> Array | Any: ...

    @overload
    def __call__(self, *user_inputs: Input, **named_inputs: Input) -> Any: ...

    def __call__(self, *user_inputs: Input, **named_inputs: Input) -> Any:
        """Runs a training step, which adds to the gradients, or an evaluation step.

        Args:
            *user_inputs: Arrays or OrtValues, in the order of :meth:`input_names`.
            **named_inputs: The remaining inputs by name.

        Returns:
            The outputs in the order of :meth:`output_names`, as a tuple if there are several. They are arrays if any
            input is an array, otherwise OrtValues.

        Raises:
            TypeError: If an input is missing, unknown, not a tensor, or has the wrong dtype.
            ValueError: If an input has the wrong shape.
            IndexError: If an input contains an index out of range, such as a label beyond the number of classes.
            RuntimeError: If there is no evaluation model, or the parameters have no values yet.
        """
        runner = self._runner(self.training)
        results = runner.run(_ordered(runner.inputs, user_inputs, named_inputs) if named_inputs else user_inputs)
        return results[0] if len(results) == 1 else tuple(results)

    def _run(
        self, training: bool, inputs: Sequence[Input] | Mapping[str, Input], options: RunOptions | None
    ) -> list[Any]:
        """Runs a training or evaluation step, whatever the mode, and returns a list of the outputs."""
        runner = self._runner(training)
        return runner.run(_ordered(runner.inputs, (), inputs) if isinstance(inputs, Mapping) else inputs, options)

    def train(self, mode: bool = True) -> Module:
        """Sets the mode: calls run training steps.

        Args:
            mode: False to run evaluation steps instead.

        Returns:
            The module.
        """
        if not isinstance(mode, (bool, np.bool_)):
            raise TypeError(f"mode must be a bool, but {shown(mode)} was given")
        self.training = bool(mode)
        return self

    def eval(self) -> Module:
        """Sets the mode: calls run evaluation steps. Returns the module."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Makes the next training step overwrite the gradients; until then they stay readable."""
        with self._state.lock:  # otherwise a step in another thread could undo the reset when it ends
            self._state.reset = True

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Returns the total number of elements of the parameters.

        Args:
            trainable_only: Whether to count only the trained parameters.
        """
        return self._state.size(trainable_only)

    def get_contiguous_parameters(self, trainable_only: bool = False) -> OrtValue:
        """Returns a copy of the values of all parameters as one flat buffer.

        Args:
            trainable_only: Whether to include only the trained parameters.

        Raises:
            RuntimeError: If a parameter has no values yet.
            ValueError: If the parameters have different dtypes.
        """
        self._state.require_values()
        with self._state.lock:
            return to_ort_value(self._state.flat(trainable_only), self._state.device)

    def copy_buffer_to_parameters(self, buffer: Input, trainable_only: bool = True) -> None:
        """Sets the values of all parameters from a flat buffer, which also fills a nominal checkpoint.

        Args:
            buffer: A buffer from :meth:`get_contiguous_parameters`, or an array.
            trainable_only: Whether it holds only the trained parameters.

        Raises:
            TypeError: If it is not a tensor, or has the wrong dtype.
            ValueError: If it has the wrong size.
        """
        flat = _flat(buffer, self._state.flat_dtype(trainable_only))
        size = self._state.size(trainable_only)
        if flat.size != size:
            other = self._state.size(not trainable_only)
            hint = f"; {other} with trainable_only={not trainable_only}" if other != size else ""
            raise ValueError(
                f"the buffer has {flat.size} elements, but the parameters have {size} with "
                f"trainable_only={trainable_only}{hint}"
            )
        with self._state.lock:
            self._state.fill(flat, trainable_only)

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: Sequence[str]
    ) -> None:
        """Writes an ONNX model for inference, with the weights in it.

        Args:
            inference_model_uri: Path of the file; an existing one is replaced.
            graph_output_names: The outputs of the new model: outputs of the evaluation model, or other values in it.
                Inputs that they don't need, such as labels, are left out.

        Raises:
            TypeError: If an argument has the wrong type.
            FileNotFoundError: If the folder does not exist.
            RuntimeError: If there is no evaluation model, or the parameters have no values yet.
            ValueError: If the model has no value of that name.
        """
        from pathlib import Path

        from .onnx_bytes import inference_model

        runner = self._runner(False)
        self._state.require_values()
        if not isinstance(inference_model_uri, (str, os.PathLike)):
            raise TypeError(f"inference_model_uri must be a path, but {shown(inference_model_uri)} was given")
        names = graph_output_names
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"graph_output_names must be a list of str, but {shown(names)} was given")
        with self._state.lock:
            values = {graph: self._state.values[name].view() for name, graph in runner.model.state.items()}
            model = inference_model(runner.data, values, list(names))
        with atomic_path(Path(inference_model_uri)) as temporary:
            temporary.write_bytes(model)

    def input_names(self) -> list[str]:
        """Returns the names of a call's inputs in this mode."""
        return list(self._runner(self.training).inputs)

    def output_names(self) -> list[str]:
        """Returns the names of a call's outputs in this mode."""
        return list(self._runner(self.training).outputs)

    def _runner(self, training: bool) -> StepRunner:
        if training:
            return self._train
        if self._eval is None:
            raise RuntimeError("evaluation needs the evaluation model: pass it as eval_model_uri (or eval_model)")
        return self._eval

    def __repr__(self) -> str:
        return f"Module({self._train.name}, inputs={list(self._train.inputs)}, outputs={list(self._train.outputs)})"


def _ordered(names: Sequence[str], args: Sequence[Input], kwargs: Mapping[str, Input]) -> list[Input]:
    """Returns positional and named inputs in the order of the model."""
    inputs = dict(zip(names, args, strict=False))
    unknown = [name for name in kwargs if name not in names]
    if unknown:
        raise TypeError(f"unknown inputs {unknown}: the model takes {list(names)}")
    twice = [name for name in kwargs if name in inputs]
    if twice:
        raise TypeError(f"inputs {twice} were given both by position and by name")
    inputs.update(kwargs)
    missing = [name for name in names if name not in inputs]
    if missing:
        raise TypeError(f"inputs {missing} are missing: the model takes {list(names)}")
    # Surplus positional inputs are kept, so that the runner reports their number.
    return [*(inputs[name] for name in names), *args[len(names) :]]


def _flat(buffer: object, dtype: np.dtype[Any]) -> Array:
    """Returns a flat buffer as an array of one dimension."""
    if not isinstance(buffer, np.ndarray) and not callable(getattr(buffer, "numpy", None)):
        raise TypeError(f"the buffer must be an OrtValue or a numpy array, but {shown(buffer)} was given")
    flat = np.asarray(buffer if isinstance(buffer, np.ndarray) else buffer.numpy())  # type: ignore[attr-defined]
    if flat.dtype != dtype:
        raise TypeError(f"the buffer has dtype {flat.dtype}, but the parameters have {dtype}")
    if flat.ndim != 1:
        raise ValueError(f"the buffer must have one dimension, but its shape is {list(flat.shape)}")
    return flat
