"""Trains the digits in Python as the programs in C and C++ do, and compares losses and checkpoints: `make test-c`."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np

from ort_trainer.api import CheckpointState, Module, Optimizer

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "digits"
EPOCHS, BATCH, TRAIN_ROWS, PIXELS = 30, 64, 1437, 64
TOLERANCE = 1e-5


def main() -> None:
    sys.path.insert(0, str(ROOT / "examples" / "browser"))
    importlib.import_module("make_artifacts").main(["--out", str(FOLDER), "--epochs", "1"])
    digits = np.fromfile(FOLDER / "digits.bin", np.uint8)
    rows = len(digits) // (PIXELS + 1)
    images = (digits[: rows * PIXELS].reshape(rows, PIXELS) / np.float32(16)).astype(np.float32)
    labels = digits[rows * PIXELS :].astype(np.int64)
    state = CheckpointState.load_checkpoint(FOLDER / "checkpoint")
    module = Module(FOLDER / "training_model.onnx", state)
    optimizer = Optimizer(FOLDER / "optimizer_model.onnx", module)
    losses = []
    for _ in range(EPOCHS):
        for start in range(0, TRAIN_ROWS, BATCH):
            part = slice(start, min(start + BATCH, TRAIN_ROWS))
            losses.append(float(module(images[part], labels[part])[0]))
            optimizer.step()
            module.lazy_reset_grad()
    for language in ("c", "cpp"):
        command = [ROOT / "build" / "c" / f"digits_{language}", FOLDER, str(EPOCHS)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = np.array(done.stdout.split(), np.float64)
        difference = float(np.max(np.abs(found / losses - 1)))
        print(f"{language}: {done.stderr.strip()}; {len(found)} losses within {difference:.1e} of Python's")
        assert difference < TOLERANCE and len(found) == len(losses)
        trained = (FOLDER / f"trained_{language}").read_bytes()
        read = CheckpointState.load_checkpoint_from_buffer(trained)
        assert CheckpointState.save_checkpoint_to_buffer(read, True) == trained
    # Those that the test has written.
    for path in sorted((ROOT / "build" / "portable").glob("*/trained")):
        read = CheckpointState.load_checkpoint(path)
        assert CheckpointState.save_checkpoint_to_buffer(read, True) == path.read_bytes(), path


if __name__ == "__main__":
    main()
