"""Recognizes the kind of a file by its first bytes, without loading it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

from ..core.errors import CheckpointError
from ..core.foreign import is_hdf5, is_upstream_checkpoint
from ..core.sealed import Header, read_header

__all__ = ["Format", "files_of", "manifest_of", "open_sealed", "recognize"]

_CACHED = b"ort_trainer export "
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x04", b"\x80\x05")
_HEAD = 32
# Files with these suffixes should be of a known kind; if not, they are damaged.
_ENDINGS = (".onnx", ".ortckpt", ".safetensors")


class Format(Enum):
    """A kind of file, with its description."""

    TRAINER = "checkpoint of ORTTrainer"
    API = "checkpoint of ort_trainer.api"
    UPSTREAM = "checkpoint of onnxruntime-training's training API (flatbuffers)"
    LEGACY = "checkpoint of the legacy ORTTrainer (HDF5)"
    TENSORS = "safetensors file"
    ONNX = "ONNX model"
    CACHED = "cached export"

    @property
    def is_sealed(self) -> bool:
        """Whether files of this kind may have checksums of their tensors."""
        return self in (Format.TRAINER, Format.API, Format.TENSORS)


# Metadata keys of a safetensors file that identify its kind.
_MANIFESTS = {"manifest": Format.TRAINER, "ort_trainer.checkpoint": Format.API}


def recognize(path: Path) -> Format:
    """Returns the kind of a file.

    Raises:
        FileNotFoundError: If it does not exist.
        ValueError: If its kind is unknown; the message says what it may be.
        CheckpointError: If it is a damaged safetensors file.
    """
    if not path.exists():
        raise FileNotFoundError(f"file {str(path)!r} does not exist")
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is not a file")
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if is_hdf5(head):
        return Format.LEGACY
    if is_upstream_checkpoint(head):
        return Format.UPSTREAM
    if head.startswith(_CACHED):
        return Format.CACHED
    if head[8:9] == b"{":  # checked before pickles, because the length of a header may look like a pickle
        with open_sealed(path) as (_, header):
            return next((kind for key, kind in _MANIFESTS.items() if key in header.metadata), Format.TENSORS)
    if head.startswith(_PICKLES):
        raise ValueError(
            f"{str(path)!r} was written by torch.save or pickle. Such files can execute code, so they are not read: if "
            "you trust the file, load it with torch.load(path, weights_only=True)"
        )
    if head[:1] == b"\x08":  # the field ir_version, which comes first
        return Format.ONNX
    raise ValueError(
        f"{str(path)!r} is {'empty' if not head else 'of unknown kind'}: expected a checkpoint, an ONNX model or a "
        "safetensors file"
    )


@contextlib.contextmanager
def open_sealed(path: Path) -> Iterator[tuple[BinaryIO, Header]]:
    """Yields an open safetensors file and its header."""
    with path.open("rb") as file:
        yield file, read_header(file, repr(str(path)))


def manifest_of(header: Header, name: str) -> dict[str, Any]:
    """Returns the manifest of a checkpoint.

    Raises:
        CheckpointError: If it is not a JSON object.
    """
    text = next(header.metadata[key] for key in _MANIFESTS if key in header.metadata)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is damaged: its manifest can't be read ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{name} is damaged: its manifest is not a JSON object")
    return found


def files_of(folder: Path) -> list[Path]:
    """Returns the files of a folder whose kind is known, or should be by their suffix, sorted by name."""
    return [path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and _is_of_interest(path)]


def _is_of_interest(path: Path) -> bool:
    if not path.is_file():
        return False
    if path.suffix in _ENDINGS:
        return True
    try:
        recognize(path)
    except CheckpointError:  # damaged; the command reports that
        return True
    except (ValueError, OSError):
        return False
    return True
