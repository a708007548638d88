"""Recognizes the kind of a file by its first bytes, and describes its contents in JSON values."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

from ..core.errors import CheckpointError
from ..core.foreign import is_hdf5, is_upstream_checkpoint
from ..core.optimizer_keys import CONFIGS
from ..core.sealed import DTYPES, Header, damaged_tensors, read_header

# The first bytes of a cached export, and of pickles: a zip file by torch.save, or protocol 2, 4 or 5.
_CACHED = b"ort_trainer export "
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x04", b"\x80\x05")
# More bytes than identify any kind of file.
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
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is damaged: its manifest can't be read ({error})") from error
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{name} is damaged: its manifest is not a JSON object")
    return manifest


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


NO_CHECKSUMS = "none"


def describe(path: Path) -> dict[str, Any]:
    """Returns a description of a file.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If its kind is unknown, or it is too damaged to describe.
        ImportError: If a package needed to read it is missing.
    """
    kind = recognize(path)
    description: dict[str, Any] = {"file": str(path), "kind": kind.value, "bytes": path.stat().st_size}
    if kind is Format.LEGACY:
        description |= _legacy(path)
    elif kind is Format.UPSTREAM:
        description |= _upstream(path)
    elif kind is Format.ONNX:
        from .onnx_models import describe_model

        description |= describe_model(path)
    elif kind.is_sealed:
        description |= _sealed(path, kind)
    description["checksums"], description["damaged"] = _check(path, kind)
    tensors = description.pop("tensors", [])
    description["totals"] = {
        "tensors": len(tensors),
        "elements": sum(math.prod(tensor["shape"]) for tensor in tensors),
        "bytes": sum(tensor["bytes"] for tensor in tensors),
    }
    return description | {"tensors": tensors}


def describe_folder(folder: Path) -> dict[str, Any]:
    """Returns a description of a folder: its artifacts or checkpoints, and which checkpoint is the latest."""
    entries = []
    for path in files_of(folder):
        try:
            entries.append({**describe(path), "file": path.name})
        except (ValueError, ImportError, OSError) as error:
            entries.append({"file": path.name, "bytes": path.stat().st_size, "problem": str(error)})
    latest = folder / "latest"
    description: dict[str, Any] = {"folder": str(folder), "files": entries}
    if latest.is_file() and latest.stat().st_size < 1000:  # a manager's file, which has only a name
        description["latest"] = latest.read_text(encoding="utf-8", errors="replace").strip()
    return description


def check(path: Path) -> tuple[str, list[str]]:
    """Returns the state of a file's checksums, and the names of damaged tensors.

    Returns:
        The state is ``ok``, ``damaged``, or ``none`` if the file has no checksums and was not read.

    Raises:
        CheckpointError: If the header is damaged, so the tensors can't be checked.
        ValueError: If the kind of the file is unknown.
    """
    return _check(path, recognize(path))


def _check(path: Path, kind: Format) -> tuple[str, list[str]]:
    if kind is Format.CACHED:
        return ("ok", []) if _is_whole_export(path) else ("damaged", ["the export"])
    if not kind.is_sealed:
        return NO_CHECKSUMS, []
    with open_sealed(path) as (file, header):
        if not header.sealed:
            return NO_CHECKSUMS, []
        damaged = damaged_tensors(file, header, repr(str(path)))
    return ("damaged", damaged) if damaged else ("ok", [])


def _is_whole_export(path: Path) -> bool:
    """Returns whether a cached export matches the digest at its start, which covers its name too."""
    digest = hashlib.sha256(path.stem.encode())
    with path.open("rb") as file:
        file.readline()
        expected = file.read(digest.digest_size)
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.digest() == expected


def _sealed(path: Path, kind: Format) -> dict[str, Any]:
    """Describes a safetensors file, sealed or not."""
    with open_sealed(path) as (_, header):
        tensors = _tensors_of(header)
    if kind is Format.TENSORS:
        return {"metadata": header.metadata, "tensors": tensors}
    manifest = manifest_of(header, repr(str(path)))
    facts = _trainer_facts(manifest) if kind is Format.TRAINER else _api_facts(manifest)
    return {"version": manifest.get("version"), **facts, "tensors": tensors}


def _tensors_of(header: Header) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "dtype": DTYPES.get(entry.dtype, entry.dtype),
            "shape": list(entry.shape),
            "bytes": entry.end - entry.start,
        }
        for name, entry in header.tensors.items()
    ]


def _trainer_facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns facts about a checkpoint of the trainer."""
    facts = {**_state_facts(_dict(manifest.get("state"))), "user_dict": list(_dict(manifest.get("user")))}
    # Written by CheckpointManager.
    metrics = _dict(manifest.get("run")).get("metrics")
    return facts | ({"metrics": metrics} if metrics else {})


def _state_facts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns facts about a trainer's state, leaving out those that the file lacks."""
    info, options, window = (_dict(state.get(key)) for key in ("train_step_info", "trainer_options", "window"))
    scaler, optimizer = _dict(state.get("loss_scaler")), options.get("optimizer_name")
    facts = {
        "optimization_step": info.get("optimization_step"),
        "step": info.get("step"),
        "optimizer": CONFIGS.get(optimizer, optimizer) if isinstance(optimizer, str) else optimizer,
        "mixed_precision": options.get("mixed_precision"),
        "world_size": options.get("world_size"),
        "zero_stage": options.get("zero_stage"),
        "gradient_accumulation_steps": options.get("gradient_accumulation_steps"),
        "micro_batches_in_window": window.get("micro_batches"),
        "loss_scale": scaler.get("loss_scale"),
    }
    return {key: value for key, value in facts.items() if value is not None} | {"parts": sorted(state)}


def _api_facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns facts about a checkpoint of an export."""
    rates, properties = manifest.get("learning_rates"), _dict(manifest.get("properties"))
    return {
        "optimization_step": manifest.get("optimization_step"),
        "optimizer_state": manifest.get("has_optimizer"),
        "learning_rates": rates,
        "schedule": manifest.get("schedule"),
        "nominal": manifest.get("nominal"),
        "export": manifest.get("export"),
        "properties": list(properties),
    }


def _dict(value: Any) -> dict[str, Any]:
    """Returns a value from a file if it is a dict, otherwise an empty one."""
    return value if isinstance(value, dict) else {}


def _legacy(path: Path) -> dict[str, Any]:
    from ..state.legacy import legacy_values

    state: dict[str, Any] = {}
    tensors = []
    for place, value in legacy_values(path, repr(str(path))):
        section = state.setdefault(place[0], {})
        if place[0] in ("train_step_info", "trainer_options"):
            section[place[-1]] = value.item()
        elif value is not None:
            tensors.append(_tensor("/".join(place), value))
    return {**_state_facts(state), "tensors": tensors}


def _tensor(name: str, array: Any) -> dict[str, Any]:
    return {"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "bytes": array.nbytes}


def _upstream(path: Path) -> dict[str, Any]:
    from ..upstream import read_upstream_checkpoint

    checkpoint = read_upstream_checkpoint(path)
    groups = {name: {"step": group.step, "initial_lr": group.initial_lr} for name, group in checkpoint.groups.items()}
    arrays = {name: parameter.data for name, parameter in checkpoint.parameters.items()}
    for group in checkpoint.groups.values():
        arrays |= {
            f"{name}.{kind}": value for name, moments in group.moments.items() for kind, value in moments.items()
        }
    return {
        "optimizer_groups": groups,
        "nominal": checkpoint.nominal,
        "properties": list(checkpoint.properties),
        "tensors": [_tensor(name, array) for name, array in arrays.items()],
    }
