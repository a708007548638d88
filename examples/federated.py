"""Federated averaging: clients train adapters of one model together without sharing their data.

Run ``python examples/federated.py --out FOLDER``. The server exports the artifacts of a model once; its first layer is
frozen, and only the adapter beside it and the last layer are trained, and travel. Five clients, separate processes
without PyTorch, each have only two of the ten digits, and the last ones fewer images. In every round, each client gets
the weights, trains on its own part of scikit-learn's digits and returns its weights. The server averages them, weighted
by the number of images (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017). One answer is not a number, and is refused; one client ends for good, and the others go on. The plot
compares this with clients that keep their own weights, and with a single trainer that has all the data.

With Flower (``pip install 'flwr[simulation]'``) its server and clients do the same: federated_flower.py.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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
LEARNING_RATE = 0.2
RANK = 16
# What goes wrong, in which round (federated_client.py), at which client.
TROUBLE = {1: "nan:5", 4: "dies:50"}
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


class Adapted(nn.Module):
    """A frozen layer with a product of low rank beside it (LoRA: Hu et al., 2021), and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 128).requires_grad_(False)
        self.down, self.up = nn.Linear(64, RANK, bias=False), nn.Linear(RANK, 128, bias=False)
        self.head = nn.Linear(128, 10)
        nn.init.zeros_(self.up.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the logits."""
        return self.head(torch.relu(self.base(input) + self.up(self.down(input))))


def new_trainer() -> ORTTrainer:
    """Returns the trainer of the model."""
    torch.manual_seed(0)
    return ORTTrainer(Adapted(), MODEL_DESC, optim.SGDConfig(lr=LEARNING_RATE), loss_fn=F.cross_entropy)


def split_by_digit(train: Data, folder: Path) -> list[tuple[Path, int]]:
    """Writes a file for each client, with images of two digits, and returns its path and number of images.

    The first client has all of its digits, the last one three fifths.
    """
    images, labels = train
    parts = []
    for client in range(CLIENTS):
        own = np.flatnonzero(labels // 2 == client)
        own = own[: len(own) * 6 // (6 + client)]
        path = folder / f"{client}.npz"
        np.savez(path, images=images[own], labels=labels[own])
        parts.append((path, len(own)))
    return parts


Client = subprocess.Popen[bytes]


@contextlib.contextmanager
def clients(artifacts: Path, files: list[Path], trouble: dict[int, str]) -> Iterator[dict[int, Client]]:
    """Starts a process for each file, and ends it afterwards."""
    script = Path(__file__).with_name("federated_client.py")
    command = [sys.executable, str(script), str(artifacts)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    started = {
        number: subprocess.Popen([*command, str(file), trouble.get(number, "")], **pipes)
        for number, file in enumerate(files)
    }
    try:
        yield started
    finally:
        for client in started.values():
            client.stdin.close()  # no more rounds
            with contextlib.suppress(subprocess.TimeoutExpired):
                client.wait(60)
            client.kill()


def train_round(started: dict[int, Client], weights: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Trains all clients in parallel, each from its given weights, and returns the new weights of those that answer."""
    for number, client in started.items():
        with contextlib.suppress(BrokenPipeError):  # it has ended, which shows below
            client.stdin.write(weights[number].tobytes())
            client.stdin.flush()
    returned = {}
    for number, client in started.items():
        answer = client.stdout.read(weights[number].nbytes)
        if len(answer) == weights[number].nbytes:
            returned[number] = np.frombuffer(answer, np.float32)
    return returned


def accepted(returned: dict[int, np.ndarray], number: int) -> dict[int, np.ndarray]:
    """Returns the weights that can be averaged: all numbers are finite."""
    good = {client: weights for client, weights in returned.items() if np.isfinite(weights).all()}
    for client in returned.keys() - good.keys():
        print(f"round {number:2}: the answer of client {client} is not a number: refused")
    return good


class Evaluator:
    """Evaluates weights on the server with the evaluation model."""

    def __init__(self, artifacts: Path, test: Data) -> None:
        state = CheckpointState.load_checkpoint(artifacts / "checkpoint")
        self._module = Module(artifacts / "training_model.onnx", state, artifacts / "eval_model.onnx").eval()
        self._test = test
        # All trained weights as one flat array.
        self.start = self._module.get_contiguous_parameters(trainable_only=True).numpy()
        print(f"of {self._module.get_parameters_size(False):,} weights {self.start.size:,} are trained, and travel")

    def accuracy(self, weights: np.ndarray) -> float:
        """Returns the share of test images that a model with these weights gets right."""
        self._module.copy_buffer_to_parameters(OrtValue.ortvalue_from_numpy(weights.copy()), trainable_only=True)
        _, logits = self._module(*self._test)
        return float((logits.argmax(1) == self._test[1]).mean())


def train_apart(artifacts: Path, files: list[Path], evaluator: Evaluator, rounds: int) -> list[float]:
    """Returns the mean accuracy of clients that keep their own weights, before and after every round."""
    start = evaluator.start
    weights, curve = dict.fromkeys(range(len(files)), start), [evaluator.accuracy(start)]
    with clients(artifacts, files, {}) as started:
        for _ in range(rounds):
            weights = train_round(started, weights)
            curve.append(float(np.mean([evaluator.accuracy(own) for own in weights.values()])))
    return curve


def train_together(
    artifacts: Path, files: list[Path], counts: list[int], evaluator: Evaluator, rounds: int
) -> list[float]:
    """Returns the accuracy of the averaged weights, before and after every round."""
    mean, curve = evaluator.start, [evaluator.accuracy(evaluator.start)]
    with clients(artifacts, files, TROUBLE) as started:
        for number in range(1, rounds + 1):
            returned = train_round(started, dict.fromkeys(started, mean))
            for client in started.keys() - returned.keys():
                print(f"round {number:2}: client {client} has ended with code {started.pop(client).wait(60)}")
            good = accepted(returned, number)
            if good:
                mean = np.average([*good.values()], axis=0, weights=[counts[client] for client in good])
                mean = mean.astype(np.float32)
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
    installed = all(importlib.util.find_spec(name) for name in ("flwr", "ray"))
    flower = parser.add_mutually_exclusive_group()
    flower.add_argument(
        "--flower", action="store_true", default=installed, help="with Flower; the default if installed"
    )
    flower.add_argument("--no-flower", action="store_false", dest="flower", help="with a loop of its own")
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
        way = train_together
        if arguments.flower:
            from federated_flower import train_together as way
        together = way(artifacts, files, counts, evaluator, arguments.rounds)
        apart = train_apart(artifacts, files, evaluator, arguments.rounds)
    alone = train_alone(train, test, arguments.rounds)
    curves = {"one trainer with all data": alone, "clients, averaged": together, "clients, each for itself": apart}
    for label, curve in curves.items():
        print(f"{label}: {curve[-1]:.1%}")
    path = arguments.out / "federated.svg"
    plot(curves, path)
    print(f"plot: {path}")


if __name__ == "__main__":
    main()
