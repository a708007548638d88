"""ort-trainer env: correct facts, and output even from a broken installation."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path

import onnxruntime
import pytest
import torch

from ort_trainer.engine import ort as installed

from .conftest import Run


@pytest.mark.engine
def test_what_is_installed(run: Run) -> None:
    code, out, err = run("env", "--json")
    found = json.loads("\n".join(out))
    assert code == 0 and not err
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    assert found["engine"]["version"] == onnxruntime.__version__
    assert found["engine"]["providers"] == onnxruntime.get_available_providers()
    has_training = installed.has_training()
    assert found["engine"]["distribution"] == ("onnxruntime-training-cpu" if has_training else "onnxruntime")
    assert found["can train"]["PyTorch and ONNX models"] == "yes"
    assert found["can train"]["exported artifacts"] == "yes"
    if not torch.cuda.is_available():
        assert found["runs on"]["training"] == "PyTorch's kernels on cpu"
        assert found["runs on"]["evaluation"] == "ONNX Runtime's kernels on cpu"
    assert found["processors"]["in this machine"] == os.cpu_count()
    assert found["processors"]["threads of torch"] == torch.get_num_threads()


def test_as_text(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.export").write_bytes(bytes(2500))
    monkeypatch.setenv("ORT_TRAINER_CACHE", str(tmp_path))
    code, out, _ = run("env")
    assert code == 0 and [line.split()[0] for line in out[:3]] == ["ort_trainer", "python", "platform"]
    assert f"  folder  {tmp_path}" in out and "  files   1, 2.5 kB" in out
    assert any(line.split() == ["ORT_TRAINER_CACHE", str(tmp_path)] for line in out)
    monkeypatch.setenv("ORT_TRAINER_CACHE", "off")
    assert any(line.split() == ["cache", "of", "exports", "off"] for line in run("env")[1])


def test_what_is_broken_is_named_and_the_rest_is_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("libsomething.so:\nno such file")

    monkeypatch.setattr("ort_trainer.engine.ort.engine", broken)
    monkeypatch.setattr("ort_trainer.cli.env.platform.platform", broken)
    monkeypatch.setattr("ort_trainer.cli.env._LOOKED_UP", ("xxhash", "no_such_package"))
    monkeypatch.setitem(sys.modules, "ort_trainer.api.load", None)  # as if it could not be imported
    monkeypatch.setenv("ORT_TRAINER_CACHE_MB", "many")
    code, out, err = run("env", "--json")
    found = json.loads("\n".join(out))
    assert code == 0 and not err
    assert found["engine"]["problem"] == "importing it fails: OSError: libsomething.so: no such file"
    assert found["platform"] == "not known: OSError: libsomething.so: no such file"
    assert found["can train"]["PyTorch and ONNX models"] == "no: OSError: libsomething.so: no such file"
    assert found["can train"]["exported artifacts"].startswith("no: ModuleNotFoundError: import of ort_trainer.api.loa")
    assert found["cache of exports"].startswith("not known: ValueError: the environment variable ORT_TRAINER_CACHE_MB")
    assert found["packages"]["numpy"] == importlib.metadata.version("numpy")
    assert found["packages"]["xxhash"] == importlib.metadata.version("xxhash")
    assert found["packages"]["no_such_package"] == "not installed"


def test_several_engines_are_a_problem(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    both = ("onnxruntime", "onnxruntime-training-cpu")
    monkeypatch.setattr("ort_trainer.engine.ort.installed_flavours", lambda: both)
    found = json.loads("\n".join(run("env", "--json")[1]))
    assert "overwrite each other's files" in found["engine"]["problem"]
