"""``ORTTrainer``: counts steps, asks the schedule for the learning rate and the scaler for the scale."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from .amp import DynamicLossScaler, LossScaler
from .batch import Batch, bind_batch, to_tensor, unpack
from .checkpoint import PathOrFile, load_checkpoint_file, save_checkpoint_file
from .engine import maximum_opset, resolve_device, warn_about_mixed_flavours
from .frontend import (
    ExportedStep,
    GraphBuilder,
    LossFunction,
    RecomputeOptions,
    canonical_names,
    check_signature,
    describe,
    name_sample,
)
from .graph import TrainingGraph
from .graph.onnx_file import save_model
from .memory import return_freed_memory
from .model_desc import ModelDescription
from .optim import _LRScheduler, _OptimizerConfig
from .options import ORTTrainerOptions
from .session import TrainingSession
from .state import Layout, Restored, apply_to_session, collect, read, to_pytorch
from .step_info import TrainStepInfo

__all__ = ["ORTTrainer"]

_log = logging.getLogger(__name__)
_NOT_INITIALIZED = (
    "ONNX Runtime training session is not initialized yet. Please run train_step or eval_step at least once before "
    "calling ORTTrainer.state_dict()."
)
# Each graph for other sizes costs an export; a model that fixes a dimension must not export without end.
_MAXIMUM_GRAPHS = 16
Copied = TypeVar("Copied", LossScaler, _LRScheduler)


class ORTTrainer:
    """Trains a PyTorch model on ONNX Runtime.

    The first :meth:`train_step` (or :meth:`prepare`) exports PyTorch's own forward and backward pass as one ONNX
    graph. From then on the trainer owns copies of the weights; the model that was passed in keeps its own. To put
    trained weights back, call ``model.load_state_dict(trainer.state_dict(pytorch_format=True))``.

    Args:
        model: The model. With ``loss_fn`` it returns the prediction, without it the loss is one of its outputs.
        model_desc: ``{"inputs": [(name, shape), ...], "outputs": [(name, shape[, is_loss]), ...]}``. A shape lists
            sizes; a str in it names a dimension whose size may change from step to step. Input names are those of the
            arguments of ``model.forward``; with ``loss_fn`` the last input is the label and has a free name. Outputs
            come in the order (loss,) + outputs of the model; the ones at the end may be left out. Or ``"auto"``: it is
            derived from the first batch and one forward pass. Then the first dimension of all inputs is dynamic, and
            every dimension of integer inputs; another dimension becomes so when a batch comes with another size.
        optim_config: An ``SGDConfig``, ``AdamConfig`` or ``LambConfig``.
        loss_fn: A function or module (prediction, label) -> scalar loss.
        options: Settings; None for the defaults.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If the description is invalid, or a name in it, in the parameter groups or in
            ``utils.frozen_weights`` is not the model's.

    Example:
        >>> trainer = ORTTrainer(model, model_desc, optim.AdamConfig(lr=1e-3), loss_fn=loss_fn)
        >>> loss, prediction = trainer.train_step(x, y)
    """

    def __init__(
        self,
        model: nn.Module,
        model_desc: Mapping[str, Any] | str,
        optim_config: _OptimizerConfig,
        loss_fn: LossFunction | None = None,
        options: ORTTrainerOptions | None = None,
    ) -> None:
        warn_about_mixed_flavours()
        if not isinstance(model, nn.Module):
            hint = ": ONNX models are not supported yet" if type(model).__name__ == "ModelProto" else ""
            raise TypeError(f"model must be a torch.nn.Module, but a {type(model).__name__} was given{hint}")
        if not isinstance(optim_config, _OptimizerConfig):
            raise TypeError(
                "optim_config must be an SGDConfig, AdamConfig or LambConfig from ort_trainer.optim, but "
                f"{optim_config!r} was given"
            )
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function (prediction, label) -> loss, but {loss_fn!r} was given")
        if options is None:
            options = ORTTrainerOptions()
        if not isinstance(options, ORTTrainerOptions):
            raise TypeError(f"options must be ORTTrainerOptions, but {options!r} was given: wrap the dict in the class")
        self.options = options
        self.optim_config = optim_config
        self.loss_fn = loss_fn
        self._model = model
        self._device = resolve_device(options.device.id, options.is_given("device.id"))
        self._canonical = canonical_names(model)
        self._trainable = self._find_trainable()
        self._description: ModelDescription | None = None
        self._builder: GraphBuilder | None = None
        self._narrower: ModelDescription | None = None
        self._check_opset()
        if not isinstance(model_desc, str):
            self._set_description(ModelDescription(model_desc))
        elif model_desc != "auto":
            raise ValueError(f"model_desc must be a dict or 'auto', but {model_desc!r} was given")
        # Copies, because they have state: options can serve several trainers.
        self._loss_scaler = self._make_loss_scaler()
        self._lr_scheduler = _own_copy(options.lr_scheduler, "lr_scheduler")
        self._train_step_info = TrainStepInfo(optim_config)
        self._layout = self._make_layout()
        self._session: TrainingSession | None = None
        self._sample: dict[str, tuple[torch.Size, torch.dtype]] | None = None
        self._seed = torch.initial_seed()
        self._pending: Restored | None = None
        self._pending_dict: Mapping[str, Any] = {}

    @property
    def model_desc(self) -> ModelDescription:
        """The model description.

        Raises:
            RuntimeError: Before the first batch, where it is derived from that.
        """
        if self._description is None:
            raise RuntimeError(
                "model_desc='auto' is derived from the first batch: call prepare(), train_step() or eval_step() first"
            )
        return self._description

    @property
    def train_step_info(self) -> TrainStepInfo:
        """Where training stands. Assign ``train_step_info.fetches`` to choose the outputs that steps return."""
        return self._train_step_info

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The trainer's own loss scaler; None without mixed precision."""
        return self._loss_scaler

    @property
    def lr_scheduler(self) -> _LRScheduler | None:
        """The trainer's own learning-rate schedule; None if there is none."""
        return self._lr_scheduler

    @property
    def session(self) -> TrainingSession | None:
        """The session that owns the tensors; None before the first step."""
        return self._session

    def prepare(self, sample_batch: Any) -> None:
        """Exports the model now instead of in the first step; trains nothing.

        Args:
            sample_batch: A batch as ``train_step`` takes it: a tuple or list of inputs, a dict of them, or one tensor.

        Raises:
            ExportError: If the model can't be exported.
        """
        self._prepare(self._bind((sample_batch,), {}), training=True)

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward and backward pass, and updates the weights at the end of an accumulation window.

        Args:
            *args: Inputs in the order of the model description, or one dict, list or tuple that holds them all.
            **kwargs: Inputs by name.

        Returns:
            The described outputs (or ``train_step_info.fetches``) as a list of new tensors; a bare tensor where it is
            only one. The loss is that of this micro-batch, not scaled, with the weights before the update.

        Raises:
            TypeError, ValueError: If the batch does not fit the description. Nothing has been counted or changed then.
            ExportError: In the first step, if the model can't be exported.
        """
        batch = self._bind(args, kwargs)
        names = self._fetches()
        session = self._prepare(batch, training=True)
        info = self._train_step_info
        learning_rate = self._next_learning_rate()
        scaler = self._loss_scaler
        scale = scaler.loss_scale if scaler is not None else 1.0
        outputs = session.train_step(list(batch.values()), loss_scale=scale, names=names)
        info.step += 1
        steps = self.options.batch.gradient_accumulation_steps
        if info.step % steps == 0:
            session.set_learning_rate(learning_rate)
            info.all_finite = session.optimizer_step(divisor=steps * scale, check_finite=scaler is not None)
            session.lazy_reset_grad()
            try:
                self._update_scale()
            finally:
                info.optimization_step += int(info.all_finite)
        return outputs[0] if len(outputs) == 1 else outputs

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
        batch = self._bind(args, kwargs, partly=bool(self._train_step_info.fetches))
        names = self._fetches()
        session = self._prepare(batch, training=False)
        inputs = [batch.get(name) for name in self.model_desc.input_names]
        outputs = session.eval_step(inputs, names=names)
        return outputs[0] if len(outputs) == 1 else outputs

    def state_dict(self, pytorch_format: bool = False) -> dict[str, Any]:
        """Returns the state of the trainer as copies on the CPU.

        Args:
            pytorch_format: True for the weights and buffers alone, as ``model.state_dict()`` has them: name -> torch
                tensor. False for everything, as nested dicts with numpy arrays: ``model`` (``full_precision``),
                ``optimizer`` (per weight ``Moment_1``, ``Moment_2``; Adam ``Update_Count``; LAMB
                ``shared_optimizer_state``), ``trainer_options``, ``train_step_info``, ``gradients`` (inside an
                accumulation window), ``random``, and ``loss_scaler`` and ``lr_scheduler`` where there are any. Update
                counts are updates done plus 1, as they always were.

        Returns:
            The state. Before the first step there is none: a warning is given, and the state that was loaded and waits
            for the first step is returned, or an empty dict.
        """
        if self._session is None:
            warnings.warn(_NOT_INITIALIZED, UserWarning, stacklevel=2)
            return self._pending_dict  # type: ignore[return-value]
        if pytorch_format:
            return to_pytorch(self._session, self._layout)
        return self._collect(self._session, include_optimizer=True, copy_arrays=True)

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
        restored = read(state_dict, self._layout, strict)
        scaler = _with_state(self._loss_scaler, restored.loss_scaler, "loss_scaler")
        scheduler = _with_state(self._lr_scheduler, restored.lr_scheduler, "lr_scheduler")
        if self._session is not None:
            apply_to_session(restored, self._session)
        else:
            self._pending, self._pending_dict = restored.over(self._pending), state_dict
        self._loss_scaler, self._lr_scheduler = scaler, scheduler
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

        Args:
            *paths: The one file, as a path or an open binary file.
            strict: As for :meth:`load_state_dict`.

        Returns:
            The user's dict.

        Raises:
            FileNotFoundError: If there is no such file.
            CheckpointError: If the file is damaged or no checkpoint. Nothing has changed then.
            RuntimeError, TypeError, ValueError: As :meth:`load_state_dict`.
        """
        if len(paths) != 1:
            raise ValueError(f"Expected number of files to load: 1, got {len(paths)}")
        state, user_dict = load_checkpoint_file(paths[0])
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

    def _save_onnx(self, path: str | os.PathLike[str], method: str, names: Sequence[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path must be a str or a path, but a {type(path).__name__} was given")
        if not os.fspath(path):
            raise ValueError("path must not be empty")
        session = self._started(method)
        assert self._sample is not None
        # An evaluation graph depends on dtypes and fixed sizes alone, so zeros do for a sample.
        batch = {
            name: torch.zeros(shape, dtype=dtype, device=self._device) for name, (shape, dtype) in self._sample.items()
        }
        graph = self._graph_for(session, batch, training=False)
        if list(names) != [spec.name for spec in graph.outputs]:
            graph = graph.pruned(names)
        save_model(graph, {**session.parameters, **session.buffers}, Path(path))

    def _find_trainable(self) -> list[str]:
        """Returns the canonical names of the parameters to train, after a check of all names that the user gave."""
        names = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        frozen = self.options.utils.frozen_weights
        unknown = [name for name in frozen if name not in names]
        if unknown:
            raise ValueError(
                f"utils.frozen_weights names {unknown}, which are no parameters of the model; it has {sorted(names)}"
            )
        for group in self.optim_config.params:
            unknown = [name for name in group["params"] if name not in names]
            if unknown:
                raise ValueError(
                    f"a parameter group names {unknown}, which are no parameters of the model; it has {sorted(names)}"
                )
        kept = {self._canonical[name] for name in frozen}
        return [name for name, p in self._model.named_parameters() if p.requires_grad and name not in kept]

    def _check_opset(self) -> None:
        opset = self.options._internal_use.onnx_opset_version
        if opset > maximum_opset():
            raise ValueError(
                f"_internal_use.onnx_opset_version is {opset}, but the installed ONNX Runtime and ONNX go up to "
                f"{maximum_opset()}"
            )

    def _set_description(self, description: ModelDescription) -> None:
        check_signature(self._model, description, self.loss_fn)
        step = ExportedStep(
            model=self._model,
            description=description,
            loss_fn=self.loss_fn,
            trainable=frozenset(self._trainable),
            autocast=torch.float16 if self.options.mixed_precision.enabled else None,
            opset=self.options._internal_use.onnx_opset_version,
            recompute=_recompute_options(self.options),
        )
        self._description = description
        self._builder = GraphBuilder(step, self.options._internal_use.extra_postprocess)

    def _make_loss_scaler(self) -> LossScaler | None:
        precision = self.options.mixed_precision
        if not precision.enabled:
            return None
        return _own_copy(precision.loss_scaler, "mixed_precision.loss_scaler") or DynamicLossScaler()

    def _make_layout(self) -> Layout:
        named = [
            *self._model.named_parameters(remove_duplicate=False),
            *self._model.named_buffers(remove_duplicate=False),
        ]
        tensors = {name: tensor.detach() for name, tensor in named}
        saved = [name for name in self._model.state_dict() if name in tensors]
        saved += [name for name, _ in self._model.named_parameters(remove_duplicate=False) if name not in saved]
        return Layout(
            tensors={name: tensors[name] for name in saved},
            transient={name: value for name, value in tensors.items() if name not in saved},
            canonical=self._canonical,
            trainable=self._trainable,
            optimizer=self.optim_config.name,
            accumulation_steps=self.options.batch.gradient_accumulation_steps,
            device=self._device,
        )

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any], partly: bool = False) -> Batch:
        """Returns the arguments of a step as a checked batch; of a batch ``partly`` needed, inputs may be left out."""
        if self._description is None or self._description.inferred:
            self._describe(args, kwargs)
        dtypes = None if self._sample is None else {name: dtype for name, (_, dtype) in self._sample.items()}
        optional = self.model_desc.input_names if partly else ()
        try:
            return bind_batch(self.model_desc, args, kwargs, self._device, dtypes, optional)
        except (TypeError, ValueError) as error:
            if not self.model_desc.inferred:
                raise
            raise type(error)(
                f"{error}. (The description was derived from the first batch, model_desc='auto': where batches differ "
                "more than that shows, write one. Outputs that need no label can be had with train_step_info.fetches)"
            ) from error

    def _describe(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Derives the description from the first batch, or widens it for a batch with other sizes."""
        given = name_sample(self._model, self.loss_fn, *unpack(args, kwargs))
        batch = {name: to_tensor(name, value) for name, value in given.items()}
        if self._description is None:
            self._set_description(describe(self._model, self.loss_fn, batch))
            _log.info("derived from the first batch: %r", self._description)
            return
        known = self._description
        wider = known.widened({name: tuple(value.shape) for name, value in batch.items()})
        if wider.inputs != known.inputs:
            changed = [entry for entry in wider.inputs if entry not in known.inputs]
            _log.warning("a batch has other sizes than the ones before, so the model is exported anew: %s", changed)
            self._narrower = known
            self._set_description(wider)

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

    def _prepare(self, batch: Batch, training: bool) -> TrainingSession:
        """Makes sure that there is a session with a graph that accepts the batch, and returns it."""
        if training and not self._trainable:
            raise RuntimeError(
                f"{type(self._model).__name__} has no parameter to train: all have requires_grad=False or are in "
                "utils.frozen_weights; eval_step works"
            )
        session = self._session
        if session is None:
            session = self._start(batch, training)
        else:
            self._graph_for(session, batch, training)
        return session

    def _start(self, batch: Batch, training: bool) -> TrainingSession:
        """Makes the session; assigns it last, so that a failure leaves the trainer as it was."""
        if len(batch) < len(self.model_desc.inputs):
            missing = [name for name in self.model_desc.input_names if name not in batch]
            raise TypeError(f"inputs {missing} are missing: the first step needs all inputs, to export the model")
        options = self.options
        with torch.no_grad():
            parameters = {name: self._owned(value) for name, value in self._model.named_parameters()}
            buffers = {name: self._owned(value) for name, value in self._model.named_buffers()}
        aliases: dict[str, list[str]] = {}
        for name, canonical in self._canonical.items():
            aliases.setdefault(canonical, []).append(name)
        session = TrainingSession(
            parameters,
            buffers,
            {name: aliases[name] for name in self._trainable},
            self.optim_config,
            clip=options.utils.grad_norm_clip,
            device=self._device,
            given_options=options.session_options,
            deterministic=options.debug.deterministic_compute,
            provider_options=options.provider_options,
            mem_limit=options.device.mem_limit,
            seed=self._seed,
        )
        if options.debug.check_model_export:
            self._check_export(session, batch)
        self._graph_for(session, batch, training)
        if self._pending is not None:
            apply_to_session(self._pending, session)
            self._pending, self._pending_dict = None, {}
        self._sample = {name: (value.shape, value.dtype) for name, value in batch.items()}
        self._session = session
        return session

    def _owned(self, value: torch.Tensor) -> torch.Tensor:
        return value.detach().to(self._device, copy=True, memory_format=torch.contiguous_format)

    def _graph_for(self, session: TrainingSession, batch: Batch, training: bool) -> TrainingGraph:
        """Returns the session's graph for a batch; exports one if none accepts the batch's sizes."""
        shapes = {name: tuple(value.shape) for name, value in batch.items()}
        known = session.graph_for(training, shapes)
        if known is not None:
            return known
        sizes = self.model_desc.sizes(shapes)
        graphs = session.graphs(training)
        if len(graphs) >= _MAXIMUM_GRAPHS:
            raise RuntimeError(
                f"the model fixes dimensions ({sorted({s for g in graphs for s in g.fixed})}), and has been exported "
                f"for {len(graphs)} sizes already; {sizes} would be one more. Pad the inputs to fewer different sizes"
            )
        if self._sample is not None:
            # Inputs that were left out are not needed for the outputs asked for, but for an export.
            for entry in self.model_desc.inputs:
                if entry.name not in batch:
                    shape = [sizes.get(size, 2) if isinstance(size, str) else size for size in entry.shape]
                    batch = {**batch, entry.name: torch.zeros(shape, dtype=self._sample[entry.name][1])}
        graph = self._build(batch, training)
        session.add_graph(graph)
        return_freed_memory()
        if self._loss_scaler is not None and graph.loss_scale is not None:
            self._loss_scaler.input_name = graph.loss_scale.name
        return graph

    def _build(self, batch: Batch, training: bool) -> TrainingGraph:
        assert self._builder is not None
        narrower, self._narrower = self._narrower, None
        try:
            return self._builder.build(batch, training)
        except Exception:
            if narrower is not None:
                self._set_description(narrower)  # the batch was wrong, not the description
            raise

    def _check_export(self, session: TrainingSession, batch: Batch) -> None:
        """The option ``debug.check_model_export``."""
        self._graph_for(session, batch, training=False)
        found = session.eval_step(list(batch.values()))
        assert self._builder is not None
        for output, ours, theirs in zip(self.model_desc.outputs, found, self._builder.reference(batch), strict=True):
            if not torch.allclose(ours.float(), theirs.float(), rtol=1e-2, atol=1e-6, equal_nan=True):
                difference = (ours.float() - theirs.float()).abs().max().item()
                raise RuntimeError(
                    f"debug.check_model_export: output {output.name!r} of the exported graph differs from PyTorch's by "
                    f"up to {difference:.3g} (allowed: relative 1e-2, absolute 1e-6)"
                )

    def _next_learning_rate(self) -> float:
        if self._lr_scheduler is None:
            return self.optim_config.lr
        upcoming = copy.copy(self._train_step_info)
        upcoming.step += 1
        rates = self._lr_scheduler._step(upcoming)
        first = rates[0] if isinstance(rates, (list, tuple)) and len(rates) else rates
        try:
            return float(first)
        except (TypeError, ValueError):
            raise TypeError(
                f"get_lr() of {type(self._lr_scheduler).__name__} must return a list with one number, but it returned "
                f"{rates!r}"
            ) from None

    def _update_scale(self) -> None:
        if self._loss_scaler is not None:
            scale = self._loss_scaler.update(self._train_step_info)
            if scale is not None:
                self._loss_scaler.loss_scale = scale

    def _started(self, method: str) -> TrainingSession:
        if self._session is None:
            raise RuntimeError(
                f"there is nothing to save yet: call prepare(), train_step() or eval_step() before {method}()"
            )
        return self._session

    def _collect(self, session: TrainingSession, include_optimizer: bool, copy_arrays: bool) -> dict[str, Any]:
        return collect(
            session,
            self._layout,
            step=self._train_step_info.step,
            optimization_step=self._train_step_info.optimization_step,
            mixed_precision=self._loss_scaler is not None,
            loss_scaler=None if self._loss_scaler is None else self._loss_scaler.state_dict(),
            lr_scheduler=None if self._lr_scheduler is None else self._lr_scheduler.state_dict(),
            include_optimizer=include_optimizer,
            copy=copy_arrays,
        )


def _recompute_options(options: ORTTrainerOptions) -> RecomputeOptions:
    chosen = options.graph_transformer
    return RecomputeOptions(
        attention_dropout=chosen.attn_dropout_recompute,
        gelu=chosen.gelu_recompute,
        layers=chosen.transformer_layer_recompute,
        layer_count=chosen.number_recompute_layers,
        cheap=options.utils.memory_efficient_gradient,
    )


def _own_copy(given: Copied | None, option: str) -> Copied | None:
    try:
        return copy.deepcopy(given)
    except Exception as error:
        raise TypeError(
            f"the trainer works on a copy of {option}, and {type(given).__name__} can't be copied: give it a "
            f"__deepcopy__ ({error})"
        ) from error


def _with_state(current: Copied | None, state: Mapping[str, Any] | None, key: str) -> Copied | None:
    """Returns a copy of a scaler or schedule with a loaded state; the current one where there is none to load."""
    if current is None or state is None:
        return current
    restored = copy.deepcopy(current)
    try:
        restored.load_state_dict(state)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"state_dict[{key}] does not fit {type(current).__name__}: {error!r}") from error
    return restored
