"""``onnxruntime.capi.ort_trainer``: the API before ``ORTTrainerOptions``, on top of :class:`ort_trainer.ORTTrainer`.

Differences from the current trainer: all settings are arguments of the constructor; the learning rate and the loss
scale are inputs of each step unless the constructor gets a function or an object for them; the state dict is flat.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import torch

from .. import amp
from ..core.interrupts import uninterrupted
from ..engine import Plan
from ..export.onnx import load_onnx_model
from ..train.batch import Batch
from .older_arguments import check_arguments, check_callable, one_number, optimizer_config, parameter_names, returning
from .older_checkpoint import load_checkpoint, save_checkpoint
from .older_description import IODescription, LossScaler, ModelDescription, arguments_of, generate_sample, to_model_desc
from .options import ORTTrainerOptions
from .trainer import ORTTrainer as Trainer
from .training_session import TrainerSession
from .training_session.flat_state import flat_state_dict, load_flat_state_dict

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


class ORTTrainer:
    """Trains a model on ONNX Runtime, with the constructor and methods of ``onnxruntime.capi.ort_trainer``.

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
        check_callable("map_optimizer_attributes", map_optimizer_attributes)
        check_callable("get_lr_this_step", get_lr_this_step)
        check_callable("_extra_postprocess", _extra_postprocess)
        check_arguments(learning_rate_description, frozen_weights, global_step, loss_scaler, use_mixed_precision)
        if loss_fn is not None and not isinstance(model, torch.nn.Module):
            warnings.warn("loss_fn is ignored: an ONNX model contains its loss", UserWarning, stacklevel=2)
            loss_fn = None
        options: dict[str, Any] = {
            "batch": {"gradient_accumulation_steps": gradient_accumulation_steps},
            "device": {"id": str(device)},
            "distributed": {
                # Left out at their defaults: a launcher may have started several processes without them.
                **({"world_rank": world_rank} if world_rank else {}),
                **({"world_size": world_size} if world_size != 1 else {}),
                "allreduce_post_accumulation": allreduce_post_accumulation,
                "deepspeed_zero_optimization": {"stage": deepspeed_zero_stage},
                "enable_adasum": enable_adasum,
            },
            "mixed_precision": {
                "enabled": use_mixed_precision,
                "loss_scaler": amp.LossScaler(1.0) if use_mixed_precision else None,
            },
            "utils": {
                "grad_norm_clip": enable_grad_norm_clip,
                "frozen_weights": list(frozen_weights),
                "memory_efficient_gradient": use_memory_efficient_gradient,
                "run_symbolic_shape_infer": run_symbolic_shape_infer,
            },
            "debug": {
                "deterministic_compute": _use_deterministic_compute,
                "graph_save_paths": {"model_with_training_graph_after_optimization_path": optimized_model_filepath},
            },
            "_internal_use": {
                "enable_internal_postprocess": _enable_internal_postprocess,
                "extra_postprocess": None if _extra_postprocess is None else returning(_extra_postprocess),
                **({} if _opset_version == DEFAULT_OPSET_VERSION else {"onnx_opset_version": _opset_version}),
            },
        }
        if isinstance(model, (onnx.ModelProto, str, os.PathLike)):
            model = load_onnx_model(model)
        description = to_model_desc(model_desc)
        self._arguments = arguments_of(model, model_desc, loss_fn is not None)
        description["inputs"] = [(self._arguments.get(name, name), shape) for name, shape in description["inputs"]]
        self._trainer = Trainer(
            model,
            description,
            optimizer_config(training_optimizer_name, map_optimizer_attributes, parameter_names(model)),
            loss_fn=loss_fn,
            options=ORTTrainerOptions(options),
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
        given = batch.pop(rate) if self.get_lr_this_step_ is None else self.get_lr_this_step_(self.global_step_)
        learning_rate = one_number("the learning rate", given)
        scale = None
        if self.use_mixed_precision:
            given = batch.pop(_LOSS_SCALE) if self.loss_scaler_ is None else self.loss_scaler_.loss_scale_
            scale = one_number("the loss scale", given)
        loop = self._trainer.loop
        bound = loop.graphs.bind((self._renamed(batch),), {})
        plan = loop.plan(bound, True, loop.graphs.fetches(fetches or ()))  # interruptible, unlike the step
        with uninterrupted():
            outputs = self._step(plan, bound, learning_rate, scale)
        if external_scale and not fetches and not loop.window.micro_batches:
            outputs.append(torch.tensor([loop.info.all_finite]))
        return outputs[0] if len(outputs) == 1 else outputs

    def _step(self, plan: Plan, batch: Batch, learning_rate: float, scale: float | None) -> list[torch.Tensor]:
        loop = self._trainer.loop
        before = loop.info.optimization_step
        if scale is not None and loop.precision.scaler is not None:
            loop.precision.scaler.loss_scale = scale
        outputs = loop.step(plan, batch, rates=[learning_rate])
        self.global_step_ += loop.info.optimization_step - before
        if scale is not None and self.loss_scaler_ is not None and not loop.window.micro_batches:
            self.loss_scaler_.update_loss_scale(loop.info.all_finite)
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
