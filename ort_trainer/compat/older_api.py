"""``onnxruntime.capi.ort_trainer``: the API before ``ORTTrainerOptions``, on top of :class:`ort_trainer.ORTTrainer`.

Differences from the current trainer: all settings are arguments of the constructor; the learning rate and the loss
scale are inputs of each step unless the constructor gets a function or an object for them; the state dict is flat.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import onnx
import torch

from .. import amp
from ..core.errors import shown
from ..core.interrupts import uninterrupted
from ..core.signatures import signature_of
from ..onnx.load import OnnxModel, load_onnx_model
from ..optim.rules import CONFIGS
from ..train.calls import Call
from ..train.transaction import Transaction
from .checkpoint import Folder, checkpoint_file
from .options import ORTTrainerOptions
from .trainer import ORTTrainer as Trainer
from .training_session import TrainerSession
from .training_session.flat_state import flat_state_dict, load_flat_state_dict
from .training_session.parameters import former_options

__all__ = [
    "DEFAULT_OPSET_VERSION",
    "IODescription",
    "LossScaler",
    "ModelDescription",
    "ORTTrainer",
    "generate_sample",
    "load_checkpoint",
    "save_checkpoint",
]

DEFAULT_OPSET_VERSION = 14
_LOSS_SCALE = "default_loss_scale_input_name"
_OWN_STATE = "onnxruntime.capi.ort_trainer"  # a key among the user's values in a checkpoint
# Key of the saved state of a loss scaler -> its attribute, which scalers of other classes may lack.
_OF_SCALER = {"loss_scale": "loss_scale_", "stable_steps": "stable_steps_"}


class IODescription:
    """Name and shape of an input or output.

    Args:
        name: Its name.
        shape: Sizes; a str names a dimension whose size may change.
        dtype: The dtype of :func:`generate_sample`. Outputs have the dtypes of the model.
        num_classes: Makes :func:`generate_sample` return integers below it.
    """

    def __init__(
        self, name: str, shape: Sequence[int | str], dtype: torch.dtype | None = None, num_classes: int | None = None
    ) -> None:
        self.name_ = name
        self.shape_ = shape
        self.dtype_ = dtype
        self.num_classes_ = num_classes


class ModelDescription:
    """Inputs (the label last) and outputs (the loss first) of a model.

    Args:
        inputs: An :class:`IODescription` of each input.
        outputs: An :class:`IODescription` of each output.
    """

    def __init__(self, inputs: Sequence[IODescription], outputs: Sequence[IODescription]) -> None:
        self.inputs_ = inputs
        self.outputs_ = outputs


class LossScaler:
    """A loss scale that halves on overflow and doubles after a run of finite steps.

    Args:
        loss_scale_input_name: Stored as ``loss_scale_input_name_``; the trainer does not need it.
        is_dynamic_scale: False keeps the scale constant.
        loss_scale: The initial scale.
        up_scale_window: Finite steps before the scale doubles.
        min_loss_scale: Lower limit when the scale is halved.
        max_loss_scale: Upper limit when the scale is doubled.
    """

    def __init__(
        self,
        loss_scale_input_name: str,
        is_dynamic_scale: bool,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        self.loss_scale_input_name_ = loss_scale_input_name
        self.is_dynamic_scale_ = is_dynamic_scale
        self.initial_loss_scale_ = self.loss_scale_ = loss_scale
        self.up_scale_window_ = up_scale_window
        self.min_loss_scale_ = min_loss_scale
        self.max_loss_scale_ = max_loss_scale
        self.stable_steps_ = 0

    def update_loss_scale(self, is_all_finite: bool) -> None:
        """Sets the next scale after an update.

        Args:
            is_all_finite: Whether all gradients of the update were finite.
        """
        if not self.is_dynamic_scale_:
            return
        if not is_all_finite:
            self.loss_scale_ = max(self.min_loss_scale_, self.loss_scale_ / 2)
            self.stable_steps_ = 0
            return
        self.stable_steps_ += 1
        if self.stable_steps_ >= self.up_scale_window_:
            self.loss_scale_ = min(self.max_loss_scale_, self.loss_scale_ * 2)
            self.stable_steps_ = 0

    def reset(self) -> None:
        """Resets the scale to its initial value, and the count of finite steps to 0."""
        self.loss_scale_ = self.initial_loss_scale_
        self.stable_steps_ = 0


def generate_sample(desc: IODescription, device: str | torch.device | None = None) -> torch.Tensor:
    """Returns a random tensor for a description; named dimensions have the size 1.

    Args:
        desc: With ``num_classes``, values are integers below it; otherwise they are normally distributed.
        device: The device of the tensor.
    """
    size = [entry if isinstance(entry, int) else 1 for entry in desc.shape_]
    if desc.num_classes_:
        return torch.randint(0, desc.num_classes_, size, dtype=desc.dtype_ or torch.int64).to(device)
    return torch.randn(size, dtype=desc.dtype_).to(device)


class ORTTrainer:
    """Trains a model, with the constructor and methods of ``onnxruntime.capi.ort_trainer``.

    Args:
        model: As for :class:`ort_trainer.ORTTrainer`.
        loss_fn: A function (prediction, label) -> loss; None if the first output of the model is the loss.
        model_desc: A :class:`ModelDescription`. The first output is the loss. If inputs have other names than the
            arguments of the model, but their number is the same, they are matched by position; files of
            ``save_as_onnx`` have the names of the arguments.
        training_optimizer_name: ``SGDOptimizer``, ``AdamOptimizer`` or ``LambOptimizer``.
        map_optimizer_attributes: A function: name of a weight -> its hyper-parameters, any of ``alpha``, ``beta``,
            ``lambda``, ``epsilon``, ``max_norm_clip``, ``do_bias_correction``, ``weight_decay_mode``, ``ratio_min``,
            ``ratio_max``. None for the defaults of ``ort_trainer.optim``.
        learning_rate_description: An :class:`IODescription` with the name of the learning rate as an input of a step.
        device: Where training runs.
        gradient_accumulation_steps: Micro-batches per update.
        world_rank: Option ``distributed.world_rank``.
        world_size: Option ``distributed.world_size``.
        use_mixed_precision: fp16, with a loss scale from ``loss_scaler`` or as an input of every step.
        allreduce_post_accumulation: Option ``distributed.allreduce_post_accumulation``.
        global_step: The initial ``global_step_``.
        get_lr_this_step: A function ``global_step_`` -> learning rate; without it, the rate is an input of each step.
        loss_scaler: A :class:`LossScaler`, or an object with its ``loss_scale_`` and ``update_loss_scale``, used and
            updated in place.
        deepspeed_zero_stage: Option ``distributed.deepspeed_zero_optimization.stage``.
        enable_grad_norm_clip: Whether gradients are clipped to a global norm of 1.
        frozen_weights: Names of parameters that are not trained.
        _opset_version: ONNX operator set; the default, 14, means the trainer's own default.
        _enable_internal_postprocess: Option ``_internal_use.enable_internal_postprocess``.
        _extra_postprocess: A function that changes an exported ONNX model in place; its result is ignored.
        _use_deterministic_compute: Option ``debug.deterministic_compute``.
        use_memory_efficient_gradient: Option ``utils.memory_efficient_gradient``.
        run_symbolic_shape_infer: Option ``utils.run_symbolic_shape_infer``.
        enable_adasum: Option ``distributed.enable_adasum``.
        optimized_model_filepath: Option ``debug.graph_save_paths.model_with_training_graph_after_optimization_path``.

    Raises:
        TypeError, ValueError: If an argument is invalid. Messages about unsupported settings name them as in
            ``ORTTrainerOptions``.
    """

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[..., Any] | None,
        model_desc: ModelDescription,
        training_optimizer_name: str,
        map_optimizer_attributes: Callable[[str], Mapping[str, float]] | None,
        learning_rate_description: IODescription,
        device: str | torch.device,
        gradient_accumulation_steps: int = 1,
        world_rank: int = 0,
        world_size: int = 1,
        use_mixed_precision: bool = False,
        allreduce_post_accumulation: bool = False,
        global_step: int = 0,
        get_lr_this_step: Callable[[int], Any] | None = None,
        loss_scaler: LossScaler | None = None,
        deepspeed_zero_stage: int = 0,
        enable_grad_norm_clip: bool = True,
        frozen_weights: Sequence[str] = (),
        _opset_version: int = DEFAULT_OPSET_VERSION,
        _enable_internal_postprocess: bool = True,
        _extra_postprocess: Callable[[Any], Any] | None = None,
        _use_deterministic_compute: bool = False,
        use_memory_efficient_gradient: bool = False,
        run_symbolic_shape_infer: bool = False,
        enable_adasum: bool = False,
        optimized_model_filepath: str = "",
    ) -> None:
        warnings.warn(
            "onnxruntime.capi.ort_trainer.ORTTrainer is only for old scripts: use ort_trainer.ORTTrainer",
            FutureWarning,
            stacklevel=2,
        )
        functions = {"map_optimizer_attributes": map_optimizer_attributes, "get_lr_this_step": get_lr_this_step}
        for name, value in {**functions, "_extra_postprocess": _extra_postprocess}.items():
            if value is not None and not callable(value):
                raise TypeError(f"{name} must be a function or None, but {shown(value)} was given")
        _check_arguments(learning_rate_description, frozen_weights, global_step, loss_scaler, use_mixed_precision)
        if loss_fn is not None and not isinstance(model, torch.nn.Module):
            warnings.warn("loss_fn is ignored: an ONNX model contains its loss", UserWarning, stacklevel=2)
            loss_fn = None
        settings: dict[str, Any] = {
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "device.id": str(device),
            "world_rank": world_rank,
            "world_size": world_size,
            "allreduce_post_accumulation": allreduce_post_accumulation,
            "deepspeed_zero_stage": deepspeed_zero_stage,
            "enable_adasum": enable_adasum,
            "use_mixed_precision": use_mixed_precision,
            "mixed_precision.loss_scaler": amp.LossScaler(1.0) if use_mixed_precision else None,
            "enable_grad_norm_clip": enable_grad_norm_clip,
            "utils.frozen_weights": list(frozen_weights),
            "use_memory_efficient_gradient": use_memory_efficient_gradient,
            "utils.run_symbolic_shape_infer": run_symbolic_shape_infer,
            "debug.deterministic_compute": _use_deterministic_compute,
            "debug.graph_save_paths.model_with_training_graph_after_optimization_path": optimized_model_filepath,
            "_internal_use.enable_internal_postprocess": _enable_internal_postprocess,
            "_internal_use.extra_postprocess": None if _extra_postprocess is None else _returning(_extra_postprocess),
        }
        if _opset_version != DEFAULT_OPSET_VERSION:
            settings["_internal_use.onnx_opset_version"] = _opset_version
        if isinstance(model, (onnx.ModelProto, str, os.PathLike)):
            model = load_onnx_model(model)
        description = _to_model_desc(model_desc)
        self._arguments = _arguments_of(model, model_desc, loss_fn is not None)
        description["inputs"] = [(self._arguments.get(name, name), shape) for name, shape in description["inputs"]]
        self._trainer = Trainer(
            model,
            description,
            _optimizer_config(training_optimizer_name, map_optimizer_attributes, _parameter_names(model)),
            loss_fn=loss_fn,
            options=ORTTrainerOptions(former_options(settings)),
        )
        self.model_desc_ = model_desc
        self.device_ = device
        self.learning_rate_description_ = learning_rate_description
        self.use_mixed_precision = use_mixed_precision
        self.global_step_ = global_step
        self.get_lr_this_step_ = get_lr_this_step
        self.loss_scaler_ = loss_scaler
        self.is_train = True

    @property
    def trainer(self) -> Trainer:
        """The current trainer, which does the work."""
        return self._trainer

    @property
    def session(self) -> TrainerSession | None:
        """State and setup of the session; None before the first step, if the model is a PyTorch model."""
        return self._trainer._training_session

    @property
    def onnx_model_(self) -> onnx.ModelProto | None:
        """The model that :meth:`save_as_onnx` writes, as a new object; None if there is no session."""
        return self._trainer._onnx_model

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update; can be assigned between two windows, like the trainer's."""
        return self._trainer.gradient_accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._trainer.gradient_accumulation_steps = steps

    @property
    def current_step(self) -> int:
        """Completed calls of :meth:`train_step`."""
        return self._trainer.train_step_info.step

    @property
    def loss_scale_input_name(self) -> str:
        """The keyword for the loss scale of a step; ``default_loss_scale_input_name`` always works."""
        scaler = self._trainer.loss_scaler
        return _LOSS_SCALE if scaler is None or scaler.input_name is None else scaler.input_name

    def train(self) -> None:
        """Makes calls of this object run :meth:`train_step`."""
        self.is_train = True

    def eval(self) -> None:
        """Makes calls of this object run :meth:`eval_step`."""
        self.is_train = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs :meth:`train_step` or :meth:`eval_step`, as the last call of :meth:`train` or :meth:`eval` chose."""
        return self.train_step(*args, **kwargs) if self.is_train else self.eval_step(*args, **kwargs)

    def train_step(self, *args: Any, fetches: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Runs forward and backward pass, and updates the weights at the end of an accumulation window.

        Args:
            *args: The inputs of the description in order, then the learning rate (without ``get_lr_this_step``), then
                in mixed precision the loss scale (without a ``loss_scaler``); or a list of all of them.
            fetches: Names of outputs to return, in this order; None for all.
            **kwargs: Any of them by name, the loss scale by :attr:`loss_scale_input_name`.

        Returns:
            A list of the outputs, or the tensor itself if there is only one. In mixed precision without a
            ``loss_scaler``, an update adds a bool tensor: whether all gradients were finite.

        Raises:
            TypeError: If an input is missing, unknown, or given twice. The trainer is unchanged.
        """
        rate = self.learning_rate_description_.name_
        external_rate = self.get_lr_this_step_ is None
        external_scale = self.use_mixed_precision and self.loss_scaler_ is None
        extras = [rate] * external_rate + [_LOSS_SCALE] * external_scale
        if external_scale and self.loss_scale_input_name in kwargs:
            kwargs = {_LOSS_SCALE if k == self.loss_scale_input_name else k: v for k, v in kwargs.items()}
        batch = self._named(args, kwargs, extras)
        missing = [name for name in [*self._input_names(), *extras] if name not in batch]
        if missing:
            raise TypeError(f"inputs {missing} are missing: a step takes {[*self._input_names(), *extras]}")
        value = batch.pop(rate) if self.get_lr_this_step_ is None else self.get_lr_this_step_(self.global_step_)
        learning_rate = _one_number("the learning rate", value)
        scale = None
        if self.use_mixed_precision:
            value = batch.pop(_LOSS_SCALE) if self.loss_scaler_ is None else self.loss_scaler_.loss_scale_
            scale = _one_number("the loss scale", value)
        loop = self._trainer.loop
        with Transaction(loop, joint=False):
            call = loop.bind((self._renamed(batch),), {}, fetches or ())  # interruptible, unlike the step
            with uninterrupted():  # the loop's counters and those here change together
                outputs = self._step(call, learning_rate, scale)
        if external_scale and not fetches and not loop.window.micro_batches:
            outputs.append(torch.tensor([self._trainer.train_step_info.all_finite]))
        return outputs[0] if len(outputs) == 1 else outputs

    def _step(self, call: Call, learning_rate: float, scale: float | None) -> list[torch.Tensor]:
        """Runs a step, and updates the counters and the loss scaler of this class."""
        loop, info, scaler = self._trainer.loop, self._trainer.train_step_info, self._trainer.loss_scaler
        before = info.optimization_step
        if scale is not None and scaler is not None:
            scaler.loss_scale = scale
        outputs = loop.step(call, rates=[learning_rate])
        self.global_step_ += info.optimization_step - before
        if scale is not None and self.loss_scaler_ is not None and not loop.window.micro_batches:
            self.loss_scaler_.update_loss_scale(info.all_finite)
        return outputs

    def eval_step(self, *args: Any, fetches: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """Runs the model in evaluation mode; changes nothing.

        Args:
            *args: The inputs of the description in order, or a list of them. With ``fetches``, inputs at the end that
                the outputs do not need (the label, for a prediction) may be left out.
            fetches: Names of outputs to return, in this order; None for all.
            **kwargs: Inputs by name.

        Returns:
            A list of the outputs, or the tensor itself if there is only one.
        """
        batch = self._renamed(self._named(args, kwargs, []))
        outputs = self._trainer.loop.evaluate((batch,), {}, fetches or ())
        return outputs[0] if len(outputs) == 1 else outputs

    def save_as_onnx(self, path: str | os.PathLike[str]) -> None:
        """Writes the evaluation graph with the current weights; see :meth:`ort_trainer.ORTTrainer.save_as_onnx`."""
        self._trainer.save_as_onnx(path)

    def state_dict(self, include_optimizer_state: bool = True) -> dict[str, torch.Tensor]:
        """Returns weights and buffers by name, and ``Moment_1_<weight>`` and the like, as one flat dict of tensors.

        Args:
            include_optimizer_state: Whether to include the optimizer's state.
        """
        return flat_state_dict(self._trainer, include_optimizer_state)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = False) -> None:
        """Restores what :meth:`state_dict` returned, even before the first step.

        Args:
            state_dict: The flat dict.
            strict: Whether names must match exactly.
        """
        load_flat_state_dict(self._trainer, state_dict, strict)

    def _input_names(self) -> list[str]:
        return [entry.name_ for entry in self.model_desc_.inputs_]

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any], extras: list[str]) -> dict[str, Any]:
        """Returns the arguments of a step by name."""
        if len(args) == 1 and isinstance(args[0], list):
            args = args[0]
        names = [*self._input_names(), *extras]
        if len(args) > len(names):
            raise TypeError(f"{len(args)} inputs were given, but a step takes {len(names)}: {names}")
        batch = dict(zip(names, args, strict=False))
        unknown = [name for name in kwargs if name not in names]
        if unknown:
            raise TypeError(f"inputs {unknown} are unknown: a step takes {names}")
        twice = [name for name in kwargs if name in batch]
        if twice:
            raise TypeError(f"inputs {twice} were given twice, by position and by name")
        return {**batch, **kwargs}

    def _renamed(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a batch with the names of the model's arguments."""
        return {self._arguments.get(name, name): value for name, value in batch.items()}


def save_checkpoint(
    model: ORTTrainer,
    checkpoint_dir: Folder,
    checkpoint_prefix: str = "ORT_checkpoint",
    checkpoint_state_dict: Mapping[str, Any] | None = None,
    include_optimizer_state: bool = True,
) -> None:
    """Writes ``<checkpoint_prefix>.ort.pt`` into a folder; replaces an existing file, with a warning.

    Args:
        model: The trainer.
        checkpoint_dir: The folder; it must exist.
        checkpoint_prefix: The beginning of the file's name.
        checkpoint_state_dict: Your own values, which :func:`load_checkpoint` returns. It is not changed.
        include_optimizer_state: Whether to write moments, too.
    """
    values = {} if checkpoint_state_dict is None else checkpoint_state_dict
    if not isinstance(values, Mapping):
        raise TypeError(f"checkpoint_state_dict must be a dict or None, but {values!r} was given")
    values = {**values, _OWN_STATE: _own_state(model)}
    path = checkpoint_file(checkpoint_dir, checkpoint_prefix, overwriting=True)
    model.trainer.save_checkpoint(path, values, include_optimizer_state, overwrite=True)


def load_checkpoint(
    model: ORTTrainer, checkpoint_dir: Folder, checkpoint_prefix: str = "ORT_checkpoint", strict: bool = False
) -> dict[str, Any]:
    """Restores what :func:`save_checkpoint` wrote, including ``global_step_`` and the ``LossScaler``.

    A file of the current ``ORTTrainer.save_checkpoint`` has neither: they stay unchanged, with a warning.

    Args:
        model: The trainer.
        checkpoint_dir: The folder.
        checkpoint_prefix: The beginning of the file's name.
        strict: Whether names must match exactly.

    Returns:
        Your own values.

    Raises:
        FileNotFoundError: If the file does not exist.
        CheckpointError: If it is damaged, or a pickle that the legacy function wrote.
    """
    values = model.trainer.load_checkpoint(checkpoint_file(checkpoint_dir, checkpoint_prefix), strict=strict)
    _restore_own_state(model, values.pop(_OWN_STATE, None))
    return values


def _own_state(trainer: ORTTrainer) -> dict[str, Any]:
    """Returns the state of the older trainer that the current one does not have."""
    scaler = trainer.loss_scaler_
    attributes = {key: getattr(scaler, name, None) for key, name in _OF_SCALER.items()}
    state = None if scaler is None else {key: value for key, value in attributes.items() if value is not None}
    return {"global_step": trainer.global_step_, "loss_scaler": state}


def _restore_own_state(trainer: ORTTrainer, state: Any) -> None:
    """Restores what :func:`_own_state` returned, and warns about missing values."""
    state = state if isinstance(state, Mapping) else {}
    step, saved, scaler = state.get("global_step"), state.get("loss_scaler"), trainer.loss_scaler_
    kept = []
    if isinstance(step, int):
        trainer.global_step_ = step
    else:
        kept.append(f"global_step_ stays {trainer.global_step_}")
    attributes = {key: name for key, name in _OF_SCALER.items() if hasattr(scaler, name)}
    if scaler is not None and isinstance(saved, Mapping) and saved.keys() >= attributes.keys():
        for key, name in attributes.items():
            setattr(scaler, name, type(getattr(scaler, name))(saved[key]))
    elif scaler is not None:
        kept.append(f"loss_scaler_ keeps the scale {scaler.loss_scale_}")
    if kept:
        warnings.warn(
            f"the checkpoint lacks part of this trainer's state: {', '.join(kept)}", UserWarning, stacklevel=3
        )


def _to_model_desc(description: ModelDescription) -> dict[str, Any]:
    """Returns the description in the form of the current trainer.

    Raises:
        TypeError: If it, or an entry of it, has the wrong class.
        ValueError: If its first output is not a loss.
    """
    if not isinstance(description, ModelDescription):
        raise TypeError(f"model_desc must be a ModelDescription, but {description!r} was given")
    for kind, entries in (("inputs", description.inputs_), ("outputs", description.outputs_)):
        wrong = [entry for entry in entries if not isinstance(entry, IODescription)]
        if wrong:
            raise TypeError(f"the {kind} of a ModelDescription are IODescriptions, but {wrong[0]!r} was given")
    if not description.outputs_:
        raise ValueError("model_desc needs outputs: the first must be the loss")
    loss, *others = description.outputs_
    if list(loss.shape_) not in ([], [1]):
        raise ValueError(
            f"the first output is the loss, which is a scalar, but {loss.name_!r} has the shape {list(loss.shape_)}"
        )
    return {
        "inputs": [(entry.name_, list(entry.shape_)) for entry in description.inputs_],
        "outputs": [(loss.name_, [], True), *((entry.name_, list(entry.shape_)) for entry in others)],
    }


def _arguments_of(model: Any, description: ModelDescription, has_loss: bool) -> dict[str, str]:
    """Returns described name -> argument of ``forward`` if inputs are matched by position, otherwise an empty dict."""
    if not isinstance(model, torch.nn.Module):
        return {}
    names = [entry.name_ for entry in description.inputs_]
    names = names[:-1] if has_loss else names
    parameters = signature_of(model.forward).parameters.values()
    arguments = [parameter.name for parameter in parameters]
    plain = all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    if not plain or len(arguments) != len(names) or set(names) <= set(arguments):
        return {}
    return dict(zip(names, arguments, strict=True))


def _check_arguments(
    learning_rate_description: Any, frozen_weights: Any, global_step: Any, loss_scaler: Any, use_mixed_precision: bool
) -> None:
    """Checks the constructor's arguments that do not become options.

    Raises:
        TypeError, ValueError: If one is invalid.
    """
    if not isinstance(learning_rate_description, IODescription):
        raise TypeError(
            f"learning_rate_description must be an IODescription, but {learning_rate_description!r} was given"
        )
    if isinstance(frozen_weights, str) or not isinstance(frozen_weights, Collection):
        raise TypeError(f"frozen_weights must be a list of names of weights, but {frozen_weights!r} was given")
    if isinstance(global_step, bool) or not isinstance(global_step, int) or global_step < 0:
        raise ValueError(f"global_step must be an int, at least 0, but {global_step!r} was given")
    scales = hasattr(loss_scaler, "loss_scale_") and callable(getattr(loss_scaler, "update_loss_scale", None))
    if loss_scaler is not None and not scales:
        raise TypeError(
            "loss_scaler must be a LossScaler of onnxruntime.capi.ort_trainer, or have loss_scale_ and "
            f"update_loss_scale() like it, but {shown(loss_scaler)} was given"
        )
    if loss_scaler is not None and not use_mixed_precision:
        warnings.warn(
            "loss_scaler has no effect without use_mixed_precision=True: the loss is not scaled",
            UserWarning,
            stacklevel=3,
        )


def _returning(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes a function that changes the model in place return it, as the option expects."""

    def postprocess(model: Any) -> Any:
        change(model)
        return model

    return postprocess


def _optimizer_config(
    name: str, attributes_of: Callable[[str], Mapping[str, float]] | None, parameters: Sequence[str]
) -> Any:
    """Returns the config, with one parameter group for each distinct set of attributes."""
    if name not in CONFIGS:
        raise ValueError(f"training_optimizer_name must be one of {list(CONFIGS)}, but {name!r} was given")
    groups: dict[tuple[tuple[str, float], ...], list[str]] = {}
    for parameter in parameters:
        returned = None if attributes_of is None else attributes_of(parameter)
        if not isinstance(returned, Mapping | None):
            raise TypeError(
                f"map_optimizer_attributes must return a dict of hyper-parameters or None, but for {parameter!r} it "
                f"returned {shown(returned)}"
            )
        attributes = dict(returned or {})
        if "do_bias_correction" in attributes:
            attributes["do_bias_correction"] = bool(attributes["do_bias_correction"])
        if attributes:
            groups.setdefault(tuple(sorted(attributes.items())), []).append(parameter)
    return CONFIGS[name]([{"params": names, **dict(values)} for values, names in groups.items()])


def _parameter_names(model: Any) -> list[str]:
    """Returns the names of the parameters that can be trained."""
    if isinstance(model, torch.nn.Module):
        return [name for name, _ in model.named_parameters()]
    # Anything else is not a model: the trainer raises the error.
    return [name for name in model.parameters if name not in model.frozen] if isinstance(model, OnnxModel) else []


def _one_number(what: str, value: Any) -> float:
    """Returns a value that was passed to a step as a float.

    Raises:
        TypeError: If it is not a single number.
    """
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{what} must be one number, but {shown(value)} was given") from None
