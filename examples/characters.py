"""Trains a small language model on the standard library's own source, here and in plain PyTorch, in turns.

Run ``make demo``, or ``python examples/characters.py --out FOLDER``: it takes a minute, and needs no download. The
model has rotary positions, RMS norms and gated layers, as today's language models have. Both trainings begin with the
same weights and get the same batches. It writes a checkpoint, an ONNX file, whose scores in onnxruntime are compared,
and a picture of both loss curves and the times of both steps.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from ort_trainer import ORTTrainer, optim

matplotlib.use("Agg")
from matplotlib import pyplot as plt

CHARACTERS = "".join(map(chr, (9, 10, *range(32, 127))))
WIDTH, HEADS, LAYERS, LENGTH, BATCH = 128, 4, 2, 64, 16
LEARNING_RATE = 3e-3
TURN = 20  # steps of one training, before it is the other's turn


class RMSNorm(nn.Module):
    """Divides by the root of the mean square (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns values of the same shape."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """Attention with rotary positions, and a gated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm() for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Returns values of the same shape, (batch, length, WIDTH)."""
        batch, length, _ = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = rotated(parts[0], cos, sin), rotated(parts[1], cos, sin), parts[2]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns pairs of values by angles that grow with the position (Su et al., "RoFormer", 2021)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class LanguageModel(nn.Module):
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = RMSNorm(), nn.Linear(WIDTH, len(CHARACTERS), bias=False)
        pairs = torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS)
        angles = torch.arange(LENGTH)[:, None] / 10000**pairs
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns logits (batch, length, characters) for ids (batch, length), with at most LENGTH characters."""
        x, length = self.embedding(ids), ids.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))


def loss_fn(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy of the characters that follow."""
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ids of the characters in files of the standard library, and in others, which are held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    train, test = (
        "".join(file.read_text(encoding="utf-8", errors="ignore") for file in part)
        for part in (files[1::2], files[::10])
    )
    return ids_of(train), ids_of(test)


def ids_of(text: str) -> torch.Tensor:
    """Returns the places of a text's characters in CHARACTERS; it leaves out others."""
    places = {character: at for at, character in enumerate(CHARACTERS)}
    return torch.tensor([places[character] for character in text if character in places])


def batch(ids: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns pieces of a text, and the same pieces one character later."""
    starts = torch.randint(len(ids) - LENGTH, (BATCH, 1), generator=generator)
    pieces = ids[starts + torch.arange(LENGTH + 1)]
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


@dataclass
class Training:
    """A training, with the losses and the seconds of its steps."""

    step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self, ids: torch.Tensor, following: torch.Tensor) -> None:
        """Trains on a batch."""
        start = time.perf_counter()
        self.losses.append(self.step(ids, following).item())
        self.seconds.append(time.perf_counter() - start)

    @property
    def median(self) -> float:
        """The median of the steps after the first turn, in ms."""
        return 1e3 * statistics.median(self.seconds[TURN:] or self.seconds)


def plain_step(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns a step of PyTorch's own loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(ids: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model(ids), following)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@torch.no_grad()
def written_by(model: nn.Module, prompt: str, count: int = 200) -> str:
    """Returns a prompt and what the model writes after it."""
    text = prompt
    for _ in range(count):
        logits = model.eval()(ids_of(text[-LENGTH:])[None])[0, -1]
        text += CHARACTERS[int(torch.multinomial((logits / 0.6).softmax(-1), 1))]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/characters"), help="folder of the results")
    parser.add_argument("--steps", type=int, default=600, help="batches to train with")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    train, test = texts()
    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = LanguageModel()
    twin = copy.deepcopy(model)

    trainer = ORTTrainer(model, "auto", optim.AdamWConfig(lr=LEARNING_RATE), loss_fn=loss_fn)
    start = time.perf_counter()
    trainer.prepare(batch(train, torch.Generator().manual_seed(1)))
    export = time.perf_counter() - start
    ours, plain = Training(lambda *values: trainer.train_step(*values)[0]), Training(plain_step(twin))
    for _ in tqdm(range(max(1, arguments.steps // TURN)), unit_scale=TURN, unit="step"):
        data = [batch(train, draw) for _ in range(TURN)]
        for training in (ours, plain):
            for values in data:
                training.run(*values)

    held_out = [batch(test, draw) for _ in range(20)]
    right = [(trainer.predict(ids).argmax(-1) == following).float().mean().item() for ids, following in held_out]
    trainer.save_checkpoint(out / "characters.ortckpt", overwrite=True)
    trainer.export_for_inference(out / "characters.onnx")
    session = onnxruntime.InferenceSession(str(out / "characters.onnx"), providers=["CPUExecutionProvider"])
    ids = held_out[0][0]
    (scores,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
    plot(ours, plain, out / "characters.png")

    print(written_by(model, "def read"))
    first = np.abs(np.divide(ours.losses, plain.losses) - 1)[:20].max()
    print(f"\n{'':12}{'loss, last turn':>16}{'a step, ms':>12}")
    for name, training in (("ORTTrainer", ours), ("PyTorch", plain)):
        print(f"{name:12}{statistics.fmean(training.losses[-TURN:]):>16.3f}{training.median:>12.1f}")
    print(f"\na step is {plain.median / ours.median:.2f} times as fast as PyTorch's, after {export:.1f} s of export")
    print(f"losses of the first 20 steps differ by a relative {first:.0e}")
    print(f"{statistics.fmean(right):.1%} of the characters of other files are predicted")
    difference = np.abs(scores - trainer.predict(ids).numpy()).max() / np.abs(scores).max()
    print(f"scores of characters.onnx in onnxruntime differ from the trainer's by a relative {difference:.0e}")
    print("written: " + ", ".join(str(out / f"characters.{kind}") for kind in ("ortckpt", "onnx", "png")))


def plot(ours: Training, plain: Training, path: Path) -> None:
    """Draws both loss curves, and the times of all steps."""
    figure, (curves, times) = plt.subplots(1, 2, figsize=(10, 4))
    curves.plot(ours.losses, label="ORTTrainer", linewidth=3, alpha=0.5)
    curves.plot(plain.losses, label="PyTorch", linewidth=1, color="black")
    curves.set(xlabel="step", ylabel="training loss", title="The next character of Python's own source")
    curves.legend()
    times.boxplot([[1e3 * seconds for seconds in each.seconds[TURN:]] for each in (ours, plain)], showfliers=False)
    times.set_xticks([1, 2], ["ORTTrainer", "PyTorch"])
    times.set(ylabel="milliseconds", ylim=(0, None), title="A training step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
