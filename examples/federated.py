"""Federated averaging: clients train one model together without sharing their data.

Run ``python examples/federated.py --out FOLDER``. The server exports the artifacts of a model once. Five clients,
separate processes without PyTorch, each have only two of the ten digits. In every round, each client gets the weights,
trains on its own part of scikit-learn's digits and returns its weights. The server averages them, weighted by the
number of images (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017). The plot compares this with clients that keep their own weights, and with a single trainer that has all the data.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from federated_client import BATCH, EPOCHS, batches
from onnxruntime import OrtValue
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from ort_trainer import ORTTrainer, optim
from ort_trainer.api import CheckpointState, Module

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CLIENTS = 5
LEARNING_RATE = 0.1
MODEL_DESC = {
    "inputs": [("input", ["batch", 64]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 10])],
}

Data = tuple[np.ndarray, np.ndarray]


def digits() -> tuple[Data, Data]:
    """Returns 1437 training and 360 test images with labels."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    return (train_x, train_y), (test_x, test_y)


def new_trainer() -> ORTTrainer:
    """Returns the trainer of the model: an MLP with 4,810 weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return ORTTrainer(model, MODEL_DESC, optim.SGDConfig(lr=LEARNING_RATE), loss_fn=F.cross_entropy)


def split_by_digit(train: Data, folder: Path) -> list[tuple[Path, int]]:
    """Writes a file for each client, with the images of two digits, and returns its path and number of images."""
    images, labels = train
    parts = []
    for client in range(CLIENTS):
        own = labels // 2 == client
        path = folder / f"{client}.npz"
        np.savez(path, images=images[own], labels=labels[own])
        parts.append((path, int(own.sum())))
    return parts


Client = subprocess.Popen[bytes]


@contextlib.contextmanager
def clients(artifacts: Path, files: list[Path]) -> Iterator[list[Client]]:
    """Starts a process for each file, and ends it afterwards."""
    script = Path(__file__).with_name("federated_client.py")
    command = [sys.executable, str(script), str(artifacts)]
    started = [subprocess.Popen([*command, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for file in files]
    try:
        yield started
        for client in started:
            client.stdin.close()  # no more rounds
        for client in started:
            if client.wait(60):
                raise RuntimeError(f"a client ended with code {client.returncode}")
    finally:
        for client in started:
            client.kill()


def train_round(started: list[Client], weights: list[np.ndarray]) -> list[np.ndarray]:
    """Trains all clients in parallel, each from its given weights, and returns their new weights."""
    for client, own in zip(started, weights, strict=True):
        client.stdin.write(own.tobytes())
        client.stdin.flush()
    returned = []
    for client, own in zip(started, weights, strict=True):
        answer = client.stdout.read(own.nbytes)
        if len(answer) < own.nbytes:
            raise RuntimeError(f"a client ended with code {client.wait()} instead of an answer")
        returned.append(np.frombuffer(answer, np.float32))
    return returned


class Evaluator:
    """Evaluates weights on the server with the evaluation model."""

    def __init__(self, artifacts: Path, test: Data) -> None:
        state = CheckpointState.load_checkpoint(artifacts / "checkpoint")
        self._module = Module(artifacts / "training_model.onnx", state, artifacts / "eval_model.onnx").eval()
        self._test = test

    def weights(self) -> np.ndarray:
        """Returns all trained weights as one flat array."""
        return self._module.get_contiguous_parameters(trainable_only=True).numpy()

    def accuracy(self, weights: np.ndarray) -> float:
        """Returns the share of test images that a model with these weights gets right."""
        self._module.copy_buffer_to_parameters(OrtValue.ortvalue_from_numpy(weights.copy()), trainable_only=True)
        _, logits = self._module(*self._test)
        return float((logits.argmax(1) == self._test[1]).mean())


def train_apart(started: list[Client], evaluator: Evaluator, start: np.ndarray, rounds: int) -> list[float]:
    """Returns the mean accuracy of clients that keep their own weights, before and after every round."""
    weights = [start] * len(started)
    curve = [evaluator.accuracy(start)]
    for _ in range(rounds):
        weights = train_round(started, weights)
        curve.append(float(np.mean([evaluator.accuracy(own) for own in weights])))
    return curve


def train_together(
    started: list[Client], counts: list[int], evaluator: Evaluator, start: np.ndarray, rounds: int
) -> list[float]:
    """Returns the accuracy of the averaged weights, before and after every round."""
    mean = start
    curve = [evaluator.accuracy(mean)]
    for number in range(1, rounds + 1):
        returned = train_round(started, [mean] * len(started))
        mean = np.average(returned, axis=0, weights=counts).astype(np.float32)
        curve.append(evaluator.accuracy(mean))
        print(f"round {number:2}: accuracy {curve[-1]:.1%}")
    return curve


def train_alone(train: Data, test: Data, rounds: int) -> list[float]:
    """Returns the accuracy of one trainer with all the data, before and after the epochs of every round."""
    trainer = new_trainer()

    def accuracy() -> float:
        logits = trainer.eval_step(*map(torch.from_numpy, test))[1]
        return (logits.argmax(1).numpy() == test[1]).mean().item()

    curve = [accuracy()]
    for number in range(rounds):
        for epoch in range(EPOCHS):
            for batch in batches(*train, seed=number * EPOCHS + epoch):
                trainer.train_step(*map(torch.from_numpy, batch))
        curve.append(accuracy())
    return curve


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Draws accuracy per round."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for label, curve in curves.items():
        axes.plot(range(len(curve)), [100 * value for value in curve], label=label)
    axes.set(xlabel="round", ylabel="test accuracy, %", ylim=(0, 100), title="Five clients with two digits each")
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    figure.savefig(path)
    plt.close(figure)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/federated"), help="folder of the plot")
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args(given)
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the model is small, and more threads would compete with the clients

    train, test = digits()
    with tempfile.TemporaryDirectory() as folder:
        artifacts = Path(folder) / "artifacts"
        trainer = new_trainer()
        trainer.prepare((torch.zeros(BATCH, 64), torch.zeros(BATCH, dtype=torch.long)))
        trainer.export_artifacts(artifacts)
        parts = split_by_digit(train, Path(folder))
        files, counts = [path for path, _ in parts], [count for _, count in parts]
        evaluator = Evaluator(artifacts, test)
        start = evaluator.weights()
        with clients(artifacts, files) as started:
            together = train_together(started, counts, evaluator, start, arguments.rounds)
            apart = train_apart(started, evaluator, start, arguments.rounds)
    alone = train_alone(train, test, arguments.rounds)
    curves = {"one trainer with all data": alone, "clients, averaged": together, "clients, each for itself": apart}
    for label, curve in curves.items():
        print(f"{label}: {curve[-1]:.1%}")
    path = arguments.out / "federated.svg"
    plot(curves, path)
    print(f"plot: {path}")


if __name__ == "__main__":
    main()
