"""Converts checkpoints between kinds, and warns of whatever the target kind can't store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..artifacts.convert import convert_artifacts, convert_checkpoint, read_state, trainer_state_dict, write_as_upstream
from ..core.atomic import atomic_path
from ..core.errors import warn
from ..core.sealed import Stored, read_tensors, write
from ..state.devices import from_state_dict
from ..state.state import State
from ..state.training_api import as_stored, read_checkpoint, write_checkpoint
from .describe import Format, manifest_of, open_sealed, recognize

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

StateDict = dict[str, Any]
# Parts of a trainer's state that hold the optimizer's, and parts that count updates.
_OF_OPTIMIZER = ("optimizer", "torch_optimizer", "gradients")
_OF_UPDATES = ("window", "train_step_info", "lr_scheduler")
# Entries of a checkpoint's manifest besides its extra parts.
_MAIN_PARTS = ("format", "version", "state", "user")


def convert(sources: Sequence[Path], target: Path, like: Path | None, to: str | None, with_optimizer: bool) -> str:
    """Converts a checkpoint.

    Args:
        sources: The file; for a legacy run with ZeRO, the files of all ranks.
        target: The file to write; it is replaced if it exists.
        like: A checkpoint that supplies what the source lacks.
        to: A key of :data:`TARGETS`; None for what the target's name says, or the default of the source's kind.
        with_optimizer: Whether to include the optimizer's state.

    Returns:
        A description of the file written.

    Raises:
        FileNotFoundError, CheckpointError: If a file does not exist or is damaged.
        ValueError: If the source can't be converted to that kind, or ``like`` is missing or has no effect.
    """
    if sources[0].is_dir():
        return _convert_folder(sources, target, like, to, with_optimizer)
    kind = recognize(sources[0])
    if kind not in _USUAL:
        raise ValueError(f"{str(sources[0])!r} is of kind {kind.value!r}, which can't be converted")
    if len(sources) > 1 and kind is not Format.LEGACY:
        raise ValueError("several sources are allowed only for a legacy run with ZeRO, one file from each rank")
    wanted = to or ("weights" if target.suffix == ".safetensors" else _USUAL[kind])
    if like is not None and wanted in ("trainer", "weights"):
        raise ValueError(f"--like has no effect with --to {wanted}: leave it out")
    writers: dict[str, Callable[[], None]] = {
        "trainer": lambda: _write_trainer(sources, kind, target, with_optimizer),
        "weights": lambda: _write_weights(sources, kind, target),
        "api": lambda: _write_api(sources, kind, target, like, with_optimizer),
        "upstream": lambda: _write_upstream(sources, kind, target, like, with_optimizer),
    }
    writers[wanted]()
    return "weights with PyTorch's names (safetensors)" if wanted == "weights" else TARGETS[wanted].value


def _convert_folder(
    sources: Sequence[Path], target: Path, like: Path | None, to: str | None, with_optimizer: bool
) -> str:
    """Converts the artifacts in a folder, which can only be onnxruntime-training's."""
    if checkpoints := sorted(map(str, sources[0].glob("*.ortckpt"))):
        raise ValueError(
            f"{str(sources[0])!r} is a folder of checkpoints: convert one of them, such as {checkpoints[-1]!r}"
        )
    if len(sources) > 1 or like is not None or to not in (None, "api"):
        raise ValueError(
            f"{str(sources[0])!r} is a folder: artifacts of onnxruntime-training are converted to those of "
            "ort_trainer.api, with neither --like, another --to nor more sources"
        )
    convert_artifacts(sources[0], target, include_optimizer_state=with_optimizer)
    return "artifacts for ort_trainer.api"


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


def _parts(source: Path) -> dict[str, StateDict]:
    """Returns the other parts of a checkpoint besides the state and the user's dict, such as the data position."""
    from ..state import read_parts

    with open_sealed(source) as (_, header):
        names = [name for name in manifest_of(header, repr(str(source))) if name not in _MAIN_PARTS]
    return dict(zip(names, read_parts(source, *names), strict=True))


def _state(sources: Sequence[Path], kind: Format) -> tuple[StateDict, StateDict]:
    """Returns the state of a trainer and the user's own values, from any kind of file."""
    source = sources[0]
    if kind is Format.TENSORS:
        return {"model": {"full_precision": _torch_tensors(source)}}, {}
    if kind in (Format.TRAINER, Format.LEGACY):
        from ..state import load_checkpoint_file

        return load_checkpoint_file(*sources)
    return trainer_state_dict(source), dict(read_state(source).properties)


def _torch_tensors(source: Path) -> StateDict:
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
    """Returns an array or a tensor in the form for writing."""
    if isinstance(value, np.ndarray):
        return as_stored(np.asarray(value, order="C"))
    from ..state.file import as_stored as tensor_as_stored

    return tensor_as_stored(value.contiguous())


def _write_api(sources: Sequence[Path], kind: Format, target: Path, like: Path | None, with_optimizer: bool) -> None:
    of_export = kind in (Format.API, Format.UPSTREAM)
    state = read_state(sources[0], like, with_optimizer) if of_export else _like(sources, kind, like, with_optimizer)
    write_checkpoint(target, state)


def _write_upstream(
    sources: Sequence[Path], kind: Format, target: Path, like: Path | None, with_optimizer: bool
) -> None:
    if kind is Format.API:
        convert_checkpoint(sources[0], target, like, include_optimizer_state=with_optimizer)
    elif kind is Format.UPSTREAM:
        raise ValueError(f"{str(sources[0])!r} is already a checkpoint of onnxruntime-training")
    else:
        write_as_upstream(target, _like(sources, kind, like, with_optimizer))


def _like(sources: Sequence[Path], kind: Format, like: Path | None, with_optimizer: bool) -> State:
    """Returns the state of a trainer for the models of an export."""
    if like is None:
        raise ValueError(
            f"a {kind.value} lacks the data of an export's models: with --like, give the 'checkpoint' that "
            "export_artifacts() wrote for the same model"
        )
    export = read_checkpoint(like)
    return from_state_dict(*_state(sources, kind), export, with_optimizer)
