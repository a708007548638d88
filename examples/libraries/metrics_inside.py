"""A module with metrics of torchmetrics inside, which its forward pass updates."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torchmetrics.classification import MulticlassAccuracy


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.accuracy = MulticlassAccuracy(10)

    def forward(self, image, label):
        logits = self.layers(image)
        self.accuracy.update(logits, label)
        return F.cross_entropy(logits, label)


def main(steps=20):
    torch.manual_seed(1)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        rows = torch.randint(len(images), (32,), generator=torch.Generator().manual_seed(step))
        loss = model(images[rows], labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    losses.append(model.accuracy.compute().item())
    return losses


if __name__ == "__main__":
    print(f"the mean accuracy is {main()[-1]:.3f}")
