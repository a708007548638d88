"""``generate_artifacts``: writes artifacts of a model that was not trained here, with upstream's arguments."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..core.errors import shown, was_given
from ..distributed import launch
from ..optim import AdamConfig, OptimizerConfig, SGDConfig
from ..options import OptionsDict, ORTTrainerOptions
from ..sources import loss_function
from .kinds import LossType, OptimType

_LOSSES = {
    LossType.MSELoss: F.mse_loss,
    LossType.CrossEntropyLoss: F.cross_entropy,
    LossType.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    LossType.L1Loss: F.l1_loss,
}


def generate_artifacts(
    model: Any,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: Any = None,
    optimizer: Any = None,
    artifact_directory: str | os.PathLike[str] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | os.PathLike[str] | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
    *,
    model_desc: Mapping[str, Any] | str = "auto",
    sample_batch: Any = None,
    options: ORTTrainerOptions | OptionsDict | None = None,
    flavor: str = "ort_trainer",
    memory_budget: int | str | None = None,
    quantize_frozen: str | None = None,
    reduced_operators: str | None = None,
) -> None:
    """Writes artifacts for training with ``ort_trainer.api`` from a model that was not trained here.

    The arguments before the star are those of ``onnxruntime.training.artifacts.generate_artifacts``. The files are
    ``training_model.onnx``, ``eval_model.onnx`` and ``checkpoint``, plus ``optimizer_model.onnx`` and
    ``nominal_checkpoint`` if requested. They replace the files of an earlier export: all of them, or none if anything
    fails.

    Args:
        model: A PyTorch module or an ONNX model, as a ``ModelProto`` or the path of a file.
        requires_grad: Names of the parameters to train; None for all but ``frozen_params``.
        frozen_params: Names of parameters that are not trained.
        loss: A :class:`LossType`, a function (prediction, label) -> loss, for an ONNX model an onnxblock, or None if
            the loss is an output of the model: its only scalar output, or the one named ``loss``. A :class:`LossType`
            adds an input, named ``labels`` for cross entropy, whose prediction has the classes as second dimension, and
            ``target`` for the others. The loss is then named ``loss``, or ``loss_1`` if the ONNX model already uses
            that name. An onnxblock names its labels and the loss itself.
        optimizer: An :class:`OptimType`, a config of ``ort_trainer.optim``, an onnxblock, or, for a PyTorch module, a
            ``torch.optim`` optimizer over its parameters. None writes no optimizer model.
        artifact_directory: The folder to write to, created if needed; None for the current one.
        prefix: Prefix of the file names.
        ort_format: Must be False: only onnxruntime-training's own engine reads training models in ORT format.
        custom_op_library: Must be None: artifacts use standard ONNX operators only, so any ONNX Runtime can run them.
        additional_output_names: Outputs of the models after the loss, in this order. For a PyTorch module, described
            outputs; None for all, in the order of the description. For an ONNX model, any values; None for no others.
            For an ONNX model with its own loss, they follow all its outputs.
        nominal_checkpoint: Whether to also write a checkpoint with only the shapes of the parameters.
        loss_input_names: For an ONNX model, the output that ``loss`` takes as prediction, and optionally a name for
            the label; None if the model has one output.
        model_desc: For a PyTorch module, its description, as for ``ORTTrainer``.
        sample_batch: For a PyTorch module, a batch as for ``ORTTrainer.prepare``. For an ONNX model with a function as
            loss, a dict of its inputs and the label.
        options: Settings, as for ``ORTTrainer``.
        flavor, quantize_frozen, reduced_operators: As for ``ORTTrainer.export_artifacts``.
        memory_budget: How much memory training may take, as a number of bytes or a text such as ``64MB``, beyond a
            process in which ONNX Runtime is loaded, with batches of the size of ``sample_batch``. Parameters are frozen
            until training fits, weights of the first layers first. Then ``memory.json`` says the peak that was measured
            on this machine, and what is trained.

    Raises:
        TypeError, ValueError: If an argument is invalid, or a name is unknown.
        ExportError: If the model can't be exported.

    Example:
        >>> generate_artifacts(
        ...     "model.onnx", loss=LossType.CrossEntropyLoss, optimizer=OptimType.AdamW, artifact_directory="artifacts"
        ... )
    """
    from .blocks import is_block, optimizer_config, with_loss
    from .export import export_artifacts  # loads the ONNX libraries, which the enums of this package don't need
    from .files import MEMORY
    from .memory_budget import choose_trained, parse_budget
    from .onnx_models import Prepared, is_onnx, prepared

    _check_flags(ort_format, custom_op_library, prefix)
    name_lists = {
        "requires_grad": requires_grad,
        "frozen_params": frozen_params,
        "additional_output_names": additional_output_names,
        "loss_input_names": loss_input_names,
    }
    for argument, names in name_lists.items():
        _check_names(argument, names)
    if is_block(loss):
        if not is_onnx(model):
            raise TypeError(
                f"loss is the onnxblock {type(loss).__name__}, which is for ONNX models, but {shown(model)} was given: "
                "give a LossType, or a function (prediction, label) -> loss in PyTorch"
            )
        model, loss, loss_input_names = with_loss(model, loss, loss_input_names), None, None
    limit = None
    if is_block(optimizer):
        optimizer, limit = optimizer_config(optimizer)
    loss_fn = _loss_function(loss)
    if isinstance(model, nn.Module):
        _check_module(model, requires_grad, loss_input_names, sample_batch)
        parameters = [name for name, _ in model.named_parameters()]
        arguments = Prepared(model, model_desc, sample_batch, parameters, additional_output_names)
    elif is_onnx(model):
        if model_desc != "auto":
            raise ValueError("model_desc is for PyTorch modules only: an ONNX model describes itself, so leave it out")
        kind = loss.name if isinstance(loss, Enum) else None
        # A predefined loss needs no batch; a memory budget needs one, but only for measuring.
        batch = None if kind is not None and memory_budget is not None else sample_batch
        arguments = prepared(model, loss_fn, kind, batch, additional_output_names, loss_input_names, requires_grad)
    else:
        raise TypeError(
            f"model must be a torch.nn.Module, an onnx.ModelProto or the path of an ONNX file, but {was_given(model)}"
        )
    frozen = _frozen(arguments.parameters, requires_grad, frozen_params)
    options = ORTTrainerOptions.of(options)
    idle = {*frozen, *_frozen_before(arguments.model), *options.utils.frozen_weights}
    config, notes = _config(optimizer), dict[str, str]()

    def export(more: Sequence[str], directory: str | os.PathLike[str], prefix: str = "", **settings: Any) -> None:
        chosen = _with_frozen(options, [*frozen, *more], limit)
        export_artifacts(
            launch(arguments.model, arguments.model_desc, config, loss_fn, chosen),
            directory,
            flavor=flavor,
            optimizer=optimizer is not None,
            prefix=prefix,
            outputs=arguments.outputs,
            # With a budget, the first candidate may have no frozen weight, which quantize_frozen would refuse.
            quantize_frozen=quantize_frozen if memory_budget is None or idle or more else None,
            sample_batch=arguments.batch,
            **settings,
        )

    more: Sequence[str] = ()
    if memory_budget is not None:
        trained = [name for name in arguments.parameters if name not in idle]
        more, notes[MEMORY] = choose_trained(trained, parse_budget(memory_budget), sample_batch, export)
    export(
        more,
        Path.cwd() if artifact_directory is None else artifact_directory,
        prefix,
        nominal_checkpoint=nominal_checkpoint,
        reduced_operators=reduced_operators,
        notes=notes,
    )


def _check_flags(ort_format: Any, custom_op_library: Any, prefix: Any) -> None:
    if ort_format is not False:
        raise ValueError(
            f"ort_format must be False, but {shown(ort_format)} was given: the .ort format is tied to one build of "
            "ONNX Runtime, while any engine runs .onnx files. To convert an exported inference model, use "
            "onnxruntime.tools.convert_onnx_models_to_ort"
        )
    if custom_op_library is not None:
        raise ValueError(
            f"custom_op_library must be None, but {shown(custom_op_library)} was given: artifacts have standard ONNX "
            "operators only. Compose your operator of those, in PyTorch or as an ONNX function"
        )
    if not isinstance(prefix, str) or Path(prefix).name != prefix:
        raise ValueError(f"prefix must be a str without folders, but {shown(prefix)} was given")


def _check_names(argument: str, names: Any) -> None:
    """Checks that an argument is None or a list of names."""
    if names is None:
        return
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} must be a list of names, but {shown(names)} was given")


def _check_module(
    model: nn.Module, requires_grad: Sequence[str] | None, loss_input_names: Any, sample_batch: Any
) -> None:
    """Checks the arguments whose meaning differs for ONNX models."""
    if loss_input_names is not None:
        raise ValueError(
            "loss_input_names is for ONNX models only: the loss of a PyTorch module gets all its outputs, so choose "
            "among them in the function, loss=lambda outputs, label: ..."
        )
    if sample_batch is None:
        raise ValueError("exporting a PyTorch module needs a batch: give sample_batch=(input, ..., label)")
    both = [name for name in _frozen_before(model) if name in (requires_grad or ())]
    if both:
        raise ValueError(
            f"requires_grad names {both}, which are frozen in the module: call .requires_grad_(True) on them, or leave "
            "them out"
        )


def _loss_function(loss: Any) -> Any:
    """Returns the function for ``loss``, or None if the model computes the loss."""
    # Accepts any enum with these names, such as onnxruntime-training's.
    kind = LossType.__members__.get(loss.name) if isinstance(loss, Enum) else None
    if kind is not None:
        return _LOSSES[kind]
    if isinstance(loss, (Enum, type)) or (loss is not None and not callable(loss) and not isinstance(loss, str)):
        raise TypeError(
            f"loss must be a LossType ({', '.join(LossType.__members__)}), a function (prediction, label) -> loss, or "
            f"None, but {was_given(loss)}"
        )
    return loss_function(loss)


def _config(optimizer: Any) -> OptimizerConfig | torch.optim.Optimizer:
    """Returns the config for ``optimizer``, with onnxruntime-training's hyper-parameters for an OptimType."""
    name = getattr(optimizer, "name", "") if isinstance(optimizer, Enum) else ""
    if optimizer is None or name == OptimType.SGD.name:
        return SGDConfig(lr=1e-3)
    if name == OptimType.AdamW.name:
        # The variant of Transformers, which adds epsilon before the bias correction of the second moment.
        after = AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
        return AdamConfig(lr=1e-3, epsilon=1e-6, max_norm_clip=math.inf, weight_decay_mode=after)
    if isinstance(optimizer, (OptimizerConfig, torch.optim.Optimizer)):
        return optimizer
    raise TypeError(
        f"optimizer must be an OptimType ({', '.join(OptimType.__members__)}), a config of ort_trainer.optim, an "
        f"optimizer of torch.optim, or None, but {was_given(optimizer)}"
    )


def _frozen(
    parameters: Sequence[str], requires_grad: Sequence[str] | None, frozen_params: Sequence[str] | None
) -> list[str]:
    """Returns the names of the parameters that are not trained."""
    both = sorted({*(requires_grad or ())} & {*(frozen_params or ())})
    if both:
        raise ValueError(f"parameters can't be in both requires_grad and frozen_params: {both}")
    for argument, names in (("requires_grad", requires_grad), ("frozen_params", frozen_params)):
        unknown = [name for name in names or () if name not in parameters]
        if unknown:
            raise ValueError(f"unknown parameters {unknown} in {argument}: the model has {parameters}")
    if requires_grad is None:
        return list(frozen_params or ())
    return [name for name in parameters if name not in requires_grad]


def _frozen_before(model: Any) -> Collection[str]:
    """Returns the names of the parameters that the model itself freezes."""
    if isinstance(model, nn.Module):
        return [name for name, value in model.named_parameters() if not value.requires_grad]
    return model.frozen  # type: ignore[no-any-return]


def _with_frozen(options: ORTTrainerOptions, frozen: Sequence[str], limit: float | None) -> ORTTrainerOptions:
    """Returns the options with more frozen weights, a limit of the gradient norm, and ONNX Runtime's kernels.

    For these kernels, the graphs consist of standard operators.
    """
    weights = list(dict.fromkeys([*options.utils.frozen_weights, *frozen]))
    norm = {} if limit is None else {"max_grad_norm": limit}
    return options.changed({"utils": {"frozen_weights": weights, "kernels": "onnxruntime", **norm}})
