"""Trains a classifier of handwritten digits in several processes, with the same updates as one process.

``torchrun --nproc-per-node 2 examples/distributed.py`` prints the same losses as ``python examples/distributed.py``:
two processes with batches of 32 images train like one with batches of 64. Several processes only need a
``DistributedSampler``, which gives each its part of every batch. The trainer finds the others through ``torchrun``'s
environment variables; all processes must call its methods in the same order.

``torchrun --nproc-per-node 2 --max-restarts 3 examples/distributed.py --checkpoint digits.ortckpt --resume`` continues
from the last epoch if a process dies.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim

BATCH = 64  # total of all processes


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Returns 1437 training and 360 test images with labels."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains and returns the loss of every step of this run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training images")
    parser.add_argument("--zero", action="store_true", help="each process keeps a part of the optimizer's state (ZeRO)")
    parser.add_argument("--checkpoint", type=Path, help="file to write after every epoch")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if there is one")
    arguments = parser.parse_args(argv)
    if arguments.resume and not arguments.checkpoint:
        parser.error("--resume needs --checkpoint")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10))
    options = ORTTrainerOptions({"distributed": {"deepspeed_zero_optimization": {"stage": int(arguments.zero)}}})
    trainer = ORTTrainer(model, "auto", optim.AdamWConfig(lr=2e-3), nn.CrossEntropyLoss(), options)
    rank, size = trainer.world_rank, trainer.world_size

    train, test = digits()
    sampler = DistributedSampler(train, num_replicas=size, rank=rank)
    batches = DataLoader(train, BATCH // size, sampler=sampler, drop_last=True)
    begin = 0
    if arguments.resume and arguments.checkpoint.exists():
        begin = trainer.load_checkpoint(arguments.checkpoint)["epochs"]
    losses: list[float] = []
    for epoch in range(begin, arguments.epochs):
        sampler.set_epoch(epoch)  # a new order in every epoch, the same in all processes
        own = [trainer.train_step(*batch)[0].item() for batch in batches]
        every = [found["losses"] for found in trainer.gather({"losses": own})]
        losses += [sum(parts) / size for parts in zip(*every, strict=True)]  # each is the loss of the whole batch
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {sum(losses[-len(batches) :]) / len(batches):.5f}, last {losses[-1]:.5f}")
        if arguments.checkpoint:
            trainer.save_checkpoint(arguments.checkpoint, {"epochs": epoch + 1}, overwrite=True)
    _, logits = trainer.eval_step(*test.tensors)
    if rank == 0:
        right = (logits.argmax(1) == test.tensors[1]).double().mean().item()
        print(f"{size} process{'es' * (size > 1)} with batches of {BATCH // size}: test accuracy {right:.2%}")
    return losses


if __name__ == "__main__":
    main()
