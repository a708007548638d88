"""Every example runs and does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from ort_trainer.checkpoint import load_checkpoint_file

ROOT = Path(__file__).resolve().parent.parent


def test_digits(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples" / "digits.py", "--out", str(tmp_path), "--epochs", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    scores = dict(re.findall(r"^(ORTTrainer|PyTorch|digits\.onnx).*?([\d.]+)%", done.stdout, re.MULTILINE))
    assert float(scores["ORTTrainer"]) > 93 and scores["digits.onnx"] == scores["ORTTrainer"]
    assert abs(float(scores["PyTorch"]) - float(scores["ORTTrainer"])) < 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["digits.onnx", "digits.ortckpt", "loss.png"]
    state, user = load_checkpoint_file(tmp_path / "digits.ortckpt")
    assert state["train_step_info"]["step"] == 5 * 23 and user["accuracy"] > 0.93


def test_every_example_has_a_test() -> None:
    tested = re.findall(r"def test_(\w+)", Path(__file__).read_text())
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} <= set(tested)
