"""A recurrent network whose matrix stays orthogonal, by ``torch.nn.utils.parametrizations``."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm


class Rows(nn.Module):
    """Reads an image row by row."""

    def __init__(self):
        super().__init__()
        self.embed = weight_norm(nn.Linear(8, 32))
        self.step = orthogonal(nn.Linear(32, 32, bias=False))
        self.head = spectral_norm(nn.Linear(32, 10))

    def forward(self, images):
        state = images.new_zeros(len(images), 32)
        for row in images.unbind(1):
            state = torch.tanh(self.embed(row) + self.step(state))
        return self.head(state)


def main(steps=20):
    torch.manual_seed(1)
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
    model = Rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        rows = torch.randint(len(images), (32,), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(f"the loss is {main()[-1]:.3f}")
