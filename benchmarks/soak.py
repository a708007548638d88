"""A run of 100,000 steps: do memory, open files, threads and the time of a step stay the same?

Batches have 900 different shapes, and between steps happens what happens in long runs: evaluations, checkpoints and
going back to them, new rates, frozen layers, changed settings, wrong batches, Ctrl-C. The same model steps in eager
PyTorch beside, because machines change their speed by the minute: a step's time is given as a ratio.

    python benchmarks/soak.py                        # ten minutes; --steps 1000000 for a day
    python benchmarks/soak.py --write                # the picture and the table in docs/reference/benchmarks.md
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sections import write_section
from torch import nn
from versions import versions

from ort_trainer import CheckpointManager, ORTTrainer, optim

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
PICTURE = ROOT / "docs" / "images" / "soak.svg"
TOKENS, BLOCK = 200, 100
"""Size of the vocabulary, and steps from one measurement to the next."""


class Classifier(nn.Module):
    """Classifies texts of any length; reads a number that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(TOKENS, 64), nn.LayerNorm(64)
        self.hidden, self.head = nn.Linear(64, 128), nn.Linear(128, 10)
        self.gain = 1.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits, (batch, 10), of texts, (batch, length)."""
        mean = self.norm(self.embedding(tokens)).mean(1)
        return self.head(F.gelu(self.hidden(mean))) * self.gain


class Batches:
    """Batches of 900 different shapes. (Ctrl-C would end a generator.)"""

    def __init__(self, seed: int) -> None:
        self._draw, self._generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the next batch."""
        rows, length = self._draw.randint(3, 32), self._draw.randint(4, 33)
        tokens = torch.randint(TOKENS, (rows, length), generator=self._generator)
        return tokens, torch.randint(10, (rows,), generator=self._generator)


def refused(step: Callable[[], object]) -> None:
    """Runs a step that must be an error."""
    try:
        step()
    except (TypeError, ValueError, IndexError, RuntimeError):
        return
    raise AssertionError("a wrong batch was taken")


class Run:
    """The trainer, and what happens to it."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = Classifier()
        self.trainer = ORTTrainer(
            self.model,
            "auto",
            optim.AdamWConfig(lr=1e-3),
            loss_fn=F.cross_entropy,
            options={"batch": {"gradient_accumulation_steps": 2}, "utils": {"max_grad_norm": 1.0}},
        )
        self.manager = CheckpointManager(folder, keep_last=2)
        self.batches = Batches(1)

    def step(self) -> float:
        """Trains; returns the time."""
        batch = self.batches.next()
        start = time.perf_counter()
        self.trainer.train_step(*batch)
        return time.perf_counter() - start

    def disturb(self, number: int) -> None:
        """Does what comes between two blocks of steps."""
        x, y = self.batches.next()
        trainer = self.trainer
        trainer.eval_step(x, y)
        trainer.predict(x)
        refused(lambda: trainer.train_step(x.float(), y))
        refused(lambda: trainer.train_step(x, y + 10))
        refused(lambda: trainer.train_step(x[:2], y))
        self.model.gain = 1.0 + (number % 7) / 10
        trainer.optim_config.lr = 1e-3 / (1 + number % 5)
        if number % 5 == 0:
            self.model.embedding.requires_grad_(number % 10 == 0)
        if number % 10 == 0:
            self.manager.save(trainer)
        if number % 50 == 0:
            self.manager.resume(trainer)
        if number % 7 == 0:
            self.interrupt()

    def interrupt(self) -> None:
        """Presses Ctrl-C in a step."""
        timer = threading.Timer(0.0005, signal.raise_signal, [signal.SIGINT])
        try:
            timer.start()
            for _ in range(100):
                self.step()
            timer.join()
        except KeyboardInterrupt:
            pass


def eager() -> Callable[[], float]:
    """Returns a step of the same model in PyTorch, which returns its time."""
    torch.manual_seed(0)
    model, given = Classifier(), Batches(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        x, y = given.next()
        start = time.perf_counter()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step


def measured(run: Run, steps: int) -> list[dict[str, float]]:
    """Returns a row per block."""
    reference, rows = eager(), []
    for number in range(1, steps // BLOCK + 1):
        times = [(run.step(), reference()) for _ in range(BLOCK)]
        ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
        run.disturb(number)
        gc.collect()
        rows.append(
            {
                "steps": number * BLOCK,
                "memory": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
                "files": len(list(Path("/proc/self/fd").iterdir())),
                "threads": len(list(Path("/proc/self/task").iterdir())),
                "objects": len(gc.get_objects()),
                "ratio": ours / theirs,
                "milliseconds": ours * 1e3,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> tuple[str, bool]:
    """Returns the means of the second and the last tenth, and whether nothing has grown."""
    tenth = len(rows) // 10
    lines, flat = ["| | second tenth | last tenth |", "| --- | --- | --- |"], True
    for key, name, digits, limit in (
        ("memory", "resident memory, MB", 1, 1.02),
        ("files", "open files", 1, 1.0),
        ("threads", "threads", 1, 1.0),
        ("objects", "Python objects", 0, 1.01),
        ("ratio", "time of a step / of PyTorch's", 3, 1.02),
        ("milliseconds", "time of a step, ms", 3, 10),
    ):
        early, late = (statistics.median(r[key] for r in part) for part in (rows[tenth : 2 * tenth], rows[-tenth:]))
        flat &= late <= early * limit
        lines.append(f"| {name} | {early:,.{digits}f} | {late:,.{digits}f} |")
    return "\n".join(lines), flat


def draw(rows: list[dict[str, Any]]) -> None:
    """Writes the picture."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "soak"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(7, 6), sharex=True)
    for axis, key, name in zip(
        axes, ("memory", "ratio", "files"), ("memory, MB", "time / PyTorch's", "open files"), strict=True
    ):
        axis.plot([row["steps"] for row in rows], [row[key] for row in rows], linewidth=0.8)
        axis.set_ylabel(name)
        axis.set_ylim(0, 1.3 * max(row[key] for row in rows))
    axes[-1].set_xlabel("steps")
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> int:
    """Returns 1 if something has grown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--write", action="store_true", help="write the picture and the table")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Run(Path(folder)), given.steps)
    text, flat = table(rows)
    print(text)
    if given.write:
        draw(rows)
        write_section(PAGE, "soak", f"{given.steps:,} steps. {versions(('torch',))}\n\n{text}")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
