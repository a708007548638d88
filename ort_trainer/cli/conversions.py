"""Converts checkpoints between kinds, and warns of whatever the target kind can't store."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..api.checkpoint_file import (
    Array,
    Checkpoint,
    as_stored,
    read_checkpoint,
    without_optimizer,
    write_checkpoint,
)
from ..artifacts.convert import convert_checkpoint, trainer_state_dict, write_as_upstream
from ..core.atomic import atomic_path
from ..core.errors import warn
from ..core.optimizer_keys import SHARED, UPDATE_COUNT
from ..core.sealed import Stored, read_tensors, write
from .describe import Format, manifest_of, open_sealed, recognize

__all__ = ["TARGETS", "convert"]

TARGETS = {
    "trainer": Format.TRAINER,
    "api": Format.API,
    "upstream": Format.UPSTREAM,
    "weights": Format.TENSORS,
}
_USUAL = {
    Format.TRAINER: "trainer",
    Format.LEGACY: "trainer",
    Format.API: "upstream",
    Format.UPSTREAM: "api",
    Format.TENSORS: "trainer",
}

State = dict[str, Any]
_OF_OPTIMIZER = ("optimizer", "torch_optimizer", "gradients")
_OF_UPDATES = ("window", "train_step_info", "lr_scheduler")
_MAIN_PARTS = ("format", "version", "state", "user")


def convert(sources: Sequence[Path], target: Path, like: Path | None, to: str | None, with_optimizer: bool) -> str:
    """Converts a checkpoint.

    Args:
        sources: The file; for a legacy run with ZeRO, the files of all ranks.
        target: The file to write; it is replaced if it exists.
        like: A checkpoint that supplies what the source lacks.
        to: A key of :data:`TARGETS`; None for the default of the source's kind.
        with_optimizer: Whether to include the optimizer's state.

    Returns:
        A description of the file written.

    Raises:
        FileNotFoundError, CheckpointError: If a file does not exist or is damaged.
        ValueError: If the source can't be converted to that kind, or ``like`` is missing or has no effect.
    """
    kind = recognize(sources[0])
    if kind not in _USUAL:
        raise ValueError(f"{str(sources[0])!r} is of kind {kind.value!r}, which can't be converted")
    if len(sources) > 1 and kind is not Format.LEGACY:
        raise ValueError("several sources are allowed only for a legacy run with ZeRO, one file from each rank")
    wanted = to or _USUAL[kind]
    if like is not None and wanted in ("trainer", "weights"):
        raise ValueError(f"--like has no effect with --to {wanted}: leave it out")
    writers: dict[str, Callable[[], None]] = {
        "trainer": lambda: _write_trainer(sources, kind, target, with_optimizer),
        "weights": lambda: _write_weights(sources, kind, target),
        "api": lambda: _write_api(sources, kind, target, like, with_optimizer),
        "upstream": lambda: _write_upstream(sources, kind, target, like, with_optimizer),
    }
    writers[wanted]()
    return TARGETS[wanted].value


def _write_trainer(sources: Sequence[Path], kind: Format, target: Path, with_optimizer: bool) -> None:
    from ..state import save_checkpoint_file

    state, user_dict = _state(sources, kind)
    of_export = kind in (Format.API, Format.UPSTREAM)
    if not with_optimizer:
        # From an export, also drop what without_optimizer() drops: a strict load needs all parts of a window or none.
        for key in (*_OF_OPTIMIZER, *(_OF_UPDATES if of_export else ())):
            state.pop(key, None)
    if of_export and "trainer_options" not in state:
        if "optimizer" in state:
            warn("the file does not record its optimizer: load it with load_checkpoint(..., strict=False)")
        else:
            warn(
                "the file does not record which buffers are non-persistent (persistent=False): if the model has such "
                "buffers, load it with load_checkpoint(..., strict=False)"
            )
    parts = _parts(sources[0]) if kind is Format.TRAINER else {}
    save_checkpoint_file(target, state, user_dict, overwrite=True, parts=parts)


def _parts(source: Path) -> dict[str, State]:
    """Returns the other parts of a checkpoint besides the state and the user's dict, such as the data position."""
    from ..state import read_parts

    with open_sealed(source) as (_, header):
        names = [name for name in manifest_of(header, repr(str(source))) if name not in _MAIN_PARTS]
    return dict(zip(names, read_parts(source, *names), strict=True))


def _state(sources: Sequence[Path], kind: Format) -> tuple[State, State]:
    """Returns the state of a trainer and the user's own values, from any kind of file."""
    source = sources[0]
    if kind is Format.TENSORS:
        return {"model": {"full_precision": _torch_tensors(source)}}, {}
    if kind in (Format.TRAINER, Format.LEGACY):
        from ..state import load_checkpoint_file

        return load_checkpoint_file(*sources)
    if kind is Format.API:
        return trainer_state_dict(source), dict(read_checkpoint(source).properties)
    from ..artifacts.upstream import read_upstream_checkpoint

    return trainer_state_dict(source), dict(read_upstream_checkpoint(source).properties)


def _torch_tensors(source: Path) -> State:
    """Returns the tensors of a safetensors file as PyTorch tensors, because NumPy lacks some dtypes."""
    from ..state.file import as_tensor

    with open_sealed(source) as (file, header):
        read = read_tensors(file, header, repr(str(source)), header.tensors)
        return {name: as_tensor(header.tensors[name], data) for name, data in read.items()}


def _write_weights(sources: Sequence[Path], kind: Format, target: Path) -> None:
    """Writes only parameters and buffers, under their names in PyTorch."""
    state, _ = _state(sources, kind)
    weights = state.get("model", {}).get("full_precision", {})
    if not weights:
        raise ValueError(f"{str(sources[0])!r} has no weights")
    with atomic_path(target) as temporary, temporary.open("wb") as file:
        # Libraries that read the file require this entry.
        write(file, {name: _stored(value) for name, value in weights.items()}, {"format": "pt"})


def _stored(value: Any) -> Stored:
    if isinstance(value, np.ndarray):
        return as_stored(np.asarray(value, order="C"))
    from ..state.file import as_stored as tensor_as_stored

    return tensor_as_stored(value.contiguous())


def _write_api(sources: Sequence[Path], kind: Format, target: Path, like: Path | None, with_optimizer: bool) -> None:
    source = sources[0]
    if kind is Format.UPSTREAM:
        convert_checkpoint(source, target, like, include_optimizer_state=with_optimizer)
    elif kind is Format.API:
        found = read_checkpoint(source)
        write_checkpoint(target, found if with_optimizer else without_optimizer(found))
    else:
        write_checkpoint(target, _for_export(sources, kind, like, with_optimizer))


def _write_upstream(
    sources: Sequence[Path], kind: Format, target: Path, like: Path | None, with_optimizer: bool
) -> None:
    if kind is Format.API:
        convert_checkpoint(sources[0], target, like, include_optimizer_state=with_optimizer)
    elif kind is Format.UPSTREAM:
        raise ValueError(f"{str(sources[0])!r} is already a checkpoint of onnxruntime-training")
    else:
        write_as_upstream(target, _for_export(sources, kind, like, with_optimizer))


def _for_export(sources: Sequence[Path], kind: Format, like: Path | None, with_optimizer: bool) -> Checkpoint:
    """Returns the state of a trainer as the checkpoint of an export, with the export's own data from ``like``."""
    if like is None:
        raise ValueError(
            f"a {kind.value} lacks the data of an export's models: with --like, give the 'checkpoint' that "
            "export_artifacts() wrote for the same model"
        )
    export = read_checkpoint(like)
    state, user_dict = _state(sources, kind)
    weights = state.get("model", {}).get("full_precision", {}) | state.get("transient_buffers", {})
    optimizer = _optimizer_of(state, export) if with_optimizer and "optimizer" in state else None
    if state.get("gradients"):
        warn("gradients of an incomplete accumulation window are left out: the window starts over")
    properties = {name: value for name, value in user_dict.items() if _is_property(value)}
    if len(properties) < len(user_dict):
        warn(f"user values that are neither numbers nor strings are left out: {[*user_dict.keys() - properties]}")
    found = dataclasses.replace(
        without_optimizer(export),
        parameters={name: _fitting(name, weights, value) for name, value in export.parameters.items()},
        buffers={name: _fitting(name, weights, value) for name, value in export.buffers.items()},
        random=_random_of(state) if "random" in state else export.random,
        properties=properties,
        nominal=False,
    )
    if optimizer is None:
        return found
    step = state.get("train_step_info", {}).get("optimization_step", 0)
    return dataclasses.replace(found, optimizer=optimizer, optimization_step=step)


def _is_property(value: Any) -> bool:
    return isinstance(value, (int, float, str)) and not isinstance(value, bool)


def _fitting(name: str, weights: Mapping[str, Any], like: Array) -> Array:
    if name not in weights:
        raise ValueError(f"{name!r} is missing, but the checkpoint given with --like has it")
    value = np.asarray(weights[name])
    if value.shape != like.shape or value.dtype != like.dtype:
        raise ValueError(
            f"{name!r} has shape {list(value.shape)} and dtype {value.dtype}, but {list(like.shape)} and {like.dtype} "
            "in the checkpoint given with --like"
        )
    return value


def _optimizer_of(state: Mapping[str, Any], export: Checkpoint) -> dict[str, Array] | None:
    """Returns the optimizer's state by the keys of an export; None, with a warning, if the optimizer differs."""
    kept: Mapping[str, Any] = state["optimizer"]
    counts = {int(own[UPDATE_COUNT][0]): own[UPDATE_COUNT] for own in kept.values() if UPDATE_COUNT in own}
    found, missing = {}, []
    for key, like in (export.optimizer or {}).items():
        name, _, slot = key.rpartition(".")
        value = kept.get(name or SHARED, {}).get(slot)
        if value is None and key == UPDATE_COUNT and len(counts) == 1:
            (value,) = counts.values()
        if value is None or value.shape != like.shape:
            missing.append(key)
        else:
            found[key] = value
    if missing or export.optimizer is None:
        what = f"it has no {missing[0]!r}" if missing else "the one given with --like has none"
        warn(f"the optimizer's state is left out, so training starts with a new one: {what}")
        return None
    return found


def _random_of(state: Mapping[str, Any]) -> dict[str, Array]:
    import torch

    from ..artifacts.generator_state import to_numpy

    generator = torch.Generator()
    generator.set_state(torch.from_numpy(state["random"].copy()))  # raises if it is invalid
    return {"state": to_numpy(generator.get_state().numpy())}
