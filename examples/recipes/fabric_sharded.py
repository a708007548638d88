"""FSDP2 by Lightning Fabric's ModelParallelStrategy: each of two processes has half of the weights."""

import tempfile

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from ort_trainer import ORTModule


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def shard(model, mesh):
    for name, block in model.named_children():
        if isinstance(block, Block):
            block = ORTModule(block)
            setattr(model, name, block)
            fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def digits():
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))


def main(steps=60):
    strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(1)
    model = fabric.setup(nn.Sequential(nn.Linear(64, 32), Block(32), Block(32), nn.Linear(32, 10)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(digits(), batch_size=32, shuffle=True))
    losses = []
    while len(losses) < steps:
        for image, label in loader:
            if len(losses) == steps:
                break
            loss = F.cross_entropy(model(image), label)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    with tempfile.TemporaryDirectory() as folder:
        folder = fabric.broadcast(folder)
        fabric.save(folder, {"model": model, "optimizer": optimizer})
        fabric.load(folder, {"model": model, "optimizer": optimizer})
        fabric.barrier()
    with torch.no_grad():
        hits = torch.tensor(sum((model(image).argmax(1) == label).sum().item() for image, label in loader))
    print(f"{fabric.all_reduce(hits, reduce_op='sum')} of 1798 digits are recognized")
    return losses


if __name__ == "__main__":
    main()
