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
    "an ORTTrainer can't be copied or pickled, as it owns sessions of ONNX Runtime: make another one with the same "
    "arguments and give it trainer.state_dict() by load_state_dict(), or use save_checkpoint() and load_checkpoint()"
)


class ORTTrainer(Exporting, Fitting, JointWork, OwnSteps, TrainerState):
    """Trains a PyTorch model on ONNX Runtime.

    The first :meth:`train_step` (or :meth:`prepare`) exports PyTorch's own forward and backward pass as one ONNX
    graph. The trainer trains the model's own parameters and buffers: the model is current after every step, and what is
    changed in it between steps (weights, modes, settings, ``requires_grad``) has its effect (docs/models.md).

    Args:
        model: The model. With ``loss_fn`` it returns the prediction, without it the loss is one of its outputs. Either
            a PyTorch module, or an ONNX model: a ``ModelProto``, which is not changed, or the path of a file (with
            external data, if it has any). ONNX models need onnxruntime-training; all their floating-point initializers
            are trained but those in ``utils.frozen_weights``.
        model_desc: ``{"inputs": [(name, shape), ...], "outputs": [(name, shape[, is_loss]), ...]}``. A shape lists
            sizes; a str in it names a dimension whose size may change from step to step. Input names are those of the
            arguments of ``model.forward``; with ``loss_fn`` the last input is the label and has a free name, unless
            ``loss_fn`` takes the prediction alone. Outputs come in the order (loss,) + outputs of the model; the ones
            at the end may be left out. Or ``"auto"``: it is derived from the first batch and one forward pass, on
            copies of both. Then the first dimension of all inputs is dynamic, and every dimension of integer inputs;
            another dimension becomes so when a batch comes with another size.
        optim_config: An ``SGDConfig``, ``AdamConfig``, ``AdamWConfig``, ``LambConfig`` or ``LionConfig``; or an
            optimizer of ``torch.optim`` over parameters of the model, whose own ``step`` updates them then.
        loss_fn: A function or module (prediction, label, ...) -> scalar loss, or the name of one: ``cross_entropy``,
            ``mse``, ``l1``, ``smooth_l1``, ``huber``, ``nll`` or ``bce_with_logits``. The prediction is what the model
            returns; of an ONNX model, its first output. A function (prediction) -> scalar loss needs no label.
        options: Settings; None for the defaults. A loss scaler and a schedule in them are the ones that work, for one
            trainer at a time.

    Raises:
        ModuleNotFoundError: If no ONNX Runtime is installed.
        TypeError: If an argument has a wrong type.
        ValueError: If the description is invalid, or a name in it, in the parameter groups or in
            ``utils.frozen_weights`` is not the model's; or if another trainer uses the loss scaler or the schedule.

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
        """What the trainer runs; other faces in this package run it too."""
        return self._loop

    @property
    def model_desc(self) -> ModelDescription:
        """The model description.

        Raises:
            RuntimeError: Before the first batch, where it is derived from that.
        """
        return self._loop.graphs.description

    @property
    def train_step_info(self) -> TrainStepInfo:
        """Where training stands. Assign ``train_step_info.fetches`` to choose the outputs that steps return."""
        return self._loop.info

    # The name that scripts of the legacy trainer reach for.
    _train_step_info = train_step_info

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The loss scaler, the user's own object where one was given; None without mixed precision."""
        return self._loop.precision.scaler

    @property
    def lr_scheduler(self) -> Schedule | None:
        """The learning-rate schedule, the very object that was given; None if there is none."""
        return self._loop.rates.scheduler

    @property
    def loss_parameters(self) -> dict[str, float]:
        """Numbers that the loss function takes by name, or the model where the loss is inside: they may change.

        ``trainer.loss_parameters["beta"] = 0.1`` calls ``loss_fn(prediction, label, beta=0.1)``, where it gets the
        number as a tensor without dimensions: another value needs no export. Another name does.
        """
        return self._loop.graphs.loss_parameters

    @loss_parameters.setter
    def loss_parameters(self, values: Mapping[str, float]) -> None:
        self._loop.graphs.loss_parameters = dict(values)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per weight update; at first the option ``batch.gradient_accumulation_steps``.

        It can be assigned between two windows, so right after an update or before the first step; a checkpoint keeps
        what was assigned.

        Raises:
            RuntimeError: If it is assigned inside a window.
            TypeError, ValueError: If the value is no int, or less than 1.
        """
        return self._loop.window.size

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._loop.window.size = steps

    @property
    def session(self) -> TwoStepSession | None:
        """Passes and updates one by one, graphs and tensors; None before the first step of a PyTorch model."""
        return None if self._loop.session is None else TwoStepSession(self._loop)

    @outside_inference_mode
    def prepare(self, sample_batch: Any = None) -> None:
        """Exports the model now instead of in the first step; trains nothing.

        Args:
            sample_batch: A batch as ``train_step`` takes it: a tuple or list of inputs, a dict of them, or one tensor.
                An ONNX model with its loss inside needs none.

        Raises:
            ExportError: If the model can't be exported, or an ONNX model not be differentiated.
            RuntimeError: If a batch is needed and not given.
        """
        loop = self._loop
        batch = loop.graphs.bind((loop.graphs.blank_batch() if sample_batch is None else sample_batch,), {})
        loop.prepare(batch, True, loop.graphs.fetches(()))

    @outside_inference_mode
    def train_step(self, *args: Any, **kwargs: Any) -> torch.Tensor | Any:
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
        return bare(self._loop.train(args, kwargs))

    @outside_inference_mode
    def eval_step(self, *args: Any, **kwargs: Any) -> torch.Tensor | Any:
        """Runs the model and the loss in evaluation mode: dropout off, batch norm with its running statistics.

        Nothing changes: no weight, no counter, no random number of training. With ``train_step_info.fetches``, inputs
        that the fetched outputs do not need (the label, for a prediction) may be left out.

        Args:
            *args: As for :meth:`train_step`.
            **kwargs: As for :meth:`train_step`.

        Returns:
            As :meth:`train_step`.
        """
        return bare(self._loop.evaluate(args, kwargs, self.train_step_info.fetches))

    def profile(self, steps: int = 10, trace: str | os.PathLike[str] | None = "ort_trainer_trace.json") -> Profile:
        """Measures the next calls of :meth:`train_step`, which train as they would have without it.

        After the last one the time per operator and per module of the model is printed, and a trace is written, which
        ``chrome://tracing`` and https://ui.perfetto.dev show. A call that raises is not counted.

        Args:
            steps: How many calls.
            trace: Path of the trace, in a folder that exists; a file that is there is replaced. None for no trace. Of
                several processes, those of rank 1 and more write to ``name.<rank>.json``, and print nothing.

        Returns:
            The profile, which has its figures when the steps are done.

        Raises:
            RuntimeError: If another profile is not finished yet.
            TypeError, ValueError, OSError: If ``steps`` is no int of at least 1, or there can be no file at ``trace``.
        """
        return begin_profile(self._loop, steps, trace)

    def save_as_onnx(self, path: str | os.PathLike[str]) -> None:
        """Writes the evaluation graph with the current weights: what :meth:`eval_step` computes, with loss and label.

        Dropout and batch norm are in their inference form. Inputs, outputs and dynamic dimensions have the names of the
        model description; weights have their PyTorch names. A file that is there is replaced. Several processes would
        write the same: it is enough that one calls it.

        Args:
            path: Where to write. Weights beyond what one protobuf file holds go into ``<path>.data`` beside it.

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
            output_names: The outputs that the file has, in this order, of those that are described; None for all. The
                graph is cut down to them.

        Raises:
            TypeError: If ``output_names`` is no list of names.
            ValueError: If the loss is the only described output; if ``output_names`` is empty, or has an unknown name,
                the loss, or a name twice.
            RuntimeError, FileNotFoundError: As :meth:`save_as_onnx`.
        """
        self._save_onnx(path, "export_for_inference", inference_names(self.model_desc, output_names))

    @outside_inference_mode
    def _save_onnx(self, path: str | os.PathLike[str], method: str, names: Sequence[str]) -> None:
        state.check_started(self._loop, method)
        save_onnx(self._loop, path, names)

    # Copying asks for this too.
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(_NO_COPY)
