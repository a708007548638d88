"""ort-trainer verify: exit codes, and the names of damaged tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ort_trainer.step.cache import ExportCache

from .conftest import Run, damage


def test_sound_files(files: Path, run: Run) -> None:
    code, out, err = run("verify", files / "run.ortckpt", files / "artifacts" / "checkpoint")
    assert code == 0 and not err
    assert out == [f"{files / 'run.ortckpt'}: ok", f"{files / 'artifacts' / 'checkpoint'}: ok"]


def test_damage_is_named(files: Path, run: Run, tmp_path: Path) -> None:
    for source, tensor in (
        ("run.ortckpt", "state/optimizer/fc1.weight/Moment_1"),
        ("artifacts/checkpoint", "parameters:fc1.weight"),
    ):
        path = Path(shutil.copy(files / source, tmp_path))
        damage(path, tensor)
        code, out, _ = run("verify", files / "run.ortckpt", path)
        assert code == 1 and out[1] == f"{path}: damaged, {tensor}"
    whole = (files / "run.ortckpt").read_bytes()
    for part in (
        whole[:-1],
        whole[: len(whole) // 2],
        whole[:20],
        whole[:8] + b"{" + whole[9:].replace(b"F32", b"I32", 1),
    ):
        path.write_bytes(part)
        code, out, _ = run("verify", path)
        assert code == 1 and len(out) == 1 and "damaged" in out[0], out


def test_files_without_checksums(files: Path, run: Run) -> None:
    model = files / "artifacts" / "training_model.onnx"
    for path in (files / "old.ortckpt", files / "upstream", model):
        code, out, _ = run("verify", path)
        assert code == 0 and out == [f"{path}: no checksums, so damage to tensors can't be detected"]
        assert run("verify", "--require-checksums", path)[0] == 1


def test_damage_without_checksums(files: Path, run: Run, tmp_path: Path) -> None:
    """The structure must be valid even though the tensors are not loaded."""
    for name in ("upstream", "old.ortckpt", "artifacts/training_model.onnx"):
        path = tmp_path / "file"
        path.write_bytes((files / name).read_bytes()[:-5])
        code, out, _ = run("verify", path)
        assert code == 1 and out[0].startswith(f"{path}: damaged, "), out


def test_folders_and_kept_exports(files: Path, run: Run, tmp_path: Path) -> None:
    cache = ExportCache(tmp_path, 1 << 20)
    assert cache.store("one", b"content") == "" and cache.store("two", b"more") == ""
    code, out, _ = run("verify", "--json", tmp_path)
    assert code == 0 and [entry["state"] for entry in json.loads("\n".join(out))] == ["ok", "ok"]
    damaged = cache.path("two")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    code, out, _ = run("verify", "--json", tmp_path, files / "run.ortckpt")
    assert code == 1 and [entry["good"] for entry in json.loads("\n".join(out))] == [True, False, True]


def test_files_that_should_be_checkpoints(files: Path, run: Run, tmp_path: Path) -> None:
    """A file of zeros, as left by a machine crash, is of unknown kind."""
    (tmp_path / "notes.txt").write_text("of no interest")
    code, out, err = run("verify", tmp_path)
    assert code == 2 and not out and "no files to verify" in err[0]
    (tmp_path / "step-00000001.ortckpt").write_bytes(bytes(1000))
    (tmp_path / "step-00000002.ortckpt").write_bytes(b"")
    shutil.copy(files / "run.ortckpt", tmp_path / "step-00000003.ortckpt")
    code, out, _ = run("verify", "--json", tmp_path)
    assert code == 1 and [entry["good"] for entry in json.loads("\n".join(out))] == [False, False, True]
    code, out, _ = run("inspect", "--json", tmp_path)
    assert code == 1 and ["problem" in entry for entry in json.loads("\n".join(out))["files"]] == [True, True, False]


def test_wrong_usage(tmp_path: Path, run: Run) -> None:
    code, out, err = run("verify", tmp_path / "nothing")
    assert code == 2 and not out and "does not exist" in err[0]
    assert run("verify")[0] == 2
    (tmp_path / "file").write_bytes(b"hello")
    code, out, _ = run("verify", tmp_path / "file")
    assert code == 1 and "of unknown kind" in out[0]
