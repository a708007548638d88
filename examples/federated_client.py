"""One participant of federated.py: it trains from the artifacts on data that never leave it, without PyTorch.

The server starts it with the folder of the artifacts, the file with its data, and the server's port; the key of the
connection is in the environment. What goes over the connection is one flat buffer of weights for each round and way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Client
from pathlib import Path

import numpy as np
from onnxruntime import OrtValue

from ort_trainer.api import CheckpointState, TrainingSession

BATCH = 16
EPOCHS = 2  # of a round


def batches(images: np.ndarray, labels: np.ndarray, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields shuffled batches, the last one smaller."""
    order = np.random.default_rng(seed).permutation(len(labels))
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        yield images[rows], labels[rows]


def main(artifacts: Path, data: Path, port: int) -> None:
    """Trains from the weights of every round until there are no more."""
    with np.load(data) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    # Shapes only: the weights come from the server.
    state = CheckpointState.load_checkpoint(artifacts / "nominal_checkpoint")
    session = TrainingSession(
        state, artifacts / "training_model.onnx", optimizer_model=artifacts / "optimizer_model.onnx"
    )
    assert "torch" not in sys.modules
    with Client(("localhost", port), authkey=bytes.fromhex(os.environ["FEDERATED_KEY"])) as server:
        server.send_bytes(data.stem.encode())
        round_number = 0
        while weights := server.recv_bytes():
            session.from_buffer(OrtValue.ortvalue_from_numpy(np.frombuffer(weights, np.float32).copy()))
            for epoch in range(EPOCHS):
                for batch in batches(images, labels, seed=round_number * EPOCHS + epoch):
                    session.train_step(*batch)
                    session.optimizer_step()
                    session.lazy_reset_grad()
            round_number += 1
            server.send_bytes(session.to_buffer(True).numpy().tobytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
