"""Old scripts, unchanged, in processes of their own: their numbers are PyTorch's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.engine

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).resolve().parent.parent.parent


def run(script: str, argument: Path) -> dict[str, list[list[float]]]:
    """Runs a script after install() and returns the numbers of each line that it prints, by the line's first word."""
    program = (
        "import runpy, sys, ort_trainer.compat; ort_trainer.compat.install(); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-c", program, str(SCRIPTS / script), str(argument)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    lines: dict[str, list[list[float]]] = {}
    for word, *numbers in map(str.split, done.stdout.splitlines()):
        lines.setdefault(word, []).append([float(number) for number in numbers])
    return lines


def reference(rates: list[float]) -> dict[str, list[list[float]]]:
    """The same training in PyTorch, with the learning rate of each update."""
    torch.manual_seed(1)
    fc1, fc2 = nn.Linear(12, 16), nn.Linear(16, 10)
    groups = [
        {"params": [fc1.weight, fc2.weight], "weight_decay": 0.01},
        {"params": [fc1.bias, fc2.bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0)
    generator = torch.Generator().manual_seed(2)
    lines: dict[str, list[list[float]]] = {"loss": []}
    for step in range(8):
        data = torch.randn(5, 12, generator=generator)
        target = torch.randint(0, 10, (5,), generator=generator)
        loss = nn.functional.cross_entropy(fc2(torch.relu(fc1(data))), target)
        lines["loss"].append([loss.item()])
        (loss / 2).backward()
        if step % 2:
            for group in optimizer.param_groups:
                group["lr"] = rates[step // 2]
            optimizer.step()
            optimizer.zero_grad()
    lines["probability"] = [fc2(torch.relu(fc1(data))).flatten().tolist()]
    lines["norm"] = [[p.norm().item() for p in (fc1.weight, fc1.bias, fc2.weight, fc2.bias)]]
    return lines


@pytest.mark.parametrize(
    ("script", "argument", "rates"),
    [
        # A warm-up over 2 of 10 updates, then linear to 0: the factor is s / 2, then (10 - s) / 8.
        ("mnist_like.py", "checkpoint", [0.0, 0.01 / 2, 0.01, 0.01 * 7 / 8]),
        ("older_api.py", ".", [0.01, 0.02, 0.03, 0.04]),
    ],
)
def test_an_old_script_gives_the_numbers_of_pytorch(
    script: str, argument: str, rates: list[float], tmp_path: Path
) -> None:
    found, expected = run(script, tmp_path / argument), reference(rates)
    assert found.keys() == expected.keys()
    for word, lines in expected.items():
        for ours, theirs in zip(found[word], lines, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5), word
