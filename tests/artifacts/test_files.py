"""The files of an export appear in their folder all together or not at all."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from ort_trainer import optim
from ort_trainer.artifacts import files
from ort_trainer.artifacts.files import write_files
from ort_trainer.state.training_api import read_checkpoint

from ..helpers import mlp_batches, mlp_trainer

OWN: dict[str, Any] = {"utils": {"kernels": "onnxruntime"}}
MODELS = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx")


def test_artifacts_are_replaced_and_a_failure_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "artifacts"
    trainer = mlp_trainer(OWN, optim.AdamWConfig(lr=0.01))
    trainer.train_step(*mlp_batches(1)[0])
    trainer.export_artifacts(folder)
    (folder / "mine.txt").write_text("kept")
    trainer.train_step(*mlp_batches(1)[0])
    trainer.export_artifacts(folder, nominal_checkpoint=False)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*MODELS, "checkpoint", "mine.txt"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    real = Path.write_bytes

    def fails(path: Path, data: bytes) -> int:
        if path.name == "checkpoint":
            raise OSError("no space left on device")
        return real(path, data)

    trainer.train_step(*mlp_batches(1)[0])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fails)
        for target in (folder, tmp_path / "other"):
            with pytest.raises(OSError, match="no space"):
                trainer.export_artifacts(target)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["artifacts"]
    (folder / "nominal_checkpoint").mkdir()
    with pytest.raises(IsADirectoryError, match="can't write '.*nominal_checkpoint': it is a folder"):
        trainer.export_artifacts(folder)
    (folder / "nominal_checkpoint").rmdir()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_is_written_from_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    real = files.temporary_folder  # type: ignore[attr-defined]

    def only_there(around: Path, name: str) -> AbstractContextManager[Path]:
        assert around == folder, "the parent folder may be read-only or on another file system"
        return real(around, name)

    trainer = mlp_trainer(OWN)
    for batch in mlp_batches(3):
        trainer.train_step(*batch)
    with monkeypatch.context() as patch:
        patch.setattr(files, "temporary_folder", only_there)
        trainer.export_artifacts(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*MODELS, "checkpoint", "nominal_checkpoint"])
    nominal = read_checkpoint(folder / "nominal_checkpoint")
    assert nominal.optimization_step == 0 and nominal.optimizer is None, "training restarts"


def test_what_a_killed_export_left_is_removed(tmp_path: Path) -> None:
    """Removes leftovers inside and beside the folder, except locked ones that another process is still writing."""
    fcntl = pytest.importorskip("fcntl")
    folder = tmp_path / "artifacts"
    left = [place / ".artifacts.abcdefgh.tmp.ort_trainer" for place in (tmp_path, folder)]
    at_work, others = (tmp_path / f".{name}.tmp.ort_trainer" for name in ("artifacts.ijklmnop", "other.abcdefgh"))
    own = tmp_path / ".artifacts.20240101.tmp"
    for path in (*left, at_work, others, own):
        path.mkdir(parents=True)
        (path / "checkpoint").write_text("half")
    handle = os.open(at_work, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        write_files(folder, lambda temporary: (temporary / "checkpoint").touch())
    finally:
        os.close(handle)
    assert not any(path.exists() for path in left)
    assert all((path / "checkpoint").exists() for path in (at_work, others, own))
    assert [path.name for path in folder.iterdir()] == ["checkpoint"]


def test_an_export_under_way_is_not_taken_for_a_killed_one(tmp_path: Path) -> None:
    folder = tmp_path / "artifacts"

    def write(temporary: Path) -> None:
        (temporary / "checkpoint").write_text("first")
        write_files(folder, lambda other: (other / "checkpoint").touch())

    write_files(folder, write)
    assert (folder / "checkpoint").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["artifacts"]
    assert [path.name for path in folder.iterdir()] == ["checkpoint"]
