"""A client of federated.py: trains from artifacts on its private data, without PyTorch.

The server starts it with the folder of the artifacts and the file with its data. In each round it reads the weights
from standard input, as one flat float32 buffer, and writes the trained weights to standard output.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # simulates a device without PyTorch, which onnxruntime-training imports if it is installed
    sys.modules["torch"] = None
from onnxruntime import OrtValue

from ort_trainer.api import CheckpointState, TrainingSession

BATCH = 16
EPOCHS = 1  # of a round


def batches(images: np.ndarray, labels: np.ndarray, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields shuffled batches, the last one smaller."""
    order = np.random.default_rng(seed).permutation(len(labels))
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        yield images[rows], labels[rows]


def main(artifacts: Path, data: Path) -> None:
    """Trains from the weights of each round until there are no more."""
    with np.load(data) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    # Shapes only: the weights come from the server.
    state = CheckpointState.load_checkpoint(artifacts / "nominal_checkpoint")
    session = TrainingSession(
        state, artifacts / "training_model.onnx", optimizer_model=artifacts / "optimizer_model.onnx"
    )
    size = 4 * sum(math.prod(parameter.shape) for parameter in state.parameters.values())
    seed = 0
    while weights := sys.stdin.buffer.read(size):
        session.from_buffer(OrtValue.ortvalue_from_numpy(np.frombuffer(weights, np.float32).copy()))
        for _ in range(EPOCHS):
            for batch in batches(images, labels, seed):
                session.train_step(batch)
                session.optimizer_step()
                session.lazy_reset_grad()
            seed += 1
        sys.stdout.buffer.write(session.to_buffer(True).numpy().tobytes())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
