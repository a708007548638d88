"""``ORTTrainer``: the interface of the legacy trainer, in front of the training loop."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .amp import LossScaler
from .capture.step_module import LossFunction
from .core.errors import CheckpointError, shown
from .core.report import Report
from .core.unknown import explains_calls, meant
from .distributed import launch
from .engine.ort import require_onnx
from .optim import OptimizerConfig
from .optim.step_info import TrainStepInfo
from .options import ModelDescription, OptionsDict, ORTTrainerOptions
from .profiling import Profile
from .sources import loss_function
from .state import PathOrFile, load_checkpoint_file, save_checkpoint_file
from .state.state_dict import to_state_dict
from .train import state, tensors
from .train.learning_rates import Schedule
from .train.loop import TrainingLoop
from .train.onnx_files import save_onnx
from .train.strategy import Arrival
from .train.transaction import in_transaction
from .train.two_step import TwoStepSession

if TYPE_CHECKING:
    import onnx

    from .fit import Callback, Checkpoints, FitState, ManagedCheckpoints
    from .onnx.load import OnnxModel
    from .runs import CheckpointManager

# What other libraries call the arguments.
_ELSEWHERE = {
    **dict.fromkeys(("optimizer", "optim"), "optim_config"),
    **dict.fromkeys(("loss", "criterion", "compute_loss", "loss_func"), "loss_fn"),
    **dict.fromkeys(("scheduler", "lr_scheduler"), 'options={"lr_scheduler": ...}'),
    "device": 'options={"device": {"id": ...}}',
    "args": "options",
}
_ELSEWHERE_IN_FIT = {
    **dict.fromkeys(("num_epochs", "num_train_epochs", "max_epochs", "n_epochs"), "epochs"),
    **dict.fromkeys(("train_dataloader", "train_dataloaders", "train_dataset", "dataloader"), "train_loader"),
    **dict.fromkeys(
        ("val_loader", "val_dataloaders", "eval_dataset", "validation_data", "valid_loader"), "eval_loader"
    ),
    **dict.fromkeys(("eval_steps", "val_check_interval"), "eval_every"),
    **dict.fromkeys(("logger", "loggers"), "callbacks"),
    **dict.fromkeys(("ckpt_path", "resume_from_checkpoint"), "resume"),
}
# What other libraries call the methods and attributes.
_ELSEWHERE_IN_TRAINER = {
    "train": "fit for a whole run, or train_step for a batch",
    **dict.fromkeys(("step", "training_step", "train_batch", "train_on_batch"), "train_step"),
    **dict.fromkeys(("evaluate", "eval", "validate", "test", "evaluation_step", "validation_step"), "eval_step"),
    "backward": "forward_backward",
    "zero_grad": "lazy_reset_grad",
    **dict.fromkeys(("save", "save_state", "save_model"), "save_checkpoint, or save_as_onnx for an ONNX file"),
    **dict.fromkeys(("load", "load_state", "load_model", "resume", "restore"), "load_checkpoint"),
    **dict.fromkeys(("export", "to_onnx", "export_onnx"), "save_as_onnx, or export_artifacts for devices"),
    **dict.fromkeys(("parameters", "named_parameters"), "model.named_parameters, or get_parameter for one"),
    "scheduler": "lr_scheduler",
    **dict.fromkeys(("args", "config"), "options"),
}
_NO_COPY = (
    "an ORTTrainer can't be copied or pickled, because what runs its graphs is bound to its tensors: create another "
    "one with the same arguments and pass trainer.state_dict() to its load_state_dict(), or use save_checkpoint() and "
    "load_checkpoint()"
)


class ORTTrainer:
    """Trains a PyTorch model or an ONNX model, one graph a step.

    The first :meth:`train_step` (or :meth:`prepare`) exports PyTorch's own forward and backward pass as one graph.
    The trainer trains the model's own parameters and buffers: the model is current after every step, and changes to it
    between steps (weights, modes, settings, ``requires_grad``) take effect (models.md in the documentation).

    Args:
        model: The model. With ``loss_fn`` it returns the prediction; without it, the loss is one of its outputs. Either
            a PyTorch module, or an ONNX model: a ``ModelProto``, which is not changed, or the path of a file, with or
            without external data; all its floating-point initializers are trained except those in
            ``utils.frozen_weights``.
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
        options: Settings, as a dict or ``ORTTrainerOptions``; None for the defaults. The trainer uses the loss scaler
            and the schedule in them directly, so they can serve only one trainer at a time.

    Attributes:
        model: The PyTorch model, whose own parameters are trained; None for an ONNX model.
        loss_fn: The function; None if there is none.
        options: All settings.
        optim_config: The config; of an optimizer of PyTorch, what holds it.

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

    @explains_calls(
        'ORTTrainer(model, "auto", optim.AdamWConfig(lr=1e-3), loss_fn=loss_fn): "auto" derives the description of '
        "inputs and outputs from the first batch",
        _ELSEWHERE,
    )
    def __init__(
        self,
        model: nn.Module | OnnxModel | onnx.ModelProto | str | os.PathLike[str],
        model_desc: Mapping[str, Any] | str,
        optim_config: OptimizerConfig | torch.optim.Optimizer,
        loss_fn: LossFunction | str | None = None,
        options: ORTTrainerOptions | OptionsDict | None = None,
    ) -> None:
        self.model = model if isinstance(model, nn.Module) else None
        self.loss_fn = loss_function(loss_fn)
        self._loop = launch(model, model_desc, optim_config, self.loss_fn, options)
        self.options, self.optim_config = self._loop.options, self._loop.config

    @property
    def optimizer(self) -> OptimizerConfig | torch.optim.Optimizer:
        """What was given as ``optim_config``."""
        return getattr(self.optim_config, "optimizer", self.optim_config)

    @property
    def device(self) -> torch.device:
        """Where training runs."""
        return self._loop.device

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
        return self._loop.description

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
    @in_transaction
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._loop.window.size = steps

    @property
    def session(self) -> TwoStepSession | None:
        """Access to single passes and updates, graphs and tensors; None before the first step of a PyTorch model."""
        return TwoStepSession(self._loop) if self._loop.has_begun else None

    def prepare(self, sample_batch: Any = None) -> None:
        """Exports the model now instead of in the first step; trains nothing.

        Args:
            sample_batch: A batch as ``train_step`` takes it: a tuple, list or dict of inputs, or one tensor. Not needed
                for an ONNX model that computes its own loss.

        Raises:
            ExportError: If the model can't be exported, or an ONNX model can't be differentiated.
            RuntimeError: If a required batch is missing.
        """
        self._loop.export(sample_batch)

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
        outputs = self._loop.train(args, kwargs)
        return outputs[0] if len(outputs) == 1 else outputs

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

    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward and backward pass, and adds the gradients to ``p.grad`` of the model's parameters.

        Like ``loss.backward()``, it counts and updates nothing. Afterwards, inspect, clip or change the gradients, and
        update with an optimizer of ``torch.optim`` or with :meth:`optimizer_step`; call ``model.zero_grad()`` or
        :meth:`lazy_reset_grad` before the next pass, as in any PyTorch loop. Gradients never include the loss scale of
        mixed precision; gradients that overflowed are not finite, and :meth:`optimizer_step` notices that.

        Several processes must call it together; each gets the mean of all gradients, as with PyTorch's
        ``DistributedDataParallel``. Changes of ``p.grad`` afterwards must be the same in all processes.

        Args:
            *args: As for ``train_step``.
            **kwargs: As for ``train_step``.

        Returns:
            As ``train_step``.

        Raises:
            RuntimeError: Inside an accumulation window of ``train_step``; inside ``trainer.join()`` of several
                processes; or if the trainer works on copies of the weights (``utils.share_weights=False``, ONNX
                models).
            TypeError, ValueError: If the batch does not fit the description.
        """
        return bare(self._loop.forward_backward(args, kwargs))

    def optimizer_step(self) -> bool:
        """Updates the weights now, with the gradients so far.

        These are the gradients of the current accumulation window, which may be incomplete (as at the end of an epoch),
        or otherwise those that :meth:`forward_backward` has put into ``p.grad``, where they remain. Loss scale,
        clipping and schedule work as in ``train_step``. Several processes must call it together; some of them may have
        no micro-batch.

        Returns:
            Whether the weights were updated: False if there were no gradients, or if they were not finite in mixed
            precision.
        """
        return self._loop.optimizer_step()

    def lazy_reset_grad(self) -> None:
        """Drops all gradients that :meth:`optimizer_step` would use, so that the next pass starts from zero.

        It discards the current accumulation window; the next ``train_step`` starts a new one. It sets ``p.grad`` of the
        trained parameters to None, as ``model.zero_grad()`` does, except with ``utils.share_weights=False``, where the
        trainer does not use it. Weights, moments, running statistics, random state and counters do not change.
        """
        self._loop.lazy_reset_grad()

    def forward(self, *args: Any, training: bool = True, **kwargs: Any) -> Any:
        """Runs the model and the loss without gradients.

        In training mode, dropout is active, and batch norm uses the batch's statistics and updates its running ones, as
        in PyTorch's training mode under ``torch.no_grad()``.

        Args:
            *args: As for ``train_step``.
            training: Whether to run in training mode; False does what ``eval_step`` does.
            **kwargs: As for ``train_step``.

        Returns:
            As ``train_step``.
        """
        loop = self._loop
        if not training:
            return bare(loop.evaluate(args, kwargs, loop.info.fetches))
        return bare(loop.forward(args, kwargs))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns all outputs except the loss, in evaluation mode; unused inputs may be left out.

        Args:
            *args: As for ``train_step``, without the label.
            **kwargs: As for ``train_step``, without the label.

        Returns:
            The outputs as a list of new tensors; a single output as a bare tensor.

        Raises:
            TypeError: Before the first step, because the export needs all inputs: call ``prepare`` first.
            ValueError: If the loss is the only described output.
        """
        return bare(self._loop.evaluate(args, kwargs, self.model_desc.inference_names()))

    @in_transaction
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
        return self._loop.begin_profile(steps, trace)

    @in_transaction
    def save_as_onnx(self, path: str | os.PathLike[str]) -> None:
        """Writes the evaluation graph with the current weights: what :meth:`eval_step` computes, with loss and label.

        For an ONNX model, it writes the original model, node for node, with the current weights; a ``loss_fn`` is not
        part of it. What follows is about PyTorch models.

        Dropout and batch norm are in their inference form. Inputs, outputs and dynamic dimensions have the names of the
        model description; weights have their PyTorch names. An existing file is replaced. With several processes, one
        call in any of them suffices.

        Args:
            path: Path of the file. Weights beyond the size limit of a protobuf file go into ``<path>.data`` beside it.

        Raises:
            RuntimeError: Before the first step or :meth:`prepare`, when there is no graph yet.
            ValueError: If the path is empty.
            FileNotFoundError: If the folder does not exist.
        """
        save_onnx(self._loop, path, self.model_desc.output_names)

    @in_transaction
    def export_for_inference(self, path: str | os.PathLike[str], output_names: Sequence[str] | None = None) -> None:
        """Writes the model as :meth:`save_as_onnx` does, without the loss and without inputs that only the loss needs.

        An ONNX model's dropout and batch norm are put into their inference form.

        Args:
            path: As for :meth:`save_as_onnx`.
            output_names: Described outputs to write, in this order; None for all. The graph is pruned to them.

        Raises:
            TypeError: If ``output_names`` is not a list of names.
            ValueError: If the loss is the only described output; if ``output_names`` is empty, or contains an unknown
                name, the loss, or a duplicate.
            RuntimeError, FileNotFoundError: As :meth:`save_as_onnx`.
        """
        names = self.model_desc.inference_names(output_names)
        save_onnx(self._loop, path, names, for_inference=True)

    @in_transaction
    def export_artifacts(
        self,
        directory: str | os.PathLike[str],
        *,
        flavor: str = "ort_trainer",
        nominal_checkpoint: bool = True,
        fixed_learning_rate: bool = False,
        reduced_operators: str | None = None,
        quantize_frozen: str | None = None,
    ) -> None:
        """Writes models and a checkpoint with which ``ort_trainer.api`` continues training, without PyTorch.

        The files are ``training_model.onnx`` (forward and backward pass; adds to gradient buffers),
        ``eval_model.onnx``, ``optimizer_model.onnx``, ``checkpoint``, and ``nominal_checkpoint``. Training continues
        from them exactly as it would in the trainer: with its weights, moments, counts, schedule, random numbers, and
        the gradients of an incomplete accumulation window. The trainer does not change.

        With several processes, all must call it, and one of them writes; artifacts train in one process, with the
        random numbers of the writing process. A PyTorch model, or ``model_desc="auto"``, needs a call of
        :meth:`prepare` or a step first.

        Args:
            directory: A folder, created if it does not exist. Existing artifacts in it are replaced: all of them, or
                none if anything fails.
            flavor: ``ort_trainer`` for ``ort_trainer.api`` on any ONNX Runtime, or ``onnxruntime-training`` for
                ``onnxruntime.training.api`` 1.19.2 and ``onnxruntime-web``.
            nominal_checkpoint: Whether to write a checkpoint that holds only the shapes of the parameters.
            fixed_learning_rate: For the flavor ``onnxruntime-training``: whether to store the learning rate in the
                optimizer model, for a runtime that can't set it, such as a browser.
            reduced_operators: Name of a file, such as ``ops.config``, to write beside the models: the operators that
                they need, as ``--include_ops_by_config`` of ONNX Runtime's build takes them. None for no such file.
            quantize_frozen: ``int8`` or ``int4`` to store frozen weights of two or more dimensions rounded, with a
                scale for each row or each 32 elements; they stay frozen on the device. None keeps them as they are.

        Raises:
            RuntimeError: Before the first step, if the model can be exported only with a batch.
            ValueError: If the artifacts can't do what the trainer does; the message says what, and the way out.
            ExportError: If the model has no graph of ONNX's own operators.
            TypeError, FileNotFoundError, NotADirectoryError: If the folder is invalid.
        """
        require_onnx()
        from .artifacts.export import export_artifacts  # here, because it imports onnx

        export_artifacts(
            self._loop,
            directory,
            flavor=flavor,
            nominal_checkpoint=nominal_checkpoint,
            fixed_learning_rate=fixed_learning_rate,
            reduced_operators=reduced_operators,
            quantize_frozen=quantize_frozen,
        )

    @explains_calls("trainer.fit(train_loader, eval_loader, epochs=5)", _ELSEWHERE_IN_FIT)
    def fit(
        self,
        train_loader: Iterable[Any],
        eval_loader: Iterable[Any] | None = None,
        epochs: int | None = None,
        *,
        max_steps: int | None = None,
        eval_every: int | None = None,
        metrics: Any = None,
        labels: str | None = None,
        callbacks: Iterable[Callback] = (),
        checkpoints: str | os.PathLike[str] | CheckpointManager | Checkpoints | ManagedCheckpoints | None = None,
        resume: bool | str | os.PathLike[str] = False,
        progress: bool | Callback = True,
        stop_signals: Iterable[str] = (),
    ) -> FitState:
        """Trains for a number of epochs or steps, and evaluates after each epoch or every so many steps.

        Ctrl-C ends training after the current step with the status ``interrupted`` and saves the last checkpoint. With
        several processes, each calls it with a loader of its part of the data; the history has the means over all.

        Args:
            train_loader: An iterable that yields the batches of one epoch each time: a DataLoader, a list. A batch is
                anything that :meth:`train_step` accepts: a tuple, list, dict or tensor. Batches are moved to the
                device. A dict may hold ``gradient_weight`` beside the inputs.
            eval_loader: The same for the evaluation.
            epochs: Total number of epochs, including those before a checkpoint. Default: 1, or as many as ``max_steps``
                takes. An accumulation window never extends beyond its epoch.
            max_steps: Ends training after so many steps (batches) in all, including those before a checkpoint; None for
                no such limit. Loaders of endless streams need it.
            eval_every: Evaluates also within epochs, whenever so many steps have followed the last evaluation, which
                then ends an entry of the history; None to evaluate after epochs.
            metrics: Metrics of the evaluation: one, a list, or a dict by name. A metric is a function
                (outputs, labels) -> number, which is averaged over the samples; an object with ``update``, ``compute``
                and ``reset``; or an object with ``add_batch`` and ``compute``. A tuple (metric, function) passes the
                metric the function's result instead of the outputs. Outputs exclude the loss.
            labels: Name of the input that metrics compare with. Default: ``labels`` or ``label`` if there is one,
                otherwise the last input.
            callbacks: Instances of ``ort_trainer.fit.Callback``.
            checkpoints: A folder for ``last.ortckpt`` and ``best.ortckpt``, a ``CheckpointManager``, or an instance of
                ``ort_trainer.fit.Checkpoints`` or ``ManagedCheckpoints``, which have more settings.
            resume: Whether to resume from the last checkpoint, if there is one; or the path of a checkpoint. In the
                middle of an epoch, the batches already done are loaded and skipped.
            progress: Whether to show progress; or a callback that shows it.
            stop_signals: Names of signals that end training as Ctrl-C does, such as ``["SIGTERM"]``, which job
                schedulers and containers send before they kill. The current step completes, even if it exports.

        Returns:
            The final state: ``status``, ``history`` with a dict for each epoch or evaluation, ``plot(path)``.

        Raises:
            TypeError, ValueError: If an argument is invalid, or a monitored number does not exist.
            FileNotFoundError: If the checkpoint to resume from does not exist.
            FileExistsError: If existing checkpoints would be replaced.
            CheckpointError: If the checkpoint was not saved by ``fit``.
            RuntimeError: If ``stop_signals`` are given outside the main thread, which alone handles signals.
        """
        from .fit import fit

        return fit(
            self,
            self._loop.device,
            train_loader,
            eval_loader,
            epochs,
            max_steps=max_steps,
            eval_every=eval_every,
            metrics=metrics,
            labels=labels,
            callbacks=callbacks,
            checkpoints=checkpoints,
            resume=resume,
            progress=progress,
            stop_signals=stop_signals,
        )

    @in_transaction
    def get_parameter(self, name: str) -> torch.Tensor:
        """Returns a copy of a parameter, trained or not, on the CPU. A tied parameter has several names.

        Raises:
            ValueError: If the model has no such parameter.
        """
        return tensors.get_parameter(self._loop, name)

    @in_transaction
    def set_parameter(self, name: str, value: Any) -> None:
        """Sets a parameter to a copy of a tensor or array; its moments do not change.

        With several processes, all must set the same value, because each changes only its own weights.

        Raises:
            TypeError, ValueError: If the model has no such parameter, or shape or dtype differ.
        """
        tensors.set_parameter(self._loop, name, value)

    @in_transaction
    def get_gradient(self, name: str) -> torch.Tensor | None:
        """Returns a copy of a parameter's gradient over the accumulation window so far, on the CPU.

        This is the gradient that an update would use now, before clipping: without the loss scale, and reduced
        according to ``batch.gradient_reduction``. Right after an update, it is the gradient that the update used, after
        clipping. Returns None before the first step, and for parameters that are not trained or do not affect the loss.
        With several processes, each gets the gradient of its own micro-batches, and after an update the gradient that
        the update used; with ZeRO, None after an update, because no process has all of it.

        Raises:
            ValueError: If the model has no such parameter.
        """
        return tensors.get_gradient(self._loop, name)

    @in_transaction
    def set_gradient(self, name: str, value: Any) -> None:
        """Sets a parameter's gradient over the window so far to a copy of a tensor or array; see get_gradient.

        With several processes, it sets the gradient of this process only.

        Raises:
            RuntimeError: If the window has no micro-batch yet: the first one would overwrite the gradient.
            TypeError, ValueError: If the parameter is unknown or not trained, or shape or dtype differ.
        """
        tensors.set_gradient(self._loop, name, value)

    @in_transaction
    def state_dict(self, pytorch_format: bool = False) -> dict[str, Any]:
        """Returns the state of the trainer as copies on the CPU.

        Args:
            pytorch_format: True for weights and buffers only, as in ``model.state_dict()``: name -> torch tensor. False
                for everything, as nested dicts with numpy arrays: ``model`` (``full_precision``), ``optimizer`` (for
                each weight the state of its rule, such as ``Moment_1``, and ``Update_Count``; for LAMB also
                ``shared_optimizer_state``), ``trainer_options``, ``train_step_info``, ``window`` (the accumulation
                window) and its ``gradients``, ``random``, and ``loss_scaler`` and ``lr_scheduler`` if there are any.
                An update count is the number of updates plus 1, as in the legacy trainer.

        Returns:
            The state. With several processes, all must call it, and each gets the complete state, even with ZeRO;
            ``random_states`` has the random states of all.
        """
        return state.to_pytorch(self._loop) if pytorch_format else state.collect(self._loop)

    @in_transaction
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Restores a state from :meth:`state_dict`, in either format, before or after the first step.

        It checks everything first: on an error, nothing has changed. With several processes, all must call it with the
        same state, which may come from another number of processes.

        Args:
            state_dict: The state, or the state dict of a PyTorch model, which restores weights and buffers only.
            strict: Whether names must match exactly; if False, only common names are restored.

        Raises:
            RuntimeError: If names do not match and ``strict`` is True, or if no name matches.
            TypeError, ValueError: If a value has the wrong type, shape or dtype, or belongs to another optimizer.
            DistributedError: If another process fails, or was given another state.
        """
        state.load(self._loop, lambda: state_dict, strict)

    @in_transaction
    def save_checkpoint(
        self,
        path: PathOrFile,
        user_dict: Mapping[str, Any] | None = None,
        include_optimizer_states: bool = True,
        overwrite: bool = False,
    ) -> None:
        """Writes the complete state to one safetensors file, atomically.

        With several processes, all must call it; one writes (rank 0 unless it has run out of data), and the others
        wait.

        Args:
            path: A path, or an open binary file.
            user_dict: Your own values, which :meth:`load_checkpoint` returns: dicts, lists, tuples, sets, numbers,
                strings, bytes, bools, None, tensors and numpy arrays.
            include_optimizer_states: Whether to write moments and accumulated gradients too.
            overwrite: Whether to replace an existing file.

        Raises:
            FileExistsError: If the path exists and ``overwrite`` is False.
            FileNotFoundError: If the folder does not exist.
            TypeError: If ``user_dict`` holds anything else.
            DistributedError: If another process could not write the file.
        """
        user_dict = {} if user_dict is None else user_dict
        state.save(
            self._loop,
            include_optimizer_states,
            lambda gathered: save_checkpoint_file(path, to_state_dict(gathered), user_dict, overwrite),
        )

    @in_transaction
    def load_checkpoint(self, *paths: PathOrFile, strict: bool = True) -> dict[str, Any]:
        """Restores a checkpoint, before or after the first step.

        It also reads HDF5 files of the legacy ``ORTTrainer`` (with the extra ``legacy``), except for the user's dict in
        them, which is a pickle.

        Args:
            *paths: One file, as a path or an open binary file; for a legacy run with ZeRO, the files of all ranks.
            strict: As for :meth:`load_state_dict`.

        Returns:
            The user's dict.

        Raises:
            FileNotFoundError: If the file does not exist.
            CheckpointError: If the file is damaged, is not a checkpoint, or holds a value of the wrong kind. Nothing
                has changed then, as with the errors below.
            ImportError: If it is a legacy file and h5py is not installed.
            RuntimeError, ValueError: As :meth:`load_state_dict`, if the state does not fit this trainer.
        """
        if not paths:
            raise ValueError("Expected number of files to load: 1, got 0")
        user_dict: dict[str, Any] = {}
        was_read = False

        def read() -> dict[str, Any]:
            nonlocal was_read
            state_dict, values = load_checkpoint_file(*paths)
            user_dict.update(values)
            was_read = True
            return state_dict

        try:
            state.load(self._loop, read, strict, owned=True)
        except (TypeError, LookupError, AttributeError, ArithmeticError) as error:
            if not was_read:
                raise
            # The error is in the file, not in an argument.
            names = ", ".join(shown(path) for path in paths)
            raise CheckpointError(f"{names} holds a value that is invalid in a checkpoint: {error}") from error
        return user_dict

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return self._loop.strategy.world_size

    @property
    def world_rank(self) -> int:
        """Rank of this process, from 0."""
        return self._loop.strategy.world_rank

    def gather(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the values of all processes, by rank. All processes must call it at the same point.

        Args:
            values: Anything that the ``user_dict`` of a checkpoint may hold; for large tensors ``torch.distributed`` is
                faster.

        Raises:
            DistributedError: If another process does not arrive in time, or calls something else.
            TypeError: If the values hold anything else.
        """
        if self.world_size == 1:
            return [dict(values)]
        self._loop.strategy.meet(Arrival("gather"))
        return self._bring(values)

    def join(self, answer: Callable[[], Mapping[str, Any]] = dict) -> AbstractContextManager[None]:
        """Returns a context for loops in which processes have unequal numbers of batches.

        Weight updates are joint, so without this context, processes with more batches would wait forever for the
        others. A process that reaches the end of the context takes part in the calls of the others until all have
        reached it: in the updates of ``train_step`` and ``optimizer_step``, to the first of which it contributes the
        rest of its accumulation window, and in ``state_dict``, ``save_checkpoint`` and :meth:`gather`. An update uses
        the available micro-batches, reduced according to ``batch.gradient_reduction``. After the context, all processes
        have the same weights and the same number of updates; to update with the remaining micro-batches, call
        ``optimizer_step`` in all of them.

        All processes must enter the context. An exception leaves it at once. ``forward_backward`` is refused inside it,
        because other processes can't imitate a user's own loop. With one process the context does nothing.

        Args:
            answer: Returns this process's values for a :meth:`gather` of the others after it has reached the end.

        Raises:
            DistributedError: At the end, if another process does not arrive in time.
            RuntimeError: If this process is already in such a context.

        Example:
            >>> with trainer.join():
            ...     for x, y in batches_of_this_process:
            ...         trainer.train_step(x, y)
            >>> trainer.optimizer_step()
        """

        def follow() -> str:
            kind = state.follow(self._loop)
            if kind == "gather":
                self._bring(answer())
            return kind

        return self._loop.strategy.join(follow)

    def _bring(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Exchanges values with all other processes, after a meeting for this."""
        buffer = io.BytesIO()
        save_checkpoint_file(buffer, {}, values)
        return [load_checkpoint_file(io.BytesIO(file))[1] for file in self._loop.strategy.gather(buffer.getvalue())]

    def report(self) -> Report:
        """Returns what has run: steps by graph, exports and their seconds, whose kernels compute, and the memory.

        Example:
            >>> print(trainer.report())
        """
        return self._loop.report(repr(self)[1:-1])

    def __repr__(self) -> str:
        """Returns the model's name, the steps, their dtype in mixed precision, and whose kernels compute them."""
        kernels = f", on {self._loop.kernels} kernels" if self._loop.kernels else ""
        precision = self.options.mixed_precision
        dtype = f" in {precision.dtype}" if precision.enabled else ""
        return f"<ORTTrainer of {self._loop.source.name}: {self._loop.info.step} steps{dtype}{kernels}>"

    if not TYPE_CHECKING:  # so that type checkers report unknown attributes

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or hasattr(type(self), name):  # or the error is from inside a property
                return super().__getattribute__(name)
            known = [each for each in dir(self) if not each.startswith("_")]
            hint = meant(name, known, _ELSEWHERE_IN_TRAINER)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}: {hint}")

    # copy and pickle both call this.
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(_NO_COPY)


def bare(outputs: list[Any]) -> Any:
    """Returns a step's outputs as a list, or a single output alone."""
    return outputs[0] if len(outputs) == 1 else outputs
