"""Converts checkpoints and artifacts between onnxruntime-training's training API and ``ort_trainer.api``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..core.errors import check_file, shown, warn
from ..core.foreign import is_upstream_checkpoint
from ..state.devices import for_trainer
from ..state.state import State
from ..state.state_dict import to_state_dict
from ..state.training_api import read_checkpoint, write_checkpoint
from ..upstream.checkpoint import read_upstream_checkpoint
from ..upstream.conversion import from_upstream, to_upstream
from ..upstream.write_checkpoint import write_upstream_checkpoint

PathLike = str | os.PathLike[str]


def convert_checkpoint(
    source: PathLike, target: PathLike, like: PathLike | None = None, *, include_optimizer_state: bool = True
) -> None:
    """Converts a checkpoint of onnxruntime-training's training API to one of ``ort_trainer.api``, or back.

    The kind of the source determines the direction. Parameters, properties and the state of Adam and SGD are converted.
    onnxruntime-training can't store a learning-rate schedule, the state of random numbers, or gradients accumulated
    between two updates.

    Args:
        source: The checkpoint.
        target: The file to write; it is replaced if it exists.
        like: For a source of onnxruntime-training: the ``checkpoint`` of the export whose models will use the result.
            Without it the result fits no models, but :func:`trainer_state_dict` can read it.
        include_optimizer_state: Whether to convert the optimizer's state.

    Raises:
        FileNotFoundError: If a file, or the folder of the target, does not exist.
        CheckpointError: If a file is damaged or not a checkpoint.
        ValueError: If the source does not fit ``like``, or its optimizer is one that onnxruntime-training lacks.
        TypeError: If an argument has the wrong type.

    Example:
        >>> convert_checkpoint("upstream/checkpoint", "ours/trained", like="ours/checkpoint")
    """
    if not isinstance(target, (str, os.PathLike)):
        raise TypeError(f"target must be a path, but {shown(target)} was given")
    if not isinstance(include_optimizer_state, bool):
        raise TypeError(f"include_optimizer_state must be a bool, but {shown(include_optimizer_state)} was given")
    from_theirs = _is_upstream(source)
    if like is not None and not from_theirs:
        raise ValueError(
            f"'like' is only for checkpoints of onnxruntime-training, but {os.fspath(source)!r} is a checkpoint of "
            "ort_trainer: leave it out"
        )
    write = write_checkpoint if from_theirs else write_as_upstream
    write(target, read_state(source, like, include_optimizer_state))


def convert_artifacts(source: PathLike, target: PathLike, *, include_optimizer_state: bool = True) -> None:
    """Converts the artifacts that onnxruntime-training's ``generate_artifacts`` wrote to those of ``ort_trainer.api``.

    The result trains in Python without PyTorch, and in browsers, C and C++ (on_device.md in the documentation). Its
    gradients are derived from the forward pass in upstream's training model. Names, values, moments and the count of
    updates stay.

    Args:
        source: The folder with ``training_model.onnx``, ``checkpoint`` and, if they exist, ``eval_model.onnx`` and
            ``optimizer_model.onnx``.
        target: The folder to write, created if needed; it may not be the source.
        include_optimizer_state: Whether to convert the optimizer's state in the checkpoint.

    Raises:
        TypeError: If an argument is not a path.
        FileNotFoundError: If a file, or the parent of the target, does not exist.
        CheckpointError: If the checkpoint is damaged or of another kind.
        ValueError: If a model is damaged, keeps a tensor in another file, or has unsupported operators.

    Example:
        >>> convert_artifacts("upstream", "ours")
    """
    from ..engine.contained import check_contained
    from ..step.onnx_file import corruption_reported
    from .files import (
        CHECKPOINT,
        EVALUATION_MODEL,
        OPTIMIZER_MODEL,
        TRAINING_MODEL,
        contents,
        target_folder,
        write_files,
    )
    from .from_upstream import converted_optimizer, converted_step

    for what, path in (("source", source), ("target", target)):
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"{what} must be the path of a folder, but {shown(path)} was given")
    folder, written = Path(source), target_folder(target)
    if written.is_dir() and folder.is_dir() and written.samefile(folder):
        raise ValueError(f"source and target are the same folder, {os.fspath(source)!r}: choose another target")
    state = read_state(folder / CHECKPOINT, include_optimizer=include_optimizer_state)
    if state.nominal:
        raise ValueError(f"{str(folder / CHECKPOINT)!r} is a nominal checkpoint, which has no parameter values")

    def data(name: str) -> bytes:
        check_file(folder / name, "model")
        model = (folder / name).read_bytes()
        check_contained(model, name)
        return model

    converted: dict[str, Any] = {}
    for name, kind in ((TRAINING_MODEL, "training"), (EVALUATION_MODEL, "evaluation")):
        if kind == "training" or (folder / name).exists():
            with corruption_reported(name):
                converted[name] = converted_step(data(name), name, kind, {**state.parameters, **state.buffers})
    # A flat buffer lists the parameters in the order of the training model's inputs, so the checkpoint must too.
    order = [value.name for value in converted[TRAINING_MODEL][0].graph.inputs if value.name in state.parameters]
    names = dict.fromkeys([*order, *state.parameters])
    state.parameters = {name: state.parameters[name] for name in names}
    state.trainable = [name for name in names if name in state.trainable]
    if (folder / OPTIMIZER_MODEL).exists():
        trained = {name: state.parameters[name] for name in state.trainable}
        with corruption_reported(OPTIMIZER_MODEL):
            converted[OPTIMIZER_MODEL] = converted_optimizer(data(OPTIMIZER_MODEL), OPTIMIZER_MODEL, trained)
    files = contents(converted, state, nominal=False)

    def write(temporary: Path) -> None:
        for name, content in files.items():
            (temporary / name).write_bytes(content)

    write_files(written, write)


def read_state(source: PathLike, like: PathLike | None = None, include_optimizer: bool = True) -> State:
    """Returns the state in a checkpoint of onnxruntime-training or ``ort_trainer.api``.

    Args:
        source: The checkpoint.
        like: The checkpoint of an export to which a state of onnxruntime-training is fitted, or None.
        include_optimizer: Whether to read the optimizer's state.
    """
    if not _is_upstream(source):
        state = read_checkpoint(source)
        return state if include_optimizer else state.without_optimizer()
    upstream = read_upstream_checkpoint(source)
    if not include_optimizer:
        upstream.groups = {}
    return from_upstream(upstream, None if like is None else read_checkpoint(like))


def write_as_upstream(target: PathLike, state: State) -> None:
    """Writes an ort_trainer checkpoint in onnxruntime-training's format; warns about parts that it can't store.

    Raises:
        ValueError: If onnxruntime-training lacks its optimizer.
    """
    upstream, left_out = to_upstream(state)
    if left_out:
        warn(f"onnxruntime-training can't store {', '.join(left_out)}: left out of {os.fspath(target)!r}")
    write_upstream_checkpoint(target, upstream)


def trainer_state_dict(source: PathLike) -> dict[str, Any]:
    """Returns a checkpoint of onnxruntime-training or ``ort_trainer.api`` for ``ORTTrainer.load_state_dict``.

    Names match if the artifacts came from the same model. A checkpoint of ``ort_trainer.api`` records its optimizer, so
    the trainer loads it directly and training continues where it stopped; the learning rates are the trainer's own.
    Three kinds lack that record and need ``strict=False``: checkpoints of onnxruntime-training, of exports by an
    earlier ort_trainer, and of a trainer with a ``torch.optim`` optimizer, which keeps its current moments. All three
    lose gradients accumulated since the last reset, with a warning.

    Args:
        source: The checkpoint.

    Raises:
        FileNotFoundError: If the file does not exist.
        CheckpointError: If it is damaged or not a checkpoint.
        ValueError: If it is a nominal checkpoint, which has no values.

    Example:
        >>> trainer.load_state_dict(trainer_state_dict("artifacts/trained"))
    """
    state = read_state(source)
    if state.nominal:
        raise ValueError(f"{os.fspath(source)!r} is a nominal checkpoint, which has no parameter values")
    if state.gradients and state.trainer_options is None:
        warn(
            f"gradients since the last reset in {os.fspath(source)!r} are ignored: the trainer starts a new "
            "accumulation window"
        )
    return to_state_dict(for_trainer(state))


def _is_upstream(source: PathLike) -> bool:
    """Returns whether an existing file is a checkpoint of onnxruntime-training."""
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"source must be a path, but {shown(source)} was given")
    check_file(source, "checkpoint")
    with Path(source).open("rb") as file:
        return is_upstream_checkpoint(file.read(8))
