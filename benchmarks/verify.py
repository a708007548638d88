"""Measures what it costs that ``debug.verify_every`` compares steps with PyTorch, for docs/limits.md.

    python benchmarks/verify.py

All contenders take turns in one process and one thread; figures are medians of processor time, so that other
processes disturb them little. Steps of "auto" are measured after the first hundred, of which many are compared.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTModule, ORTTrainer, ORTTrainerOptions, optim

BEFORE, TURNS = 130, 7
EVERY: tuple[str | int, ...] = ("off", "auto", 1)
Batch = tuple[torch.Tensor, torch.Tensor]


class Bert(nn.Module):
    """Two layers of width 128."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = BertConfig(**sizes, intermediate_size=512, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        self.bert = BertForSequenceClassification(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits."""
        logits: torch.Tensor = self.bert(input_ids=tokens).logits
        return logits


def mlp() -> tuple[nn.Module, Batch]:
    """Returns an MLP and a batch."""
    layers = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    return nn.Sequential(*layers), (torch.randn(64, 64), torch.randint(0, 10, (64,)))


def bert() -> tuple[nn.Module, Batch]:
    """Returns a small BERT and a batch."""
    return Bert(), (torch.randint(0, 1000, (8, 64)), torch.randint(0, 2, (8,)))


def trainer_step(make: Callable[[], tuple[nn.Module, Batch]], every: str | int) -> Callable[[], object]:
    """Returns a step of a trainer."""
    model, batch = make()
    options = ORTTrainerOptions({"debug": {"verify_every": every}})
    trainer = ORTTrainer(model, "auto", optim.AdamWConfig(lr=1e-4), loss_fn=F.cross_entropy, options=options)
    return lambda: trainer.train_step(*batch)


def loop_step(
    make: Callable[[], tuple[nn.Module, Batch]], wrap: Callable[[nn.Module], nn.Module]
) -> Callable[[], None]:
    """Returns a step of a loop in PyTorch."""
    model, (x, label) = make()
    optimizer, model = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), wrap(model)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), label).backward()
        optimizer.step()

    return step


def milliseconds(step: Callable[[], object], count: int) -> float:
    """Returns the mean processor time of a step."""
    start = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - start) / count * 1e3


def main() -> None:
    """Prints a table."""
    torch.set_num_threads(1)
    columns = "eager PyTorch", *(f"{face}, {every}" for face in ("trainer", "`ORTModule`") for every in EVERY)
    print(f"| one thread, ms a step | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name, make, count in (("MLP", mlp, 500), ("BERT, 2 layers", bert, 100)):
        steps = [
            loop_step(make, lambda model: model),
            *(trainer_step(make, every) for every in EVERY),
            *(
                loop_step(make, functools.partial(ORTModule, options={"debug": {"verify_every": every}}))
                for every in EVERY
            ),
        ]
        for step in steps:
            milliseconds(step, BEFORE)
        turns = [[milliseconds(step, count) for step in steps] for _ in range(TURNS)]
        medians = [statistics.median(times) for times in zip(*turns, strict=True)]
        print(f"| {name} | {' | '.join(f'{median:.2f}' for median in medians)} |")


if __name__ == "__main__":
    main()
