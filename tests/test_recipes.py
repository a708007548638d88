"""Recipes for libraries that are no dependencies: each script gives the losses of the same script in PyTorch."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from . import processes
from .distributed.world import environments
from .test_cookbook import changed_lines

RECIPES = Path(__file__).resolve().parent.parent / "examples" / "recipes"
# What a script needs beside the development environment.
NEEDS = {
    "deepspeed_zero": ("deepspeed",),
    "diloco": (),
    "fabric_loop": ("lightning.fabric",),
    "fabric_sharded": ("lightning.fabric",),
    "lightning_module": ("lightning",),
    "peft_methods": ("peft",),
    "ray_train": ("ray",),
    "seq2seq": ("transformers",),
    "timm_models": ("torchvision", "timm"),
    "trl_trainers": ("trl", "datasets", "peft"),
}
# Scripts for two processes, which a launcher starts.
LAUNCHED = ("deepspeed_zero", "diloco", "fabric_sharded")
MOST_CHANGED_LINES = {"peft_methods": 4, "seq2seq": 8}


def test_every_script_has_both_forms() -> None:
    both = {path.stem for path in RECIPES.glob("*.py")}
    assert both == {f"{name}{form}" for name in NEEDS for form in ("", "_torch")}


@pytest.mark.parametrize("name", NEEDS)
def test_few_lines_differ(name: str) -> None:
    before, after = ((RECIPES / f"{name}{form}.py").read_text().splitlines() for form in ("_torch", ""))
    assert 0 < changed_lines(before, after) <= MOST_CHANGED_LINES.get(name, 12)
    assert "ort_trainer" in "\n".join(after) and "ort_trainer" not in "\n".join(before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of these libraries, about each other
@pytest.mark.parametrize("name", NEEDS)
def test_losses_are_those_of_pytorch(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    for library in NEEDS[name]:
        pytest.importorskip(library, reason=f"{library} is not installed: docs/huggingface.md", exc_type=ImportError)
    # For Ray's workers, which import the script, too.
    monkeypatch.setenv("PYTHONPATH", str(RECIPES), prepend=os.pathsep)
    expected, found = (_trained(f"{name}{form}", 2 if name in LAUNCHED else 1, tmp_path) for form in ("_torch", ""))
    for (losses, last_line), (own_losses, own_last_line) in zip(expected, found, strict=True):
        assert len(losses) >= 20 and max(losses) != min(losses)
        assert own_losses == pytest.approx(losses, rel=1e-4)
        assert own_last_line == last_line  # what evaluation says of the trained model


def _trained(script: str, size: int, folder: Path) -> list[tuple[list[float], str]]:
    """Returns, by rank, the losses of 20 steps of a script, and the last line that it prints."""
    paths = [folder / f"{script}.{rank}.json" for rank in range(size)]
    variables = environments(size) if size > 1 else [None]
    calls = [processes.Call(_train, (script, path), own) for path, own in zip(paths, variables, strict=True)]
    ended = processes.run(calls, timeout=600)
    assert not any(process.code for process in ended), "\n".join(process.output for process in ended)
    return [
        (json.loads(path.read_text()), process.output.splitlines()[-1])
        for path, process in zip(paths, ended, strict=True)
    ]


def _train(script: str, path: Path) -> None:
    sys.path.insert(0, str(RECIPES))
    torch.set_num_threads(1)
    path.write_text(json.dumps(importlib.import_module(script).main(steps=20)))
