"""``TrainingSession``: trains an ONNX model that has a loss, with ONNX Runtime's former interface.

Its base, ``TrainerSession``, has the methods that any trainer's session has for old scripts.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ...core.errors import shown, warn
from ...core.interrupts import uninterrupted
from ...engine.ort import SessionOptions, provider_failure
from ...onnx.describe import describe_onnx
from ...onnx.load import load_onnx_model
from ...onnx.shapes import shape_of
from ...options import ORTTrainerOptions
from ...train.batch import to_tensor
from ...train.transaction import Transaction
from ...trainer import ORTTrainer
from .flat_state import flat_state_dict, load_flat_state_dict
from .io_binding import IOBinding, check_binding, to_ort_value, to_torch
from .parameters import (
    TrainingParameters,
    check_rate_name,
    fallback_providers,
    feed_of,
    number_of,
    optimizer_of,
    options_of,
    providers_of,
    state_to_begin_with,
)

_ONNX_NAMES = {"float32": "float", "float64": "double"}
_NO_VERSION = 2**63 - 1  # what ONNX Runtime returns for a model without one
_ALL_FINITE = "all_gradients_finite"
_LOSS_SCALES = ("loss_scale", "session_loss_scale", "session_loss_scale_")
_STEPS = "the trainer's train_step() and eval_step() run it, and trainer.session runs their halves"
# Attributes of ONNX Runtime's classes -> what to use instead.
_ELSEWHERE = {
    **dict.fromkeys(("run", "run_with_ort_values", "run_with_iobinding", "io_binding"), _STEPS),
    "run_async": "call run() in a thread",
    "run_with_ortvaluevector": "call run_with_ort_values() or run_with_iobinding()",
    **dict.fromkeys(("load_model", "read_bytes"), "the constructor reads the model"),
    "finalize": "there is nothing to finalize; memory is freed with the object",
    **dict.fromkeys(("get_tuning_results", "set_tuning_results"), "no kernel is tuned"),
    "_sess": "there is no C session; the methods of this object are those that it had",
}


class TrainerSession:
    """Reads and restores the state of a started trainer.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: ORTTrainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        instead = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{instead}", name=name, obj=self)

    def get_modelmeta(self) -> ModelMetadata:
        """Returns the metadata of the model."""
        model = self._described_model
        return ModelMetadata(
            producer_name=model.producer_name or "",
            graph_name=model.graph.name or "",
            domain=model.domain or "",
            description=model.doc_string or "",
            graph_description=model.graph.doc_string or "",
            version=_NO_VERSION if model.model_version is None else model.model_version,
            custom_metadata_map=dict(model.metadata_props),
        )

    def get_providers(self) -> list[str]:
        """Returns the names of the execution providers, in order."""
        return [name for name, _ in self._session.engine.providers]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Returns the options of the execution providers; without an ONNX Runtime session, those that were given."""
        running = self._inference_session
        if running is not None:
            return dict(running.get_provider_options())
        return {
            name: {key: str(value) for key, value in options.items()}
            for name, options in self._session.engine.providers
        }

    def get_session_options(self) -> SessionOptions:
        """Returns the ``onnxruntime.SessionOptions`` of the trainer's sessions."""
        return self._session.engine.options

    def get_profiling_start_time_ns(self) -> int:
        """Returns the start time of profiling in nanoseconds; 0 without profiling."""
        running = self._inference_session
        return 0 if running is None else int(running.get_profiling_start_time_ns())

    def end_profiling(self) -> str:
        """Ends profiling (``sess_options.enable_profiling``) and returns the name of the file; "" without profiling."""
        running = self._inference_session
        return "" if running is None else str(running.end_profiling())

    def get_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """Returns trained weights, moments and update counts in one flat dict of copies.

        The keys are the names of weights, ``Moment_1_<weight>``, ``Moment_2_<weight>``, and ``Update_Count_<weight>``
        (Adam) or ``Step`` (LAMB). Frozen weights and buffers are not included.
        """
        state = flat_state_dict(self._trainer, include_optimizer_state=True)
        contents = self._trainer.loop.contents
        held = set(contents.tensors) - set(contents.trainable)
        return {name: value.numpy() for name, value in state.items() if name not in held}

    def load_state(self, dict: Mapping[str, Any], strict: bool = False) -> None:
        """Restores what :meth:`get_state` returned.

        Args:
            dict: The state.
            strict: Whether names must match exactly; if not, only names that both have are restored.

        Raises:
            RuntimeError: If names differ and ``strict`` is True.
            TypeError, ValueError: If a value is invalid. Nothing has changed then.
        """
        full: Mapping[str, Any] = dict
        if strict and isinstance(dict, Mapping):
            contents = self._trainer.loop.contents
            tensors = {**self._session.parameters, **self._session.buffers}
            held = {
                name: canonical for name, canonical in contents.canonical.items() if canonical not in contents.trainable
            }
            full = {
                **{name: tensors[held[name]].detach().cpu().numpy() for name in held if name in contents.tensors},
                **dict,
            }
        load_flat_state_dict(self._trainer, full, strict)

    def get_model_state(self, include_mixed_precision_weights: bool = False) -> dict[str, dict[str, Any]]:
        """Returns the trained weights as copies.

        Args:
            include_mixed_precision_weights: Whether to add the weights rounded to fp16, as mixed precision uses them.

        Returns:
            ``full_precision`` -> name -> array, and with mixed precision ``mixed_precision`` -> name -> array.
        """
        trained = self._trainer.loop.contents.trainable
        weights = {name: self._session.parameters[name].detach().cpu().numpy().copy() for name in trained}
        state: dict[str, dict[str, Any]] = {"full_precision": weights}
        if include_mixed_precision_weights and self._trainer.loop.precision.mixed:
            state["mixed_precision"] = {name: value.astype(np.float16) for name, value in weights.items()}
        return state

    def get_optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Returns moments and update counts: weight -> ``Moment_1``, ``Moment_2``, ``Update_Count``."""
        state: dict[str, dict[str, Any]] = self._trainer.state_dict()["optimizer"]
        return state

    def get_partition_info_map(self) -> dict[str, dict[str, list[int]]]:
        """Returns an empty dict, because weights are not partitioned between ranks."""
        return {}

    @property
    def _described_model(self) -> ir.Model:
        """The model whose metadata the session returns; an empty one for a graph of PyTorch's kernels."""
        session = self._session
        step = (session.graphs(True) or session.graphs(False))[0]
        if not step.in_onnx:
            empty = ir.Graph((), (), nodes=(), name="step", opset_imports={"": 18})
            return ir.Model(empty, ir_version=9, producer_name="ort_trainer")
        model: ir.Model = step.model
        return model

    @property
    def _inference_session(self) -> Any:
        """The ONNX Runtime session of the first training graph; None if that runs on PyTorch's kernels."""
        try:
            return self._session.inference_session
        except RuntimeError:
            return None

    @property
    def _session(self) -> Any:
        session = self._trainer.loop.executor
        assert session is not None
        return session


@dataclass(frozen=True)
class ModelMetadata:
    """Metadata of a model, with the attributes of ``onnxruntime.ModelMetadata``, which Python code can't create."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: dict[str, str]


@dataclass(frozen=True)
class NodeArg:
    """An input or output of the session, as ``onnxruntime.NodeArg`` describes one.

    Attributes:
        name: The name.
        type: The type, such as ``tensor(float)``.
        shape: Sizes, or names of symbolic dimensions.
    """

    name: str
    type: str
    shape: list[int | str | None]


def _node_arg(value: ir.Value, dtype: str = "") -> NodeArg:
    """Returns the description of a value of an ONNX model, with torch's name of its dtype in runs if that differs."""
    kind = "undefined" if value.dtype is None else value.dtype.name.lower()
    kind = _ONNX_NAMES.get(dtype, dtype) or kind
    return NodeArg(str(value.name), f"tensor({kind})", list(shape_of(value) or ()))


class TrainingSession(TrainerSession):
    """Trains an ONNX model that has a loss among its outputs.

    A run computes the outputs, adds to the gradients and, at the end of an accumulation window, updates the weights.
    Runs with ``run_options.training_mode = False`` evaluate and change nothing; runs with
    ``run_options.only_execute_path_to_fetches = True`` never update.

    Args:
        path_or_bytes: The path of the model, or the serialized model.
        parameters: A :class:`~ort_trainer.TrainingParameters`.
        sess_options: An ``onnxruntime.SessionOptions``, used as it is.
        providers: Execution providers in order of preference, as names or (name, options); None for all available.
            Providers that can't be used here are skipped with a warning. The CPU is always the last one.
        provider_options: The providers' options in the same order, if ``providers`` has only names.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a parameter is not supported; the message names it and says what to do.
        ExportError: If the model can't be read or differentiated.

    Example:
        >>> parameters = TrainingParameters(loss_output_name="loss", training_optimizer_name="AdamOptimizer")
        >>> session = TrainingSession("model.onnx", parameters)
        >>> (loss,) = session.run(["loss"], {"x": x, "label": y, "Learning_Rate": np.array([1e-3], np.float32)})
    """

    # The class that the parameters are converted to; it decides which settings are rejected.
    _options = ORTTrainerOptions

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes,
        parameters: TrainingParameters,
        sess_options: SessionOptions | None = None,
        providers: Sequence[str | tuple[str, Mapping[str, Any]]] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if not isinstance(path_or_bytes, (str, os.PathLike, bytes)):
            raise TypeError(
                f"path_or_bytes must be a path or a serialized model (bytes), but a {type(path_or_bytes).__name__} was "
                "given"
            )
        if not isinstance(parameters, TrainingParameters):
            raise TypeError(f"parameters must be TrainingParameters, but a {type(parameters).__name__} was given")
        self._model = load_onnx_model(os.fspath(path_or_bytes))
        if parameters.weights_to_train:  # overrides which weights the file marks as frozen
            self._model = replace(self._model, frozen=frozenset())
        self._parameters = copy.deepcopy(parameters)
        self._scale_name = next(name for name in _LOSS_SCALES if name not in self._model.inputs)
        check_rate_name(self._parameters, [*self._model.inputs, self._scale_name])
        self._sess_options = sess_options
        super().__init__(self._make_trainer(providers, provider_options))
        self.loss_scale_input_name = self._scale_name if self._feeds_scale else ""
        self._falls_back = False

    def __del__(self) -> None:
        """Does nothing: memory is freed with the object."""

    @property
    def _described_model(self) -> ir.Model:
        return self._model.file

    @property
    def _feeds_scale(self) -> bool:
        """Whether runs get the loss scale as an input."""
        return self._parameters.use_mixed_precision and self._parameters.loss_scale == 0.0

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[np.ndarray[Any, Any]]:
        """Runs the model once; the class docstring describes which runs change gradients and weights.

        Args:
            output_names: Outputs to return; None or empty for all.
            input_feed: Input name -> array: the model's inputs and, in training, the learning rate (and loss scale).
            run_options: An ``onnxruntime.RunOptions``. Those of a stock onnxruntime lack ``training_mode``: to evaluate
                there, give an object that has it, such as ``types.SimpleNamespace(training_mode=False)``.

        Returns:
            The outputs as arrays.

        Raises:
            TypeError, ValueError: If an input is missing, unknown or invalid. Nothing has changed then.
        """
        values = {name: to_tensor(name, np.asarray(value)) for name, value in feed_of(input_feed).items()}
        return [value.cpu().numpy() for value in self._run(output_names, values, run_options)]

    def run_with_ort_values(
        self, output_names: Sequence[str] | None, input_dict_ort_values: Mapping[str, Any], run_options: Any = None
    ) -> list[Any]:
        """Runs the model as :meth:`run` does, with OrtValues."""
        values = {name: to_torch(value) for name, value in feed_of(input_dict_ort_values).items()}
        return [to_ort_value(value) for value in self._run(output_names, values, run_options)]

    def run_with_iobinding(self, iobinding: IOBinding, run_options: Any = None) -> None:
        """Runs the model as :meth:`run` does, with bound inputs and outputs."""
        if not isinstance(iobinding, IOBinding):
            raise TypeError(
                f"iobinding must come from the training session's io_binding(), but a {type(iobinding).__name__} was "
                "given"
            )
        if not iobinding.output_names:
            raise ValueError("no output is bound: call bind_output() first")
        iobinding.deliver(self._run(iobinding.output_names, iobinding.inputs, run_options, iobinding))

    def io_binding(self) -> IOBinding:
        """Returns an empty binding."""
        return IOBinding()

    def get_inputs(self) -> list[NodeArg]:
        """Returns the inputs of a training run: the model's, the learning rate and the loss scale."""
        inputs = [_node_arg(value) for value in self._model.model.graph.inputs if value.name in self._model.inputs]
        if self._parameters.training_optimizer_name:
            inputs.append(NodeArg(self._parameters.lr_params_feed_name, "tensor(float)", [1]))
        if self._feeds_scale:
            inputs.append(NodeArg(self._scale_name, "tensor(float)", [1]))
        return inputs

    def get_outputs(self) -> list[NodeArg]:
        """Returns the outputs of a training run: the model's, followed by those that training adds."""
        dtypes = {spec.name: spec.dtype for spec in self._session.graphs(True)[0].outputs}
        outputs = [_node_arg(value, dtypes.get(str(value.name), "")) for value in self._model.model.graph.outputs]
        if self._parameters.use_mixed_precision:
            outputs.append(NodeArg(_ALL_FINITE, "tensor(bool)", [1]))
        if self._parameters.set_gradients_as_graph_outputs:
            weights = self._session.parameters
            outputs += [
                NodeArg(f"{name}_grad", "tensor(float)", list(weights[name].shape))
                for name in self._session.gradients.tensors
            ]
        return outputs

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Returns an empty list, because the session owns the initializers and a feed can't replace them."""
        return []

    def set_providers(
        self,
        providers: Sequence[str | tuple[str, Mapping[str, Any]]] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Recreates the underlying sessions with other providers; keeps weights and optimizer state."""
        self._reset_session(providers, provider_options)

    def disable_fallback(self) -> None:
        """Makes a failure of an execution provider an error again, as it is at first."""
        self._falls_back = False

    def enable_fallback(self) -> None:
        """Makes the next failure of an execution provider a warning.

        The run is then repeated on CUDA, if another provider failed and there is a CUDA device, or else on the CPU, and
        the session stays there. Only the first failure is handled so. A failed run has changed nothing, so no gradient
        counts twice. With several processes a failure is an error, because the others have met it, too.
        """
        self._falls_back = True

    def get_optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Returns moments and update counts: weight -> ``Moment_1``, ``Moment_2``, ``Update_Count``."""
        return super().get_optimizer_state() if self._parameters.training_optimizer_name else {}

    def is_output_fp32_node(self, output_name: str) -> bool:
        """Returns whether training runs return an output in fp32 even in mixed precision.

        Raises:
            ValueError: If the output is unknown.
        """
        types = {entry.name: entry.type for entry in self.get_outputs()}
        if output_name not in types:
            raise ValueError(f"unknown output {output_name!r}: the outputs are {list(types)}")
        return types[output_name] == "tensor(float)"

    def _reset_session(
        self,
        providers: Sequence[str | tuple[str, Mapping[str, Any]]] | None,
        provider_options: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Recreates the underlying sessions; keeps the old ones if that fails."""
        state = self._trainer.state_dict()
        trainer = self._make_trainer(providers, provider_options)
        trainer.load_state_dict(state)
        self._trainer = trainer

    # onnxruntime's own class has a method of this name.
    def _create_inference_session(
        self, providers: Any, provider_options: Any, disabled_optimizers: Sequence[str] | None = None
    ) -> None:
        if disabled_optimizers:
            raise ValueError(
                f"disabled_optimizers {list(disabled_optimizers)} can't be chosen one by one, because most runs are on "
                "PyTorch's kernels, without ONNX Runtime's optimizers: leave it out, or give sess_options with "
                "graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL"
            )
        self._reset_session(providers, provider_options)

    def _make_trainer(self, providers: Any, provider_options: Any) -> ORTTrainer:
        """Returns a trainer for the model and the parameters, on the device that the providers select."""
        parameters = self._parameters
        device, settings = providers_of(providers, provider_options)
        chosen: Any = options_of(parameters, self._model, device, settings, self._sess_options)
        options = self._options(chosen)
        if parameters.loss_scale and not parameters.use_mixed_precision:
            options.refuse("loss_scale has no effect without use_mixed_precision: leave it at 0")
        description = describe_onnx(self._model, None, {}, parameters.loss_output_name)
        trainer = ORTTrainer(self._model, description.to_dict(), optimizer_of(parameters, self._model), options=options)
        trainer.prepare()
        if parameters.optimizer_initial_state:
            trainer.load_state_dict(state_to_begin_with(parameters, trainer))
        return trainer

    def _run(
        self,
        output_names: Sequence[str] | None,
        feed: Mapping[str, torch.Tensor],
        run_options: Any,
        binding: IOBinding | None = None,
    ) -> list[torch.Tensor]:
        """Runs the model once; repeats the run on other providers if one failed and the fallback is enabled."""
        try:
            return self._run_once(output_names, feed, run_options, binding)
        except provider_failure() as error:
            others = fallback_providers(self.get_providers())
            if not self._falls_back or not others or self._trainer.loop.strategy.world_size > 1:
                raise
            warn(f"{self.get_providers()[0]} failed: {error}; this run is repeated, and later ones run, on {others}")
            self.disable_fallback()
            self.set_providers(others)
            return self._run_once(output_names, feed, run_options, binding)

    def _run_once(
        self,
        output_names: Sequence[str] | None,
        feed: Mapping[str, torch.Tensor],
        run_options: Any,
        binding: IOBinding | None,
    ) -> list[torch.Tensor]:
        """Runs the model once, for training or evaluation."""
        if isinstance(output_names, str):
            raise TypeError(f"output_names must be a list of names, but {shown(output_names)} was given")
        training = bool(getattr(run_options, "training_mode", True))
        all_names = [entry.name for entry in self.get_outputs()]
        names = list(output_names or (all_names if training else self._model.outputs))
        unknown = [name for name in names if name not in all_names]
        if unknown:
            raise ValueError(f"unknown outputs {unknown}: the outputs are {all_names}")
        model_outputs = [name for name in dict.fromkeys(names) if name in self._model.outputs]
        if training:
            with Transaction(self._trainer.loop, joint=False):
                results = self._train(feed, model_outputs, names, run_options, binding)
        elif set(model_outputs) < set(names):
            raise ValueError(f"outputs {sorted(set(names) - set(model_outputs))} exist in training only")
        else:
            results = self._evaluate(feed, model_outputs)
        return [results[name] for name in names]

    def _evaluate(self, feed: Mapping[str, torch.Tensor], model_outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        inputs = {name: value for name, value in feed.items() if name not in self._extra_inputs()}
        return dict(zip(model_outputs, self._trainer.loop.evaluate((inputs,), {}, model_outputs), strict=True))

    def _train(
        self,
        feed: Mapping[str, torch.Tensor],
        model_outputs: Sequence[str],
        names: Sequence[str],
        run_options: Any,
        binding: IOBinding | None,
    ) -> dict[str, torch.Tensor]:
        """Runs forward and backward pass, and updates the weights at the end of an accumulation window."""
        parameters = self._parameters
        inputs = dict(feed)
        extra_values = {name: inputs.pop(name, None) for name in self._extra_inputs()}
        may_update = not getattr(run_options, "only_execute_path_to_fetches", False)
        missing = [
            name for name, value in extra_values.items() if value is None and (name == self._scale_name or may_update)
        ]
        if missing:
            raise TypeError(f"inputs {missing} are missing: pass a float32 array of shape [1] for each")
        extra = {name: number_of(name, value) for name, value in extra_values.items() if value is not None}
        rate = extra.get(parameters.lr_params_feed_name)
        loop, info, scaler = self._trainer.loop, self._trainer.train_step_info, self._trainer.loss_scaler
        window = loop.window
        if scaler is not None and self._feeds_scale:
            scale = extra[self._scale_name]
            began = window.share().scale
            if window.micro_batches and began != scale:
                raise ValueError(
                    f"the loss scale is {scale}, but the accumulation window began with {began}: change it after an "
                    "update"
                )
            scaler.loss_scale = scale
        call = loop.bind((inputs,), {}, model_outputs or [parameters.loss_output_name])
        if binding is not None:
            check_binding(
                binding, call.plan.runner.step, call.request.batch, self._session.gradients.tensors, _ALL_FINITE
            )
        gradients = {name: name.removesuffix("_grad") for name in names if name.endswith("_grad")}
        with uninterrupted():  # the pass and the update are one call here
            results = dict(zip(model_outputs, loop.backward(call), strict=False))
            held, factor = self._session.gradients.tensors, window.factor(1.0, 1.0)
            results |= {name: held[weight] / factor for name, weight in gradients.items() if weight in held}
            info.all_finite = True
            if may_update and window.complete:
                if rate is None:
                    loop.discard_gradients()
                else:
                    loop.end_window([rate])
        results[_ALL_FINITE] = torch.tensor([info.all_finite])
        return results

    def _extra_inputs(self) -> list[str]:
        """Returns the names of the inputs beside the model's: the learning rate and the loss scale."""
        rate = [self._parameters.lr_params_feed_name] * bool(self._parameters.training_optimizer_name)
        return [*rate, *[self._scale_name] * self._feeds_scale]
