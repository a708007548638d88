"""A loop on Lightning Fabric: its seed, data, clipping and checkpoints stay."""

import tempfile

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ort_trainer import ORTTrainer


def digits():
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))


def main(steps=90):
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    trainer = ORTTrainer(model.module, "auto", optimizer, loss_fn=F.cross_entropy)
    loader = fabric.setup_dataloaders(DataLoader(digits(), batch_size=64, shuffle=True))
    losses = []
    while len(losses) < steps:
        for image, label in loader:
            if len(losses) == steps:
                break
            loss, _ = trainer.forward_backward(image, label)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    with tempfile.TemporaryDirectory() as folder:
        fabric.save(f"{folder}/last.ckpt", {"model": model, "optimizer": optimizer})
        fabric.load(f"{folder}/last.ckpt", {"model": model, "optimizer": optimizer})
    hits = sum((model(image).argmax(1) == label).sum().item() for image, label in loader)
    print(f"{hits} of 1797 digits are recognized")
    return losses


if __name__ == "__main__":
    main()
