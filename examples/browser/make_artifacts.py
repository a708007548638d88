"""Writes the page's files: the artifacts of a small network, the digits, and the training plan.

Run ``make browser``, or ``python examples/browser/make_artifacts.py``. The plan holds the order of the rows in every
epoch and ORTTrainer's losses on these batches, which the page draws and its test compares with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from ort_trainer import ORTTrainer, optim

BATCH = 64
LEARNING_RATE = 5e-3
WEIGHT_DECAY = 1e-2


class DigitNet(nn.Module):
    """Two layers for images of the digits 0 to 9, 8 x 8 pixels each."""

    def __init__(self) -> None:
        super().__init__()
        # A smooth activation: with ReLU, a value rounded to the other side of 0 would make equal curves diverge.
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Returns logits (batch, 10) for images (batch, 64)."""
        return self.layers(image)


MODEL_DESC = {
    "inputs": [("image", ["batch", 64]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 10])],
}


def digits() -> tuple[np.ndarray, np.ndarray, int]:
    """Returns pixels (1797, 64) from 0 to 16, labels (1797,), and the number of training rows, which come first."""
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    return (
        np.concatenate([train_x, test_x]).astype(np.uint8),
        np.concatenate([train_y, test_y]).astype(np.uint8),
        len(train_y),
    )


def train(
    trainer: ORTTrainer, images: torch.Tensor, labels: torch.Tensor, orders: list[torch.Tensor], train_rows: int
) -> tuple[list[float], list[float]]:
    """Returns the loss of every step, and the accuracy after every epoch on the rows from `train_rows` on."""
    losses, accuracies = [], []
    for order in orders:
        for rows in order.split(BATCH):
            loss, _ = trainer.train_step(images[rows], labels[rows])
            losses.append(loss.item())
        _, logits = trainer.eval_step(images[train_rows:], labels[train_rows:])
        accuracies.append((logits.argmax(1) == labels[train_rows:]).float().mean().item())
    return losses, accuracies


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "build", help="folder that the page reads")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images")
    settings = parser.parse_args(arguments)
    out: Path = settings.out
    out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    config = optim.AdamWConfig(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, max_norm_clip=1.0)
    trainer = ORTTrainer(DigitNet(), MODEL_DESC, config, loss_fn=F.cross_entropy)
    pixels, labels, train_rows = digits()
    images, classes = torch.from_numpy(pixels / np.float32(16)), torch.from_numpy(labels).long()
    trainer.prepare((images[:BATCH], classes[:BATCH]))
    trainer.export_artifacts(out)

    (out / "digits.bin").write_bytes(pixels.tobytes() + labels.tobytes())
    orders = [torch.randperm(train_rows) for _ in range(settings.epochs)]
    losses, accuracies = train(trainer, images, classes, orders, train_rows)
    plan = {
        "batch_size": BATCH,
        "train_rows": train_rows,
        "test_rows": len(labels) - train_rows,
        "orders": [order.tolist() for order in orders],
        "losses": losses,
        "accuracies": accuracies,
    }
    (out / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    print(f"written to {out}: artifacts, digits.bin, plan.json; test accuracy in Python {accuracies[-1]:.2%}")


if __name__ == "__main__":
    main()
