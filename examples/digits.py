"""Trains a small CNN on scikit-learn's handwritten digits with ORTTrainer, and the same CNN in plain PyTorch.

Run ``make demo``, or ``python examples/digits.py --out FOLDER``. It writes a checkpoint, an ONNX file, with which it
classifies the test set in onnxruntime, and a plot of both loss curves.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from tqdm import tqdm

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BATCH = 64
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 1e-2


class DigitNet(nn.Module):
    """A convolutional network for 8 x 8 images of the digits 0 to 9."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Returns logits (batch, 10) for images (batch, 1, 8, 8)."""
        return self.classifier(self.features(image))


MODEL_DESC = {
    "inputs": [("image", ["batch", 1, 8, 8]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 10])],
}

Data = tuple[torch.Tensor, torch.Tensor]


def digits() -> tuple[Data, Data]:
    """Returns 1437 training and 360 test images with labels."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    return tuple((torch.from_numpy(x), torch.from_numpy(y)) for x, y in ((train_x, train_y), (test_x, test_y)))


def batches(data: Data, epoch: int) -> Iterator[Data]:
    """Yields shuffled batches, the last one smaller; the same ones for the same epoch."""
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(epoch))
    for rows in order.split(BATCH):
        yield data[0][rows], data[1][rows]


def accuracy(logits: torch.Tensor | np.ndarray, labels: torch.Tensor) -> float:
    """Returns the share of correct answers."""
    return (np.asarray(logits).argmax(1) == labels.numpy()).mean().item()


def train_with_ort(
    model: nn.Module, train: Data, test: Data, epochs: int
) -> tuple[ORTTrainer, list[float], float, float, float]:
    """Returns the trainer, the loss of every step, the test accuracy, and the seconds of the export and the steps."""
    config = optim.AdamWConfig(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    # Use PyTorch's own dropout masks to make the two loss curves equal; steps are faster without this.
    options = ORTTrainerOptions({"utils": {"random_numbers": "pytorch"}})
    start = time.perf_counter()
    trainer = ORTTrainer(model, MODEL_DESC, config, loss_fn=F.cross_entropy, options=options)
    trainer.prepare(next(batches(train, 0)))
    begun = time.perf_counter()
    losses = []
    for epoch in tqdm(range(epochs), desc="ORTTrainer", unit="epoch"):
        for image, label in batches(train, epoch):
            loss, _ = trainer.train_step(image, label)
            losses.append(loss.item())
    trained = time.perf_counter()
    _, logits = trainer.eval_step(*test)
    return trainer, losses, accuracy(logits, test[1]), begun - start, trained - begun


def train_with_pytorch(model: nn.Module, train: Data, test: Data, epochs: int) -> tuple[list[float], float, float]:
    """Runs the same loop in plain PyTorch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    losses = []
    model.train()
    start = time.perf_counter()
    for epoch in tqdm(range(epochs), desc="PyTorch   ", unit="epoch"):
        for image, label in batches(train, epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(image), label)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        logits = model(test[0])
    return losses, accuracy(logits, test[1]), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/digits"), help="folder of the results")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the training images")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    train, test = digits()
    torch.manual_seed(0)
    model = DigitNet()
    twin = copy.deepcopy(model)

    torch.manual_seed(1)  # the same seed before each run makes both sample the same dropout masks
    trainer, losses, score, export, seconds = train_with_ort(model, train, test, arguments.epochs)
    torch.manual_seed(1)
    torch_losses, torch_score, torch_seconds = train_with_pytorch(twin, train, test, arguments.epochs)

    trainer.save_checkpoint(out / "digits.ortckpt", {"accuracy": score}, overwrite=True)
    trainer.export_for_inference(out / "digits.onnx")
    session = onnxruntime.InferenceSession(str(out / "digits.onnx"), providers=["CPUExecutionProvider"])
    onnx_score = accuracy(session.run(["logits"], {"image": test[0].numpy()})[0], test[1])
    plot(losses, torch_losses, out / "loss.png")

    steps = len(losses)
    print(f"\n{'':28}{'test accuracy':>14}{'export, s':>11}{'a step, ms':>12}{'last loss':>11}")
    print(f"{'ORTTrainer':28}{score:>14.2%}{export:>11.1f}{1e3 * seconds / steps:>12.2f}{losses[-1]:>11.4f}")
    print(f"{'PyTorch':28}{torch_score:>14.2%}{'':>11}{1e3 * torch_seconds / steps:>12.2f}{torch_losses[-1]:>11.4f}")
    print(f"{'digits.onnx in onnxruntime':28}{onnx_score:>14.2%}")
    differences = np.abs(np.subtract(losses, torch_losses))
    first, largest = differences[:10].max(), differences.max()
    print(f"\nThe losses differ by {first:.0e} in the first 10 steps, by {largest:.0e} at most:")
    print("both round, but not in the same order, and each step carries the difference on, as between two processors.")
    print("written: " + ", ".join(str(out / name) for name in ("digits.ortckpt", "digits.onnx", "loss.png")))


def plot(losses: list[float], torch_losses: list[float], path: Path) -> None:
    """Plots both loss curves."""
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(losses, label="ORTTrainer", linewidth=3, alpha=0.5)
    axes.plot(torch_losses, label="PyTorch", linewidth=1, color="black")
    axes.set(xlabel="step", ylabel="training loss", yscale="log", title="Handwritten digits")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
