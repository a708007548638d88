"""``ORTTrainer``: counts steps, asks the schedule for the learning rate and the scaler for the scale."""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import onnx
import torch
from torch import nn

from .amp import DynamicLossScaler, LossScaler
from .checkpoint import PathOrFile, load_checkpoint_file, save_checkpoint_file
from .errors import shown, warn
from .graph import TrainingGraph
from .graph.onnx_file import save_model
from .interrupts import uninterrupted
from .optim import LRScheduler, OptimizerConfig, rules
from .optim.step_info import TrainStepInfo
from .options import ModelDescription, ORTTrainerOptions
from .ownership import own_copies, owned_dtype
from .runtime import StepSession
from .runtime.engine import resolve_device, warn_about_mixed_flavours
from .sources import BORROWED, LOSSES, model_source
from .sources.onnx import OnnxModel
from .sources.torch import LossFunction
from .training.batch import Batch, to_tensor
from .training.debug_files import check_graph_paths, save_graphs
from .training.state import Layout, Restored, apply_to_session, collect, compare_keys, read, to_pytorch
from .training.step_graphs import StepGraphs
from .training.window import AccumulationWindow

__all__ = ["ORTTrainer"]

_NOT_INITIALIZED = (
    "ONNX Runtime training session is not initialized yet. Please run train_step or eval_step at least once before "
    "calling ORTTrainer.state_dict()."
)
_NO_COPY = (
    "an ORTTrainer can't be {}, as it owns sessions of ONNX Runtime: make another one with the same arguments and give "
    "it trainer.state_dict() by load_state_dict(), or use save_checkpoint() and load_checkpoint()"
)
_GRADIENT_WEIGHT = "gradient_weight"
Copied = TypeVar("Copied", LossScaler, LRScheduler)
Method = TypeVar("Method", bound=Callable[..., Any])


def _outside_inference_mode(method: Method) -> Method:
    """Runs a method outside ``torch.inference_mode``, whose tensors could not be changed by later steps."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False):
            return method(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


class ORTTrainer:
    """Trains a PyTorch model on ONNX Runtime.

    The first :meth:`train_step` (or :meth:`prepare`) exports PyTorch's own forward and backward pass as one ONNX
    graph. From then on the trainer owns copies of the weights; the model that was passed in keeps its own, while modes,
    settings and ``requires_grad`` of its parts go on having their effect (docs/models.md). To put
    trained weights back, call ``model.load_state_dict(trainer.state_dict(pytorch_format=True))``.

    Args:
        model: The model. With ``loss_fn`` it returns the prediction, without it the loss is one of its outputs. Either
            a PyTorch module, or an ONNX model: a ``ModelProto``, which is not changed, or the path of a file (with
            external data, if it has any). ONNX models need onnxruntime-training; all their floating-point initializers
            are trained but those in ``utils.frozen_weights``.
        model_desc: ``{"inputs": [(name, shape), ...], "outputs": [(name, shape[, is_loss]), ...]}``. A shape lists
            sizes; a str in it names a dimension whose size may change from step to step. Input names are those of the
            arguments of ``model.forward``; with ``loss_fn`` the last input is the label and has a free name. Outputs
            come in the order (loss,) + outputs of the model; the ones at the end may be left out. Or ``"auto"``: it is
            derived from the first batch and one forward pass, on copies of both. Then the first dimension of all inputs
            is dynamic, and every dimension of integer inputs; another dimension becomes so when a batch comes with
            another size.
        optim_config: An ``SGDConfig``, ``AdamConfig``, ``AdamWConfig``, ``LambConfig`` or ``LionConfig``.
        loss_fn: A function or module (prediction, label) -> scalar loss, or the name of one: ``cross_entropy``,
            ``mse``, ``l1``, ``smooth_l1``, ``huber``, ``nll`` or ``bce_with_logits``. The prediction is what the model
            returns; of an ONNX model, its first output.
        options: Settings; None for the defaults.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If the description is invalid, or a name in it, in the parameter groups or in
            ``utils.frozen_weights`` is not the model's.

    Example:
        >>> trainer = ORTTrainer(model, model_desc, optim.AdamConfig(lr=1e-3), loss_fn=loss_fn)
        >>> loss, prediction = trainer.train_step(x, y)
    """

    @_outside_inference_mode
    def __init__(
        self,
        model: nn.Module | OnnxModel | onnx.ModelProto | str | os.PathLike[str],
        model_desc: Mapping[str, Any] | str,
        optim_config: OptimizerConfig,
        loss_fn: LossFunction | str | None = None,
        options: ORTTrainerOptions | None = None,
    ) -> None:
        warn_about_mixed_flavours()
        if not isinstance(optim_config, OptimizerConfig):
            raise TypeError(
                f"optim_config must be a config of ort_trainer.optim ({', '.join(sorted(rules.__all__))}), but "
                f"{shown(optim_config)} was given"
            )
        loss_fn = LOSSES.get(loss_fn, loss_fn) if isinstance(loss_fn, str) else loss_fn
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(
                f"loss_fn must be a function (prediction, label) -> loss, or one of {sorted(LOSSES)}, but "
                f"{shown(loss_fn)} "
                "was given"
            )
        if options is None:
            options = ORTTrainerOptions()
        if not isinstance(options, ORTTrainerOptions):
            raise TypeError(
                f"options must be ORTTrainerOptions, but {shown(options)} was given: wrap the dict in the class"
            )
        self.options = options
        self.optim_config = optim_config
        self.loss_fn = loss_fn
        self._device = resolve_device(options.device.id, options.is_given("device.id"))
        with BORROWED:
            self._source = model_source(model, loss_fn, optim_config, options)
        check_graph_paths(options.debug.graph_save_paths.to_dict())
        self._graphs = StepGraphs(self._source, model_desc, self._device)
        self._window = AccumulationWindow(options.batch.gradient_accumulation_steps, options.batch.gradient_reduction)
        self._check_gradient_weight()
        # Copies, because they have state: options can serve several trainers.
        self._loss_scaler = self._make_loss_scaler()
        self._lr_scheduler = _own_copy(options.lr_scheduler, "lr_scheduler")
        self._train_step_info = TrainStepInfo(optim_config)
        hyper = {
            name: optim_config.hyper_parameters(optim_config.group_of(*names))
            for name, names in self._source.names_of_trainable().items()
        }
        self._layout = Layout(
            tensors=self._source.saved,
            transient=self._source.transient,
            canonical=self._source.canonical,
            trainable=self._source.trainable,
            rule=optim_config.rule,
            slots={name: optim_config.rule.slots_for(values) for name, values in hyper.items()},
            counted={name for name, values in hyper.items() if optim_config.rule.keeps_count(values)},
            device=self._device,
        )
        self._seed = torch.initial_seed()
        self._pending: Restored | None = None
        self._pending_dict: Mapping[str, Any] = {}
        # A PyTorch model may still change until the first step; an ONNX model is what it is, and has its state at once.
        self._session = self._make_session() if self._source.fixed else None

    @property
    def model_desc(self) -> ModelDescription:
        """The model description.

        Raises:
            RuntimeError: Before the first batch, where it is derived from that.
        """
        return self._graphs.description

    @property
    def train_step_info(self) -> TrainStepInfo:
        """Where training stands. Assign ``train_step_info.fetches`` to choose the outputs that steps return."""
        return self._train_step_info

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The trainer's own loss scaler; None without mixed precision."""
        return self._loss_scaler

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """The trainer's own learning-rate schedule; None if there is none."""
        return self._lr_scheduler

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per weight update; at first the option ``batch.gradient_accumulation_steps``.

        It can be assigned between two windows, so right after an update or before the first step; a checkpoint keeps
        what was assigned.

        Raises:
            RuntimeError: If it is assigned inside a window.
            TypeError, ValueError: If the value is no int, or less than 1.
        """
        return self._window.size

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._window.size = steps

    @property
    def session(self) -> StepSession | None:
        """The session that owns the tensors; None before the first step, if the model is a PyTorch model."""
        return self._session

    @_outside_inference_mode
    def prepare(self, sample_batch: Any = None) -> None:
        """Exports the model now instead of in the first step; trains nothing.

        Args:
            sample_batch: A batch as ``train_step`` takes it: a tuple or list of inputs, a dict of them, or one tensor.
                An ONNX model with its loss inside needs none.

        Raises:
            ExportError: If the model can't be exported, or an ONNX model not be differentiated.
            RuntimeError: If a batch is needed and not given.
        """
        batch = self._graphs.blank_batch() if sample_batch is None else sample_batch
        self._prepare(self._graphs.bind((batch,), {}), training=True)

    @_outside_inference_mode
    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward and backward pass, and updates the weights at the end of an accumulation window.

        Args:
            *args: Inputs in the order of the model description, or one dict, list or tuple that holds them all.
            **kwargs: Inputs by name. With ``batch.gradient_reduction`` "weighted" also ``gradient_weight``: a positive
                number, by which this micro-batch counts in the mean of the window's gradients.

        Returns:
            The described outputs (or ``train_step_info.fetches``) as a list of new tensors; a bare tensor where it is
            only one. The loss is that of this micro-batch, not scaled, with the weights before the update.

        Raises:
            TypeError, ValueError: If the batch does not fit the description. Nothing has been counted or changed then.
            ExportError: In the first step, if the model can't be exported.
        """
        weight = self._window.checked_weight(self._take_gradient_weight(kwargs))
        batch = self._graphs.bind(args, kwargs)
        names = self._fetches()
        session = self._prepare(batch, training=True)
        with uninterrupted():
            outputs = self._step(session, batch, names, weight)
        return outputs[0] if len(outputs) == 1 else outputs

    def _step(self, session: StepSession, batch: Batch, names: list[str], weight: float) -> list[torch.Tensor]:
        window, info, scaler = self._window, self._train_step_info, self._loss_scaler
        rates = self._next_learning_rates()
        scale = scaler.loss_scale if scaler is not None else 1.0
        factor = window.factor(weight, scale)
        outputs = session.train_step(list(batch.values()), loss_scale=factor, names=names)
        window.add(weight, scale)
        info.step += 1
        if window.complete:
            session.set_learning_rate(*rates)
            info.all_finite = session.optimizer_step(divisor=window.divisor, check_finite=scaler is not None)
            session.lazy_reset_grad()
            window.reset()
            try:
                self._update_scale()
            finally:
                info.optimization_step += int(info.all_finite)
        return outputs

    @_outside_inference_mode
    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model and the loss in evaluation mode: dropout off, batch norm with its running statistics.

        Nothing changes: no weight, no counter, no random number of training. With ``train_step_info.fetches``, inputs
        that the fetched outputs do not need (the label, for a prediction) may be left out.

        Args:
            *args: As for :meth:`train_step`.
            **kwargs: As for :meth:`train_step`.

        Returns:
            As :meth:`train_step`.
        """
        batch = self._graphs.bind(args, kwargs, partly=bool(self._train_step_info.fetches))
        names = self._fetches()
        session = self._prepare(batch, training=False)
        inputs = [batch.get(name) for name in self.model_desc.input_names]
        outputs = session.eval_step(inputs, names=names)
        return outputs[0] if len(outputs) == 1 else outputs

    @_outside_inference_mode
    def get_parameter(self, name: str) -> torch.Tensor:
        """Returns a copy of a parameter, trained or not, on the CPU; a tied one has several names.

        Before the first step it is the value that training will begin with.

        Raises:
            ValueError: If the model has no such parameter.
        """
        canonical = self._parameter_name(name)
        if self._session is not None:
            return self._session.parameters[canonical].cpu().clone()
        waiting = {} if self._pending is None else self._pending.tensors
        with BORROWED:
            value = waiting.get(canonical, self._source.parameters[canonical]).detach()
            return value.to("cpu", owned_dtype(value.dtype), copy=True)

    @_outside_inference_mode
    def set_parameter(self, name: str, value: Any) -> None:
        """Replaces the value of a parameter by a copy of a tensor or array; its moments stay as they are.

        Raises:
            RuntimeError: Before the first step: change the model itself then, or call :meth:`prepare` first.
            TypeError, ValueError: If the model has no such parameter, or shape or dtype differ.
        """
        canonical = self._parameter_name(name)
        session = self._begun("set_parameter")
        session.parameters[canonical].copy_(_like(session.parameters[canonical], name, value))

    @_outside_inference_mode
    def get_gradient(self, name: str) -> torch.Tensor | None:
        """Returns a copy of the gradient that the micro-batches of the window so far give a parameter, on the CPU.

        It is what an update right now would use, before clipping: without the loss scale, and reduced as
        ``batch.gradient_reduction`` says. None where there is none: before the first step, right after an update, and
        for parameters that are not trained or that the loss does not depend on.

        Raises:
            ValueError: If the model has no such parameter.
        """
        canonical = self._parameter_name(name)
        gradients = {} if self._session is None else self._session.present_gradients()
        if canonical not in gradients:
            return None
        return gradients[canonical].cpu() / self._window.divisor

    @_outside_inference_mode
    def set_gradient(self, name: str, value: Any) -> None:
        """Replaces the gradient of the window so far by a copy of a tensor or array, in the form of get_gradient.

        Raises:
            RuntimeError: If no micro-batch of a window has been run, so that the next one would overwrite it.
            TypeError, ValueError: If the parameter is unknown or not trained, or shape or dtype differ.
        """
        canonical = self._parameter_name(name)
        if canonical not in self._source.trainable:
            raise ValueError(f"{name!r} is not trained, so it has no gradient")
        session = self._begun("set_gradient")
        if not self._window.micro_batches:
            raise RuntimeError(
                "set_gradient works inside an accumulation window, after its first micro-batch and before the update: "
                "now there are no gradients"
            )
        checked = _like(session.parameters[canonical], name, value)
        session.restore_gradients({**session.present_gradients(), canonical: checked * self._window.divisor})

    @_outside_inference_mode
    def state_dict(self, pytorch_format: bool = False) -> dict[str, Any]:
        """Returns the state of the trainer as copies on the CPU.

        Args:
            pytorch_format: True for the weights and buffers alone, as ``model.state_dict()`` has them: name -> torch
                tensor. False for everything, as nested dicts with numpy arrays: ``model`` (``full_precision``),
                ``optimizer`` (per weight what its rule keeps, such as ``Moment_1``, and ``Update_Count``; LAMB
                ``shared_optimizer_state``), ``trainer_options``, ``train_step_info``, ``window`` (the
                accumulation window) and its ``gradients``, ``random``, and ``loss_scaler`` and ``lr_scheduler`` where
                there are any. Update counts are updates done plus 1, as they always were.

        Returns:
            The state. Before the first step there is none: a warning is given, and the state that was loaded and waits
            for the first step is returned, or an empty dict.
        """
        if self._session is None:
            warn(_NOT_INITIALIZED)
            return self._pending_dict  # type: ignore[return-value]
        if pytorch_format:
            return to_pytorch(self._session, self._layout)
        return self._collect(self._session, include_optimizer=True, copy_arrays=True)

    @_outside_inference_mode
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Restores what :meth:`state_dict` returned, in either format; also before the first step.

        Everything is checked first: if anything does not fit, nothing has changed.

        Args:
            state_dict: The state, or the state dict of a PyTorch model, which restores weights and buffers only.
            strict: Whether names must match exactly; if not, only what both have is restored.

        Raises:
            RuntimeError: If names do not match and ``strict`` is True.
            TypeError, ValueError: If a value has a wrong type, shape, dtype, or belongs to another optimizer.
        """
        restored = read(state_dict, self._layout, self._window, strict)
        complete = restored.window is not None and "window" in state_dict
        scaler = _with_state(self._loss_scaler, restored.loss_scaler, "loss_scaler", strict, complete)
        scheduler = _with_state(self._lr_scheduler, restored.lr_scheduler, "lr_scheduler", strict, complete)
        with uninterrupted():
            if self._session is not None:
                apply_to_session(restored, self._session)
            else:
                self._pending, self._pending_dict = restored.over(self._pending), state_dict
            self._loss_scaler, self._lr_scheduler = scaler, scheduler
            self._window = restored.window or self._window
            info = self._train_step_info
            info.step = info.step if restored.step is None else restored.step
            if restored.optimization_step is not None:
                info.optimization_step = restored.optimization_step

    def save_checkpoint(
        self,
        path: PathOrFile,
        user_dict: Mapping[str, Any] | None = None,
        include_optimizer_states: bool = True,
        overwrite: bool = False,
    ) -> None:
        """Writes the whole state to one safetensors file, atomically.

        Args:
            path: A path, or an open binary file.
            user_dict: Values of your own that :meth:`load_checkpoint` gives back: dicts with str keys, lists, numbers,
                strings, bools, None, tensors and numpy arrays. (Tuples come back as lists.)
            include_optimizer_states: Whether to write moments and accumulated gradients too.
            overwrite: Whether a file that is there already may be replaced.

        Raises:
            RuntimeError: Before the first step.
            FileExistsError: If the path exists and ``overwrite`` is False.
            FileNotFoundError: If the folder does not exist.
            TypeError: If ``user_dict`` holds something else.
        """
        session = self._started("save_checkpoint")
        state = self._collect(session, include_optimizer=include_optimizer_states, copy_arrays=False)
        save_checkpoint_file(path, state, {} if user_dict is None else user_dict, overwrite)

    def load_checkpoint(self, *paths: PathOrFile, strict: bool = True) -> dict[str, Any]:
        """Restores a checkpoint; also before the first step.

        HDF5 files of the legacy ``ORTTrainer`` are read too (with the extra ``legacy``), but for the user's dict in
        them, which is a pickle.

        Args:
            *paths: The one file, as a path or an open binary file; of a legacy run with ZeRO the files of all ranks.
            strict: As for :meth:`load_state_dict`.

        Returns:
            The user's dict.

        Raises:
            FileNotFoundError: If there is no such file.
            CheckpointError: If the file is damaged or no checkpoint. Nothing has changed then.
            ImportError: If it is a legacy file and h5py is not installed.
            RuntimeError, TypeError, ValueError: As :meth:`load_state_dict`.
        """
        if not paths:
            raise ValueError("Expected number of files to load: 1, got 0")
        state, user_dict = load_checkpoint_file(*paths)
        self.load_state_dict(state, strict)
        return user_dict

    def save_as_onnx(self, path: str | os.PathLike[str]) -> None:
        """Writes the evaluation graph with the current weights: what :meth:`eval_step` computes, with loss and label.

        Dropout and batch norm are in their inference form. Inputs, outputs and dynamic dimensions have the names of the
        model description; weights have their PyTorch names. A file that is there is replaced.

        Args:
            path: Where to write. Weights beyond what one protobuf file holds go into ``<path>.data`` beside it.

        Raises:
            RuntimeError: Before the first step.
            ValueError: If the path is empty.
            FileNotFoundError: If the folder does not exist.
        """
        self._save_onnx(path, "save_as_onnx", self.model_desc.output_names)

    def export_for_inference(self, path: str | os.PathLike[str]) -> None:
        """Writes the same graph as :meth:`save_as_onnx` without the loss and without inputs that only the loss needs.

        Raises:
            ValueError: If the loss is the only described output.
        """
        names = [output.name for output in self.model_desc.outputs if not output.is_loss]
        if not names:
            raise ValueError(
                "model_desc describes no output but the loss, so nothing is left to infer: describe the prediction too"
            )
        self._save_onnx(path, "export_for_inference", names)

    @_outside_inference_mode
    def _save_onnx(self, path: str | os.PathLike[str], method: str, names: Sequence[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path must be a str or a path, but a {type(path).__name__} was given")
        if not os.fspath(path):
            raise ValueError("path must not be empty")
        session = self._started(method)
        graph = self._graph_for(session, self._graphs.blank_batch(), training=False)
        if list(names) != [spec.name for spec in graph.outputs]:
            graph = graph.pruned(names)
        save_model(graph, session.parameters, session.buffers, self._source.trainable, Path(path))

    def __copy__(self) -> Any:
        raise TypeError(_NO_COPY.format("copied"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(_NO_COPY.format("copied"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(_NO_COPY.format("pickled"))

    def _make_loss_scaler(self) -> LossScaler | None:
        precision = self.options.mixed_precision
        if not precision.enabled:
            return None
        given = _own_copy(precision.loss_scaler, "mixed_precision.loss_scaler")
        if given is not None:
            _check_loss_scaler(given)
        # bfloat16 has the exponents of fp32, so its gradients do not vanish.
        return DynamicLossScaler() if given is None and precision.dtype == "float16" else given

    def _fetches(self) -> list[str]:
        names = self.model_desc.output_names
        fetches = self._train_step_info.fetches
        unknown = [name for name in fetches if name not in names]
        if unknown or len(set(fetches)) < len(fetches):
            raise RuntimeError(
                f"The specified fetches list contains invalid output names: {list(fetches)}; each of {names} may be in "
                "it once"
            )
        return list(fetches) or names

    def _prepare(self, batch: Batch, training: bool) -> StepSession:
        """Makes sure that there is a session with a graph that accepts the batch, and returns it."""
        if not self._graphs.has_started:
            return self._start(batch, training)
        session = self._session
        assert session is not None
        self._graph_for(session, batch, training)
        return session

    def _start(self, batch: Batch, training: bool) -> StepSession:
        """Makes session and first graph; keeps them last, so that a failure leaves the trainer as it was."""
        if len(batch) < len(self.model_desc.inputs):
            missing = [name for name in self.model_desc.input_names if name not in batch]
            raise TypeError(f"inputs {missing} are missing: the first step needs all inputs, to export the model")
        session = self._session or self._make_session()
        if self.options.debug.check_model_export:
            self._graphs.check_export(session, batch)
        self._graph_for(session, batch, training)
        with uninterrupted():
            if self._pending is not None:
                apply_to_session(self._pending, session)
                self._pending, self._pending_dict = None, {}
            self._graphs.started(batch)
            self._session = session
        return session

    def _make_session(self) -> StepSession:
        options = self.options
        with BORROWED:  # an export puts others into the model for a while
            parameters, buffers = self._source.parameters, self._source.buffers
            owned = own_copies({**parameters, **buffers}, parameters, self._device)
        return StepSession(
            {name: owned[name] for name in parameters},
            {name: owned[name] for name in buffers},
            self._source.names_of_trainable(),
            self.optim_config,
            clip=options.utils.grad_norm_clip,
            max_norm=options.utils.max_grad_norm,
            device=self._device,
            given_options=options.session_options,
            deterministic=options.debug.deterministic_compute,
            provider_options=options.provider_options,
            mem_limit=options.device.mem_limit,
            seed=self._seed,
        )

    def _graph_for(self, session: StepSession, batch: Batch, training: bool) -> TrainingGraph:
        first = training and not session.graphs(True)
        graph = self._graphs.graph_for(session, batch, training)
        if first:
            save_graphs(
                self.options.debug.graph_save_paths.to_dict(),
                graph,
                session,
                self.optim_config,
                accumulate=self._window.size > 1,
                check_finite=self._loss_scaler is not None,
            )
        if self._loss_scaler is not None and graph.loss_scale is not None:
            self._loss_scaler.input_name = graph.loss_scale.name
        return graph

    def _check_gradient_weight(self) -> None:
        if self._window.reduction == "weighted" and _GRADIENT_WEIGHT in self._graphs.possible_inputs():
            raise ValueError(
                f"with batch.gradient_reduction 'weighted' train_step takes {_GRADIENT_WEIGHT!r} for itself, but the "
                "model has an input of that name: rename the input"
            )

    def _take_gradient_weight(self, kwargs: dict[str, Any]) -> Any:
        if self._window.reduction == "weighted":
            return kwargs.pop(_GRADIENT_WEIGHT, None)
        if _GRADIENT_WEIGHT in kwargs and _GRADIENT_WEIGHT not in self._graphs.possible_inputs():
            raise TypeError(
                f"{_GRADIENT_WEIGHT} was given, but batch.gradient_reduction is {self._window.reduction!r}: set it to "
                "'weighted'"
            )
        return None

    def _next_learning_rates(self) -> list[float]:
        """Returns one learning rate for all parameters, or one per group and one for the others."""
        config = self.optim_config
        if self._lr_scheduler is None:
            return config.learning_rates
        upcoming = copy.copy(self._train_step_info)
        upcoming.step += 1
        scheduler, before = self._lr_scheduler, self._lr_scheduler.get_last_lr()
        given = scheduler._step(upcoming)
        try:
            return self._checked_rates(given, type(scheduler).__name__)
        except (TypeError, ValueError):
            scheduler._last_lr = before  # a refused rate was never in use, and no checkpoint could keep it
            raise

    def _checked_rates(self, given: list[Any], name: str) -> list[float]:
        """Returns what get_lr() of a schedule returned as floats."""
        config = self.optim_config
        try:
            rates = [float(rate) for rate in given]
        except (TypeError, ValueError):
            raise TypeError(
                f"get_lr() of {name} must return a list of numbers, but it returned {shown(given)}"
            ) from None
        groups = len(config.learning_rates)
        if len(rates) not in (1, groups):
            raise ValueError(
                f"get_lr() of {name} must return one learning rate"
                + (f", or {groups}: one per parameter group and one for all others" if groups > 1 else "")
                + f", but it returned {shown(given)}"
            )
        if len(rates) < groups and config.has_group_rates:
            raise ValueError(
                f"get_lr() of {name} returned one learning rate, {shown(given)}, but parameter groups have their "
                "own, which "
                f"it would override: return {groups}, from train_step_info.optimizer_config.learning_rates, or leave "
                "'lr' out of the groups"
            )
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise ValueError(
                f"get_lr() of {name} must return finite numbers, at least 0, but it returned {shown(given)}"
            )
        return rates

    def _parameter_name(self, name: str) -> str:
        """Returns the first name of a parameter."""
        if not isinstance(name, str):
            raise TypeError(
                f"the name of a parameter must be a str, but {shown(name)} ({type(name).__name__}) was given"
            )
        source = self._source
        if source.canonical.get(name) not in source.parameters:
            names = sorted(own for own, first in source.canonical.items() if first in source.parameters)
            raise ValueError(f"{name!r} is no parameter of the model; it has {names}")
        return source.canonical[name]

    def _update_scale(self) -> None:
        if self._loss_scaler is not None:
            scale = self._loss_scaler.update(self._train_step_info)
            if scale is not None:
                self._loss_scaler.loss_scale = scale

    def _begun(self, method: str) -> StepSession:
        if self._session is None:
            raise RuntimeError(
                f"training has not begun: call prepare(), train_step() or eval_step() before {method}(), or change the "
                "model itself"
            )
        return self._session

    def _started(self, method: str) -> StepSession:
        if self._session is None:
            raise RuntimeError(
                f"there is nothing to save yet: call prepare(), train_step() or eval_step() before {method}()"
            )
        return self._session

    def _collect(self, session: StepSession, include_optimizer: bool, copy_arrays: bool) -> dict[str, Any]:
        return collect(
            session,
            self._layout,
            self._window,
            step=self._train_step_info.step,
            optimization_step=self._train_step_info.optimization_step,
            mixed_precision=self.options.mixed_precision.enabled,
            loss_scaler=None if self._loss_scaler is None else self._loss_scaler.state_dict(),
            lr_scheduler=None if self._lr_scheduler is None else self._lr_scheduler.state_dict(),
            include_optimizer=include_optimizer,
            copy=copy_arrays,
        )


def _like(current: torch.Tensor, name: str, value: Any) -> torch.Tensor:
    """Returns a tensor or array on the device of a parameter, after a check of its shape and dtype."""
    given = to_tensor(name, value)
    given = given.to(owned_dtype(given.dtype))
    if given.shape != current.shape or given.dtype != current.dtype:
        raise ValueError(
            f"{name!r} has shape {list(current.shape)} and dtype {current.dtype}, but {list(given.shape)} and "
            f"{given.dtype} were given"
        )
    return given.to(current.device)


def _own_copy(given: Copied | None, option: str) -> Copied | None:
    try:
        return copy.deepcopy(given)
    except Exception as error:
        raise TypeError(
            f"the trainer works on a copy of {option}, and {type(given).__name__} can't be copied: give it a "
            f"__deepcopy__ ({error})"
        ) from error


def _check_loss_scaler(scaler: LossScaler) -> None:
    """Checks what a user's own scaler needs, which would otherwise show after the first update only."""
    name = type(scaler).__name__
    if type(scaler).update is LossScaler.update:
        raise TypeError(
            f"mixed_precision.loss_scaler: {name} does not say how the scale changes: override update(), or keep the "
            "scale constant with DynamicLossScaler(automatic_update=False, loss_scale=...)"
        )
    try:
        scaler.loss_scale  # noqa: B018
    except AttributeError as error:
        raise TypeError(
            f"mixed_precision.loss_scaler: {name} has no scale yet: call super().__init__(loss_scale) in its __init__"
        ) from error


def _with_state(
    current: Copied | None, state: Mapping[str, Any] | None, key: str, strict: bool, complete: bool
) -> Copied | None:
    """Returns a copy of a scaler or schedule with a loaded state; the current one where there is none to load.

    Args:
        current: The trainer's own.
        state: The state to load.
        key: Its key in the state dict.
        strict: Whether the state must have exactly the keys that the current one has.
        complete: Whether the state dict would have the key if there had been a state.
    """
    if current is None or state is None:
        if complete and (current is None) != (state is None):
            what = f"Missing key: {key} in" if state is None else f"The trainer has none, so it leaves out {key} of"
            warn(f"{what} state_dict")
        return current
    own = current.state_dict()
    compare_keys(own, state, strict, f"state_dict[{key}]")
    restored = copy.deepcopy(current)
    try:
        restored.load_state_dict(state if strict else {**own, **state})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"state_dict[{key}] does not fit {type(current).__name__}: {error!r}") from error
    return restored
