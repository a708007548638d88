"""A Learner of fastai with its one-cycle policy on digits."""

import fastai.callback.progress  # noqa: F401 - for no_bar
import torch
import torch.nn.functional as F
from fastai.basics import DataLoader, DataLoaders, Learner
from fastai.callback.core import Callback
from sklearn.datasets import load_digits
from torch import nn


class Losses(Callback):
    """Collects the loss of each batch."""

    def __init__(self):
        self.losses = []

    def after_batch(self):
        if self.training:
            self.losses.append(self.loss.item())


def main(steps=20):
    torch.manual_seed(1)
    images, labels = load_digits(return_X_y=True)
    samples = list(zip(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels), strict=True))
    loaders = DataLoaders(
        DataLoader(samples[: 32 * steps], bs=32, num_workers=0), DataLoader(samples[-100:], bs=50), device="cpu"
    )
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    collected = Losses()
    learner = Learner(loaders, model, loss_func=F.cross_entropy, cbs=collected)
    with learner.no_bar(), learner.no_logging():
        learner.fit(1, 1e-2)
    return [*collected.losses, float(learner.validate()[0])]


if __name__ == "__main__":
    print(f"the loss is {main()[-1]:.3f}")
