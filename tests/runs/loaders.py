"""All kinds of loaders, over data that draw from all three generators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

SAMPLES = 22


class Noisy(Dataset[Any]):
    """Draws from each of the three global generators for every sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(8) + random.random() + float(np.random.rand())
        return torch.full((8,), index / SAMPLES) + 0.1 * noise, index % 3


class Stateful:
    """Keeps its own hidden order and position, and returns them in a state dict."""

    def __init__(self) -> None:
        self.random, self.order, self.place = random.Random(7), list(range(SAMPLES)), 0
        self.loaded = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        if not self.place:
            self.random.shuffle(self.order)
        while self.place < SAMPLES:
            self.place += 4
            found = [Noisy()[index] for index in self.order[self.place - 4 : self.place]]
            self.loaded += 1
            yield torch.stack([x for x, _ in found]), torch.tensor([label for _, label in found])
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        version, numbers, _ = self.random.getstate()
        return {"random": [version, list(numbers)], "order": torch.tensor(self.order), "place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        version, numbers = state["random"]
        self.random.setstate((version, tuple(numbers), None))
        self.order, self.place = state["order"].tolist(), state["place"]


def loader(kind: str) -> Any:
    if kind == "list":
        generator = torch.Generator().manual_seed(1)
        return [(torch.randn(4, 8, generator=generator), torch.arange(4) % 3) for _ in range(6)]
    if kind == "stateful":
        return Stateful()
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True}
    if "generator" in kind:
        options["generator"] = torch.Generator().manual_seed(3)
    if "sampler" in kind:
        sampler = RandomSampler(Noisy(), replacement=True, generator=torch.Generator().manual_seed(4))
        options |= {"shuffle": False, "sampler": sampler}
    if "workers" in kind:
        options["num_workers"] = 1
    if "torchdata" in kind:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(Noisy(), **options)
    return DataLoader(Noisy(), **options)


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)
