"""Describes the contents of a file in JSON values: facts about the whole, and each tensor."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.sealed import DTYPES, Header, damaged_tensors
from .formats import Format, files_of, manifest_of, open_sealed, recognize

__all__ = ["check", "describe", "describe_folder"]

NO_CHECKSUMS = "none"


def describe(path: Path) -> dict[str, Any]:
    """Returns a description of a file.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If its kind is unknown, or it is too damaged to describe.
        ImportError: If a package needed to read it is missing.
    """
    kind = recognize(path)
    found: dict[str, Any] = {"file": str(path), "kind": kind.value, "bytes": path.stat().st_size}
    if kind is Format.LEGACY:
        found |= _legacy(path)
    elif kind is Format.UPSTREAM:
        found |= _upstream(path)
    elif kind is Format.ONNX:
        from .onnx_models import describe_model

        found |= describe_model(path)
    elif kind.is_sealed:
        found |= _sealed(path, kind)
    found["checksums"], found["damaged"] = _check(path, kind)
    tensors = found.pop("tensors", [])
    found["totals"] = {
        "tensors": len(tensors),
        "elements": sum(math.prod(tensor["shape"]) for tensor in tensors),
        "bytes": sum(tensor["bytes"] for tensor in tensors),
    }
    return found | {"tensors": tensors}


def describe_folder(folder: Path) -> dict[str, Any]:
    """Returns a description of a folder: its artifacts or checkpoints, and which checkpoint is the latest."""
    entries = []
    for path in files_of(folder):
        try:
            entries.append({**describe(path), "file": path.name})
        except (ValueError, ImportError, OSError) as error:
            entries.append({"file": path.name, "bytes": path.stat().st_size, "problem": str(error)})
    latest = folder / "latest"
    found: dict[str, Any] = {"folder": str(folder), "files": entries}
    if latest.is_file() and latest.stat().st_size < 1000:
        found["latest"] = latest.read_text(errors="replace").strip()
    return found


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
    with open_sealed(path) as (_, header):
        tensors = _tensors_of(header)
    if kind is Format.TENSORS:
        return {"metadata": header.metadata, "tensors": tensors}
    said = manifest_of(header, repr(str(path)))
    facts = _trainer_facts(said) if kind is Format.TRAINER else _api_facts(said)
    return {"version": said.get("version"), **facts, "tensors": tensors}


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


def _trainer_facts(said: Mapping[str, Any]) -> dict[str, Any]:
    found = {**_state_facts(_dict(said.get("state"))), "user_dict": list(_dict(said.get("user")))}
    # Written by CheckpointManager.
    metrics = _dict(said.get("run")).get("metrics")
    return found | ({"metrics": metrics} if metrics else {})


def _state_facts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns facts about a trainer's state, leaving out those that the file lacks."""
    info, options, window = (_dict(state.get(key)) for key in ("train_step_info", "trainer_options", "window"))
    scaler = _dict(state.get("loss_scaler"))
    found = {
        "optimization_step": info.get("optimization_step"),
        "step": info.get("step"),
        "optimizer": options.get("optimizer_name"),
        "mixed_precision": options.get("mixed_precision"),
        "world_size": options.get("world_size"),
        "zero_stage": options.get("zero_stage"),
        "gradient_accumulation_steps": options.get("gradient_accumulation_steps"),
        "micro_batches_in_window": window.get("micro_batches"),
        "loss_scale": scaler.get("loss_scale"),
    }
    return {key: value for key, value in found.items() if value is not None} | {"parts": sorted(state)}


def _api_facts(said: Mapping[str, Any]) -> dict[str, Any]:
    rates, properties = said.get("learning_rates"), _dict(said.get("properties"))
    return {
        "optimization_step": said.get("optimization_step"),
        "optimizer_state": said.get("has_optimizer"),
        "learning_rates": rates,
        "schedule": said.get("schedule"),
        "nominal": said.get("nominal"),
        "export": said.get("export"),
        "properties": list(properties),
    }


def _dict(value: Any) -> dict[str, Any]:
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
    from ..artifacts.upstream import read_upstream_checkpoint

    found = read_upstream_checkpoint(path)
    groups = {name: {"step": group.step, "initial_lr": group.initial_lr} for name, group in found.groups.items()}
    arrays = {name: parameter.data for name, parameter in found.parameters.items()}
    for group in found.groups.values():
        arrays |= {f"{name}.{kind}": value for name, own in group.moments.items() for kind, value in own.items()}
    return {
        "optimizer_groups": groups,
        "nominal": found.nominal,
        "properties": list(found.properties),
        "tensors": [_tensor(name, array) for name, array in arrays.items()],
    }
