"""Makes files of every kind from one trainer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from ort_trainer.artifacts import convert_checkpoint
from ort_trainer.cli import main

from ..helpers import mlp_batches, mlp_trainer

USER = {"epoch": 3, "name": "first", "best": 0.5, "seen": [1, 2]}
Run = Callable[..., tuple[int, list[str], list[str]]]


def damage(path: Path, tensor: str) -> None:
    """Flips a bit in the middle of a tensor."""
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    start, end = json.loads(data[8 : 8 + size])[tensor]["data_offsets"]
    data[8 + size + (start + end) // 2] ^= 1
    path.write_bytes(data)


def as_version_1(source: Path, target: Path) -> None:
    """Writes a trainer's checkpoint in version 1, without checksums."""
    with safetensors.safe_open(source, framework="pt") as opened:
        manifest = json.loads(opened.metadata()["manifest"])
    manifest["version"] = 1
    safetensors.torch.save_file(safetensors.torch.load_file(source), target, {"manifest": json.dumps(manifest)})


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with ``run.ortckpt``, ``old.ortckpt`` in version 1, ``artifacts/`` and ``upstream``."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    trainer = mlp_trainer()
    for batch in mlp_batches(3):
        trainer.train_step(*batch)
    trainer.save_checkpoint(folder / "run.ortckpt", USER)
    as_version_1(folder / "run.ortckpt", folder / "old.ortckpt")
    trainer.export_artifacts(folder / "artifacts")
    with pytest.warns(UserWarning, match="can't store"):
        convert_checkpoint(folder / "artifacts" / "checkpoint", folder / "upstream")
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command and returns its exit code and the lines on stdout and stderr."""

    def command(*arguments: Any) -> tuple[int, list[str], list[str]]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:
            assert isinstance(error.code, int)
            code = error.code
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err.splitlines()

    return command
