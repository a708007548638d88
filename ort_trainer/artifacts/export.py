"""Exports a training loop and its state as artifacts for the training API."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from ..capture.borrow import BORROWED
from ..core.errors import shown
from ..core.quantized import check_kind
from ..engine.ownership import shared_groups
from ..optim import lr_scheduler
from ..state.devices import for_device
from ..state.state import State
from ..step import Step
from ..train.loop import TrainingLoop
from ..train.state import save
from ..train.transaction import in_transaction
from .files import (
    CHECKPOINT,
    EVALUATION_MODEL,
    NOMINAL_CHECKPOINT,
    OPTIMIZER_MODEL,
    TRAINING_MODEL,
    Described,
    contents,
    target_folder,
    write_files,
)
from .kinds import FLAVORS
from .optimizer_model import Updated, optimizer_model
from .quantize import with_quantized
from .reduced_operators import check_name, operators_of
from .step_models import check_portable, evaluation_model, training_model
from .updates import optimizer_name, parameter_updates

_WEIGHTS = (torch.float32, torch.float64)


@in_transaction
def export_artifacts(
    loop: TrainingLoop,
    directory: str | os.PathLike[str],
    *,
    flavor: str = "ort_trainer",
    nominal_checkpoint: bool = True,
    optimizer: bool = True,
    prefix: str = "",
    outputs: Sequence[str] | None = None,
    fixed_learning_rate: bool = False,
    reduced_operators: str | None = None,
    quantize_frozen: str | None = None,
    notes: Mapping[str, str] = {},
    sample_batch: Any = None,
) -> None:
    """Writes artifacts; see ``ORTTrainer.export_artifacts``.

    Args:
        loop: The training loop; if it has not started, its model is exported.
        directory: The folder to write to.
        flavor: One of :data:`FLAVORS`.
        nominal_checkpoint: Whether to also write a checkpoint without values.
        optimizer: Whether to write an optimizer model.
        prefix: Prefix of the file names.
        outputs: Outputs of the models besides the loss; None for all described ones.
        fixed_learning_rate: Whether to store the learning rate in onnxruntime-training's optimizer model.
        reduced_operators: Name of a file that lists the operators that the models need; None for no such file.
        quantize_frozen: The type of frozen weights, ``int8`` or ``int4``; None to keep them as they are.
        notes: Name -> text of files to write beside the models.
        sample_batch: A batch for the export of the model, as for ``ORTTrainer.prepare``.
    """
    if flavor not in FLAVORS:
        raise ValueError(f"flavor must be one of {list(FLAVORS)}, but {shown(flavor)} was given")
    switches = {"nominal_checkpoint": nominal_checkpoint, "fixed_learning_rate": fixed_learning_rate}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, but {shown(value)} was given")
    if fixed_learning_rate and flavor == FLAVORS[0]:
        raise ValueError(
            "fixed_learning_rate is for the flavor 'onnxruntime-training' only: ort_trainer.api takes rates and "
            "schedule from the checkpoint, so leave it out"
        )
    if reduced_operators is not None:
        check_name(reduced_operators)
        if flavor != FLAVORS[0]:
            raise ValueError(
                f"reduced_operators is for the flavor {FLAVORS[0]!r} only, which reduced builds of ONNX Runtime can "
                "train: leave it out"
            )
    check_kind(quantize_frozen, "quantize_frozen", optional=True)
    if quantize_frozen is not None and flavor != FLAVORS[0]:
        raise ValueError(f"quantize_frozen is for the flavor {FLAVORS[0]!r} only: leave it out")
    _check_exportable(loop)
    if not loop.graphs.has_started:
        loop.export(sample_batch)

    def write_all(state: State) -> None:
        folder = target_folder(directory)
        parts = _collect(loop, state, optimizer, outputs)
        if flavor == FLAVORS[0]:
            write = _our_writer(parts, nominal_checkpoint, quantize_frozen)
        else:
            write = _upstream_writer(parts, nominal_checkpoint, fixed_learning_rate)

        def write_with_notes(temporary: Path) -> None:
            write(temporary)
            texts = dict(notes)
            if reduced_operators is not None:
                texts[reduced_operators] = operators_of(temporary.glob("*.onnx"))
            for name, text in texts.items():
                (temporary / name).write_text(text, encoding="utf-8")

        write_files(folder, write_with_notes, prefix)

    # True gathers the moments and gradients that other processes hold.
    save(loop, True, write_all)


@dataclass(frozen=True)
class _ExportParts:
    """The parts from which the files of either flavor are written.

    Attributes:
        training: The graph of a training step.
        evaluation: The graph of an evaluation step.
        weight: Factor for the loss of a micro-batch.
        updates: The updates of the trained parameters.
        optimizer: The optimizer model and its description; None to write none.
        checkpoint: The state.
        buffers: Which of the checkpoint's parameters are buffers of the model.
    """

    training: Step
    evaluation: Step
    weight: float
    updates: Mapping[str, Updated]
    optimizer: Described | None
    checkpoint: State
    buffers: Sequence[str]


def _collect(loop: TrainingLoop, state: State, optimizer: bool, outputs: Sequence[str] | None) -> _ExportParts:
    """Exports the graphs and the optimizer model, and converts the state to one for devices."""
    executor, window = loop.executor, loop.window
    assert executor is not None
    training, evaluation = (_with_outputs(loop.graphs.portable(executor, mode), outputs) for mode in (True, False))
    if not loop.options.debug.check_indices:
        training, evaluation = (replace(graph, index_ranges=()) for graph in (training, evaluation))
    # Each micro-batch adds its share of the mean, so the sum over a full window is the mean.
    count = window.size if window.reduction == "mean" else 1
    updates = parameter_updates(loop, state, list(training.gradients))
    model, description, optimizer_state = optimizer_model(
        optimizer_name(loop.config), updates, len(state.learning_rates), count
    )
    checkpoint = for_device(replace(state, schedule=_schedule_of(loop)), optimizer_state, list(updates))
    if not optimizer:
        checkpoint.optimizer = None
    buffers = [name for name in checkpoint.parameters if name in executor.buffers]
    optimizer_file = (model, description) if optimizer else None
    return _ExportParts(training, evaluation, 1.0 / count, updates, optimizer_file, checkpoint, buffers)


def _our_writer(parts: _ExportParts, nominal: bool, quantized: str | None) -> Callable[[Path], None]:
    """Returns a function that writes the files for ``ort_trainer.api``."""
    models: dict[str, Described] = {
        TRAINING_MODEL: training_model(parts.training.unchecked(), parts.weight),
        EVALUATION_MODEL: evaluation_model(parts.evaluation.unchecked()),
    }
    if parts.optimizer is not None:
        models[OPTIMIZER_MODEL] = parts.optimizer
    checkpoint = parts.checkpoint
    if quantized is not None:
        models, checkpoint = with_quantized(models, checkpoint, quantized, parts.buffers)
    files = contents(models, checkpoint, nominal)

    def write(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).write_bytes(content)

    return write


def _upstream_writer(parts: _ExportParts, nominal: bool, fixed_learning_rate: bool) -> Callable[[Path], None]:
    """Returns a function that writes the files for onnxruntime-training.

    Raises:
        ValueError: If onnxruntime-training can't do what the trainer does; the message says what.
    """
    from ..upstream import write_models
    from ..upstream.conversion import to_upstream
    from ..upstream.write_checkpoint import write_upstream_checkpoint

    checkpoint = parts.checkpoint
    write_models.check_storable(checkpoint)
    for graph in (parts.training, parts.evaluation):
        check_portable(graph)
    state, buffers = {**checkpoint.parameters, **checkpoint.buffers}, {*parts.buffers, *checkpoint.buffers}
    models = write_models.step_models(parts.training, parts.evaluation, state, buffers, parts.weight)
    files = {TRAINING_MODEL: ir.to_proto(models.training), EVALUATION_MODEL: ir.to_proto(models.evaluation)}
    if checkpoint.optimizer is not None:
        updates = {name: parts.updates[name].update for name in models.trained}
        files[OPTIMIZER_MODEL] = write_models.optimizer_model(
            updates, checkpoint.learning_rates, models.opset, fixed_learning_rate
        )
    upstream, _ = to_upstream(checkpoint, models.trained)

    def write(folder: Path) -> None:
        for name, proto in files.items():
            (folder / name).write_bytes(proto.SerializeToString())
        write_upstream_checkpoint(folder / CHECKPOINT, upstream)
        if nominal:
            upstream.nominal, upstream.groups = True, {}
            write_upstream_checkpoint(folder / NOMINAL_CHECKPOINT, upstream)

    return write


def _with_outputs(graph: Step, names: Sequence[str] | None) -> Step:
    """Returns a graph with the loss and the named outputs, in that order."""
    if names is None:
        return graph
    specs_by_name = {spec.name: spec for spec in graph.outputs}
    unknown = sorted({*names} - specs_by_name.keys())
    if unknown:
        raise ValueError(f"unknown additional_output_names {unknown}: the described outputs are {list(specs_by_name)}")
    return replace(graph, outputs=tuple(specs_by_name[name] for name in dict.fromkeys([graph.loss, *names])))


def _check_exportable(loop: TrainingLoop) -> None:
    """Checks that artifacts can reproduce what a trainer does.

    Raises:
        ValueError: If they can't; the message says why.
    """
    precision = loop.options.mixed_precision
    if precision.enabled and precision.dtype == "float16":
        raise ValueError(
            "artifacts don't support float16 mixed precision, because they have no dynamic loss scale: use "
            "mixed_precision.dtype 'bfloat16', or leave mixed_precision out"
        )
    window, source = loop.window, loop.source
    if window.reduction == "weighted":
        raise ValueError(
            "artifacts don't support batch.gradient_reduction 'weighted', because their steps take no weight: use "
            "'mean' or 'sum', with gradient_accumulation_steps of 1 if micro-batches differ in size"
        )
    if window.reduction == "mean" and window.size == 1 and window.micro_batches > 1:
        raise ValueError(
            f"artifacts can't be written after {window.micro_batches} micro-batches of a window of 1: their update "
            "would take the sum of the gradients, not the mean. Call optimizer_step() or lazy_reset_grad() first"
        )
    with BORROWED:
        parameters = source.parameters
        narrow = [f"{name!r} ({value.dtype})" for name, value in parameters.items() if value.dtype not in _WEIGHTS]
        shared = shared_groups({**parameters, **source.buffers}, source.trainable)
    if narrow:
        raise ValueError(
            f"artifacts need float32 or float64 weights, because a device updates the weights directly, but the model "
            f"has {', '.join(narrow)}: train a float32 copy of it, model.float()"
        )
    if shared:
        raise ValueError(
            f"artifacts don't support different parameters that share memory, as {shared[0]} do: make them one "
            "Parameter and use a view of it in forward()"
        )
    optimizer_name(loop.config)
    _schedule_of(loop)


def _schedule_of(loop: TrainingLoop) -> dict[str, Any] | None:
    """Returns the schedule of the learning rates as plain values.

    Raises:
        ValueError: If it is arbitrary Python code.
    """
    scheduler = loop.rates.scheduler
    if scheduler is None:
        return None
    schedule_types = [
        kind for kind in vars(lr_scheduler).values() if isinstance(kind, type) and hasattr(kind, "schedule")
    ]
    if type(scheduler) in schedule_types:
        return dict(scheduler.schedule)  # type: ignore[union-attr]
    name = getattr(scheduler, "__qualname__", type(scheduler).__qualname__)
    raise ValueError(
        f"the schedule {name} is Python code, which artifacts can't store: use a scheduler of ort_trainer.optim "
        "(LinearWarmupLRScheduler, ...), or leave out the option lr_scheduler and set the rate of each update with "
        "Optimizer.set_learning_rate() of ort_trainer.api"
    )
