"""Long runs do not leak memory: the short version, in one process. Loaders with spawned workers work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .memory_cases import epoch

ROOT = Path(__file__).parents[2]


def measure(folder: Path, *cases: tuple[str, int]) -> dict[str, tuple[float, list[int]]]:
    """Runs cases in a process of their own; returns the bytes by which each grows per repetition, and sizes in MB."""
    result = folder / "memory.json"
    arguments = [str(part) for case in cases for part in case]
    command = [sys.executable, "-W", "ignore", "-m", "tests.torture.memory_cases", str(result), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    print(found)
    return {name: (entry["bytes"], entry["sizes"]) for name, entry in found.items()}


@pytest.mark.slow
def test_memory_does_not_grow(tmp_path: Path) -> None:
    limits = {
        "steps": (1000, 1000),
        "steps in fp16, ONNX Runtime's kernels": (1000, 1000),
        "shapes, ONNX Runtime's kernels": (1500, 3_500),  # a session that keeps a plan for every shape: 5600 bytes
        "saves in a thread": (100, 40_000),  # a checkpoint has 340 KB
        "workers by fork": (10, 40_000),
    }
    found = measure(tmp_path, *((name, count) for name, (count, _) in limits.items()))
    for name, (_, limit) in limits.items():
        each, sizes = found[name]
        assert each <= limit, (name, each, sizes)


def test_spawned_workers() -> None:
    trained = []
    for start in ("spawn", None):
        torch.manual_seed(0)
        trainer, action = epoch(start)
        action(0)
        trained.append(trainer.state_dict(pytorch_format=True))
    assert all(torch.equal(trained[0][name], value) for name, value in trained[1].items())
