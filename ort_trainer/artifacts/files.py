"""Writes the files of an export: all of them, or none."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from ..core.atomic import explained, real_path, remove_abandoned, replace_all, temporary_folder
from ..core.errors import shown
from ..state.state import State
from ..state.training_api import to_bytes
from ..step.contract import METADATA, OptimizerModel, Step, to_metadata

Described = tuple[ir.Model, Step | OptimizerModel]
CHECKPOINT, NOMINAL_CHECKPOINT = "checkpoint", "nominal_checkpoint"
TRAINING_MODEL, EVALUATION_MODEL, OPTIMIZER_MODEL = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"
MEMORY = "memory.json"
FILES = (TRAINING_MODEL, EVALUATION_MODEL, OPTIMIZER_MODEL, CHECKPOINT, NOMINAL_CHECKPOINT, MEMORY)


def contents(models: Mapping[str, Described], checkpoint: State, nominal: bool) -> dict[str, bytes]:
    """Returns the contents of the files by name.

    Args:
        models: Name of the file -> model and its description.
        checkpoint: The state.
        nominal: Whether to add a file with only the shapes of the parameters.
    """
    # The digest of the models identifies the export: all files carry it, so that files of two exports are told apart.
    digest = hashlib.sha256()
    for name, (model, description) in models.items():
        digest.update(name.encode() + model_bytes(model, description))
    export, files = digest.hexdigest(), {}
    for name, (model, description) in models.items():
        files[name] = model_bytes(model, replace(description, export=export))
    files[CHECKPOINT] = to_bytes(replace(checkpoint, export=export))
    if nominal:
        files[NOMINAL_CHECKPOINT] = to_bytes(replace(checkpoint.without_optimizer(), export=export, nominal=True))
    return files


def model_bytes(model: ir.Model, description: Step | OptimizerModel) -> bytes:
    """Returns the content of a model's file, whose metadata have its description."""
    model.metadata_props[METADATA] = to_metadata(description)
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def target_folder(directory: str | os.PathLike[str]) -> Path:
    """Returns the folder of an export.

    Raises:
        TypeError: If ``directory`` is not a path.
        ValueError: If it is empty.
        FileNotFoundError: If its parent folder does not exist.
        NotADirectoryError: If it is a file.
        OSError: If it is a symbolic link that can't be followed.
    """
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"directory must be a str or a path, but {shown(directory)} was given")
    if not os.fspath(directory):
        raise ValueError("directory must not be empty")
    folder = real_path(Path(directory).absolute())
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"can't write artifacts to {str(folder)!r}: it is a file")
    if not folder.exists() and not folder.parent.is_dir():
        raise FileNotFoundError(
            f"can't write artifacts to {str(folder)!r}: the folder {str(folder.parent)!r} does not exist"
        )
    return folder


def write_files(folder: Path, write: Callable[[Path], None], prefix: str = "") -> None:
    """Writes files into a folder and removes those of an earlier export: all of it, or nothing if writing fails.

    Args:
        folder: From :func:`target_folder`; created if needed.
        write: Writes the files into the folder passed to it.
        prefix: Prefix of the file names.
    """
    # The temporary folder is inside the target if that exists, because the target's parent may be read-only, or on
    # another file system if the target is a mount point.
    around = folder if folder.is_dir() else folder.parent
    remove_abandoned(folder.parent, glob.escape(folder.name))  # from a process killed before it made the folder
    with contextlib.ExitStack() as stack:
        with explained(folder):
            temporary = stack.enter_context(temporary_folder(around, folder.name))
            write(temporary)
        written = [path.name for path in temporary.iterdir()]
        outdated = [folder / f"{prefix}{name}" for name in FILES if name not in written]  # from an earlier export
        if not folder.is_dir():
            folder.mkdir()
            stack.callback(_remove_empty, folder)
        files = ((temporary / name, folder / f"{prefix}{name}") for name in written)
        replace_all(files, folder / f"{prefix}{CHECKPOINT}", outdated)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not empty
        folder.rmdir()
