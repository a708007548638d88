"""``ORTTrainer``: the interface of the legacy trainer, in front of the training loop."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .amp import LossScaler
from .distributed import choose_strategy, find_place
from .errors import shown
from .exporting import Exporting
from .fitting import Fitting
from .joint_work import JointWork
from .optim import OptimizerConfig, rules
from .optim.step_info import TrainStepInfo
from .optim.torch_optimizer import TorchOptimizerConfig
from .options import ModelDescription, ORTTrainerOptions
from .own_steps import OwnSteps, bare
from .profiling import Profile
from .runtime.engine import resolve_device
from .runtime.installed import check_engine
from .sources import BORROWED, loss_function, model_source
from .sources.torch import LossFunction
from .trainer_state import TrainerState
from .training import state
from .training.begin_profile import begin_profile
from .training.inference_mode import outside_inference_mode
from .training.learning_rates import Schedule
from .training.loop import TrainingLoop
from .training.onnx_file import inference_names, save_onnx
from .training.two_step import TwoStepSession

if TYPE_CHECKING:
    import onnx

    from .sources.onnx import OnnxModel

__all__ = ["ORTTrainer"]

_NO_COPY = (
    "an ORTTrainer can't be copied or pickled, because it owns sessions of ONNX Runtime: create another one with the "
    "same arguments and pass trainer.state_dict() to its load_state_dict(), or use save_checkpoint() and "
    "load_checkpoint()"
)


class ORTTrainer(Exporting, Fitting, JointWork, OwnSteps, TrainerState):
    """Trains a PyTorch model on ONNX Runtime.

    The first :meth:`train_step` (or :meth:`prepare`) exports PyTorch's own forward and backward pass as one ONNX
    graph. The trainer trains the model's own parameters and buffers: the model is current after every step, and changes
    to it between steps (weights, modes, settings, ``requires_grad``) take effect (docs/models.md).

    Args:
        model: The model. With ``loss_fn`` it returns the prediction; without it, the loss is one of its outputs. Either
            a PyTorch module, or an ONNX model: a ``ModelProto``, which is not changed, or the path of a file, with or
            without external data. ONNX models need onnxruntime-training; all their floating-point initializers are
            trained except those in ``utils.frozen_weights``.
        model_desc: ``{"inputs": [(name, shape), ...], "outputs": [(name, shape[, is_loss]), ...]}``. A shape lists
            sizes; a str in it names a dimension whose size may change from step to step. Inputs are named like the
            arguments of ``model.forward``; with ``loss_fn`` the last input is the label, whose name is free, unless
            ``loss_fn`` takes only the prediction. Outputs are (loss,) + outputs of the model; trailing ones may be left
            out. Or ``"auto"``, which derives the description from the first batch and one forward pass, on copies of
            both. Then the first dimension of all inputs and every dimension of integer inputs is dynamic; another
            dimension becomes dynamic when its size changes.
        optim_config: An ``SGDConfig``, ``AdamConfig``, ``AdamWConfig``, ``LambConfig`` or ``LionConfig``; or an
            optimizer of ``torch.optim`` over parameters of the model, whose own ``step`` then updates them.
        loss_fn: A function or module (prediction, label, ...) -> scalar loss, or the name of one: ``cross_entropy``,
            ``mse``, ``l1``, ``smooth_l1``, ``huber``, ``nll`` or ``bce_with_logits``. The prediction is what the model
            returns; for an ONNX model, its first output. A function (prediction) -> scalar loss needs no label.
        options: Settings; None for the defaults. The trainer uses the loss scaler and the schedule in them directly, so
            they can serve only one trainer at a time.

    Raises:
        ModuleNotFoundError: If ONNX Runtime is not installed.
        TypeError: If an argument has the wrong type.
        ValueError: If the description is invalid; if the model has no input, output or parameter of a name in it, in
            the parameter groups or in ``utils.frozen_weights``; or if another trainer uses the loss scaler or the
            schedule.

    Example:
        >>> trainer = ORTTrainer(model, model_desc, optim.AdamConfig(lr=1e-3), loss_fn=loss_fn)
        >>> loss, prediction = trainer.train_step(x, y)
    """

    @outside_inference_mode
    def __init__(
        self,
        model: nn.Module | OnnxModel | onnx.ModelProto | str | os.PathLike[str],
        model_desc: Mapping[str, Any] | str,
        optim_config: OptimizerConfig | torch.optim.Optimizer,
        loss_fn: LossFunction | str | None = None,
        options: ORTTrainerOptions | None = None,
    ) -> None:
        check_engine()
        if isinstance(optim_config, torch.optim.Optimizer):
            optim_config = TorchOptimizerConfig(optim_config)
        if not isinstance(optim_config, OptimizerConfig):
            raise TypeError(
                f"optim_config must be a config of ort_trainer.optim ({', '.join(sorted(rules.__all__))}) or an "
                f"optimizer of torch.optim, but {shown(optim_config)} was given"
            )
        loss_fn = loss_function(loss_fn)
        options = ORTTrainerOptions() if options is None else options
        if not isinstance(options, ORTTrainerOptions):
            raise TypeError(
                f"options must be ORTTrainerOptions, but {shown(options)} was given: wrap the dict in the class"
            )
        place = find_place(options)
        device = resolve_device(options.device.id, options.is_given("device.id"), place.local_rank)
        strategy = choose_strategy(options, device, place)
        options = place.shown_in(options)
        self.options, self.optim_config, self.loss_fn = options, optim_config, loss_fn
        try:
            optim_config.bind(model)
            with BORROWED:
                source = model_source(model, loss_fn, optim_config, options)
            self._loop = TrainingLoop(source, model_desc, optim_config, options, device, strategy)
        except BaseException as error:
            strategy.failed(error)
            raise

    @property
    def loop(self) -> TrainingLoop:
        """The training loop, which other interfaces in this package run too."""
        return self._loop

    @property
    def model_desc(self) -> ModelDescription:
        """The model description.

        Raises:
            RuntimeError: Before the first batch, if the description is derived from it.
        """
        return self._loop.graphs.description

    @property
    def train_step_info(self) -> TrainStepInfo:
        """Progress of the training. Assign ``train_step_info.fetches`` to choose the outputs that steps return."""
        return self._loop.info

    # Scripts for the legacy trainer use this name.
    _train_step_info = train_step_info

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The loss scaler (the given object, if one was given); None without mixed precision."""
        return self._loop.precision.scaler

    @property
    def lr_scheduler(self) -> Schedule | None:
        """The given learning-rate schedule; None if there is none."""
        return self._loop.rates.scheduler

    @property
    def loss_parameters(self) -> dict[str, float]:
        """Keyword arguments of the loss function, or of a model that computes its own loss: numbers that may change.

        ``trainer.loss_parameters["beta"] = 0.1`` calls ``loss_fn(prediction, label, beta=0.1)``, with the number as a
        tensor without dimensions. A new value needs no export; a new name does.
        """
        return self._loop.graphs.loss_parameters

    @loss_parameters.setter
    def loss_parameters(self, values: Mapping[str, float]) -> None:
        self._loop.graphs.loss_parameters = dict(values)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per weight update; initially the option ``batch.gradient_accumulation_steps``.

        It can be assigned between two accumulation windows: right after an update, or before the first step.
        Checkpoints save the assigned value.

        Raises:
            RuntimeError: If it is assigned inside a window.
            TypeError, ValueError: If the value is not an int, or less than 1.
        """
        return self._loop.window.size

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._loop.window.size = steps

    @property
    def session(self) -> TwoStepSession | None:
        """Access to single passes and updates, graphs and tensors; None before the first step of a PyTorch model."""
        return None if self._loop.session is None else TwoStepSession(self._loop)

    @outside_inference_mode
    def prepare(self, sample_batch: Any = None) -> None:
        """Exports the model now instead of in the first step; trains nothing.

        Args:
            sample_batch: A batch as ``train_step`` takes it: a tuple, list or dict of inputs, or one tensor. Not needed
                for an ONNX model that computes its own loss.

        Raises:
            ExportError: If the model can't be exported, or an ONNX model can't be differentiated.
            RuntimeError: If a required batch is missing.
        """
        loop = self._loop
        batch = loop.graphs.bind((loop.graphs.blank_batch() if sample_batch is None else sample_batch,), {})
        loop.prepare(batch, True, loop.graphs.fetches(()))

    @outside_inference_mode
    def train_step(self, *args: Any, **kwargs: Any) -> torch.Tensor | Any:
        """Runs the forward and backward pass, and updates the weights at the end of an accumulation window.

        Args:
            *args: Inputs in the order of the model description, or one dict, list or tuple that holds them all.
            **kwargs: Inputs by name. With ``batch.gradient_reduction`` "weighted" also ``gradient_weight``, a positive
                number: the weight of this micro-batch in the mean of the window's gradients.

        Returns:
            The described outputs (or ``train_step_info.fetches``) as a list of new tensors; a single output as a bare
            tensor. The loss is that of this micro-batch, without the loss scale, before the weight update.

        Raises:
            TypeError, ValueError: If the batch does not fit the description. The step then counts and changes nothing.
            ExportError: In the first step, if the model can't be exported.
        """
        return bare(self._loop.train(args, kwargs))

    @outside_inference_mode
    def eval_step(self, *args: Any, **kwargs: Any) -> torch.Tensor | Any:
        """Runs the model and the loss in evaluation mode: without dropout, batch norm with its running statistics.

        It changes no weight, counter or random state. With ``train_step_info.fetches``, inputs that the fetched outputs
        do not need (such as the label, for a prediction) may be left out.

        Args:
            *args: As for :meth:`train_step`.
            **kwargs: As for :meth:`train_step`.

        Returns:
            As :meth:`train_step`.
        """
        return bare(self._loop.evaluate(args, kwargs, self.train_step_info.fetches))

    def profile(self, steps: int = 10, trace: str | os.PathLike[str] | None = "ort_trainer_trace.json") -> Profile:
        """Measures the next calls of :meth:`train_step`, without any effect on the training.

        After the last call it prints the time per operator and per module of the model, and writes a trace for
        ``chrome://tracing`` or https://ui.perfetto.dev. Calls that raise are not counted.

        Args:
            steps: Number of calls.
            trace: Path of the trace, in an existing folder; an existing file is replaced. None for no trace. With
                several processes, those of rank 1 and higher write to ``name.<rank>.json`` and print nothing.

        Returns:
            The profile, whose figures are complete after the last call.

        Raises:
            RuntimeError: If another profile is unfinished.
            TypeError, ValueError, OSError: If ``steps`` is not an int of at least 1, or ``trace`` can't be written.
        """
        return begin_profile(self._loop, steps, trace)

    def save_as_onnx(self, path: str | os.PathLike[str]) -> None:
        """Writes the evaluation graph with the current weights: what :meth:`eval_step` computes, with loss and label.

        Dropout and batch norm are in their inference form. Inputs, outputs and dynamic dimensions have the names of the
        model description; weights have their PyTorch names. An existing file is replaced. With several processes, one
        call in any of them suffices.

        Args:
            path: Path of the file. Weights beyond the size limit of a protobuf file go into ``<path>.data`` beside it.

        Raises:
            RuntimeError: Before the first step.
            ValueError: If the path is empty.
            FileNotFoundError: If the folder does not exist.
        """
        self._save_onnx(path, "save_as_onnx", self.model_desc.output_names)

    def export_for_inference(self, path: str | os.PathLike[str], output_names: Sequence[str] | None = None) -> None:
        """Writes the same graph as :meth:`save_as_onnx` without the loss and without inputs that only the loss needs.

        Args:
            path: As for :meth:`save_as_onnx`.
            output_names: Described outputs to write, in this order; None for all. The graph is pruned to them.

        Raises:
            TypeError: If ``output_names`` is not a list of names.
            ValueError: If the loss is the only described output; if ``output_names`` is empty, or contains an unknown
                name, the loss, or a duplicate.
            RuntimeError, FileNotFoundError: As :meth:`save_as_onnx`.
        """
        self._save_onnx(path, "export_for_inference", inference_names(self.model_desc, output_names))

    @outside_inference_mode
    def _save_onnx(self, path: str | os.PathLike[str], method: str, names: Sequence[str]) -> None:
        state.check_started(self._loop, method)
        save_onnx(self._loop, path, names)

    # copy and pickle both call this.
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(_NO_COPY)
