"""Measures what it costs that ``debug.verify_every`` compares steps with PyTorch, for docs/limits.md.

    python benchmarks/verify.py

The contenders take turns, each in its own process (see turns.py) and one thread. Steps are measured after the first
hundred, of which "auto" compares many. The table has the medians of all steps. What "auto" compares later is rare, so
its cost is the part of the time that is above the median, beside that of "off".
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from turns import Contender, Result, Training, measure, serve
from versions import ENGINES, versions

from ort_trainer import ORTModule, ORTTrainer, ORTTrainerOptions, optim

ROUNDS = 5
EAGER, TRAINER, MODULE = "eager PyTorch", "trainer", "`ORTModule`"
CONTENDERS = (EAGER, *(f"{face}, {every}" for face in (TRAINER, MODULE) for every in ("off", "auto", "1")))
RATE = 1e-6  # a batch that is learnt has gradients of roundings, which are compared again
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


def training_of(row: str, contender: str) -> Training:
    """Returns the training of a contender."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, (x, label) = ROWS[row][0]()
    face, _, every = contender.partition(", ")
    options: Any = {"debug": {"verify_every": int(every) if every.isdigit() else every}}
    if face == TRAINER:
        config = optim.AdamWConfig(lr=RATE)
        trainer = ORTTrainer(model, "auto", config, loss_fn=F.cross_entropy, options=ORTTrainerOptions(options))
        return Training(lambda: trainer.train_step(x, label)[0], trainer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    if face == MODULE:
        model = ORTModule(model, options)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), label)
        loss.backward()
        optimizer.step()
        return loss

    return Training(step)


ROWS: dict[str, tuple[Callable[[], tuple[nn.Module, Batch]], int]] = {
    "MLP, 64 x 64 to 256 to 256 to 10": (mlp, 500),
    "BERT, 2 layers of width 128, 8 x 64 tokens": (bert, 110),
}
"""Models, and the number of steps in a block."""


def above_the_median(result: Result) -> float:
    """Returns the percentage of the time that steps take beyond the median."""
    return 100 * (1 - len(result.times) * result.median / sum(result.times))


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contender", nargs=2)
    arguments = parser.parse_args()
    if arguments.contender:
        serve(lambda: training_of(*arguments.contender))
        return
    print(versions(["torch", *ENGINES]))
    print(f"| ms a step | {' | '.join(CONTENDERS)} |\n|---|{'---|' * len(CONTENDERS)}")
    costs = []
    for row, (_, steps) in ROWS.items():
        commands = {c: Contender((sys.executable, __file__, "--contender", row, c)) for c in CONTENDERS}
        results, _ = measure(commands, steps, ROUNDS, starts=1, needed=EAGER)
        print(
            f"| {row} | {' | '.join(f'{statistics.median(result.times) * 1e3:.2f}' for result in results.values())} |"
        )
        off, auto = ([above_the_median(results[f"{face}, {x}"]) for face in (TRAINER, MODULE)] for x in ("off", "auto"))
        costs += [
            f"{row}: {face} {o:.1f} %, auto {a:.1f} %" for face, o, a in zip((TRAINER, MODULE), off, auto, strict=True)
        ]
    print("\nAbove the median: off, and auto", *costs, sep="\n- ")


if __name__ == "__main__":
    main()
