"""A client of federated.py: trains adapters from artifacts on its private data, without PyTorch.

The server starts it with the folder of the artifacts, the file with its data, and what goes wrong (``dies:20``: it
ends in round 20; ``nan:10``: its answer in round 10 is not a number). In each round it reads the weights of the
adapters from standard input, as one flat float32 buffer, and writes the trained ones to standard output.
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


class Client:
    """Trains the adapters of a model on private data.

    Args:
        artifacts: The folder of the artifacts.
        data: A file with ``images`` and ``labels``.
        trouble: What goes wrong, and in which round; empty for nothing.
    """

    def __init__(self, artifacts: Path, data: Path, trouble: str = "") -> None:
        with np.load(data) as arrays:
            self._data = arrays["images"], arrays["labels"]
        self._state = CheckpointState.load_checkpoint(artifacts / "checkpoint")
        models = artifacts / "training_model.onnx", artifacts / "optimizer_model.onnx"
        self._session = TrainingSession(self._state, models[0], optimizer_model=models[1])
        self._trouble, _, when = trouble.partition(":")
        self._when = int(when or 0)

    @property
    def size(self) -> int:
        """Number of weights that are trained."""
        return sum(math.prod(value.shape) for value in self._state.parameters.values() if value.requires_grad)

    def train(self, weights: np.ndarray, number: int) -> np.ndarray:
        """Returns the weights after a round, whose number counts from 1."""
        if self._trouble == "dies" and number >= self._when:
            raise SystemExit("the battery is empty")
        self._session.from_buffer(OrtValue.ortvalue_from_numpy(weights.copy()))
        for epoch in range(EPOCHS):
            for batch in batches(*self._data, seed=(number - 1) * EPOCHS + epoch):
                self._session.train_step(batch)
                self._session.optimizer_step()
                self._session.lazy_reset_grad()
        found = self._session.to_buffer(True).numpy()
        return found * np.nan if self._trouble == "nan" and number == self._when else found


def main(client: Client) -> None:
    """Trains from the weights of each round until there are no more."""
    number = 1
    while weights := sys.stdin.buffer.read(4 * client.size):
        sys.stdout.buffer.write(client.train(np.frombuffer(weights, np.float32), number).tobytes())
        sys.stdout.buffer.flush()
        number += 1


if __name__ == "__main__":
    main(Client(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
