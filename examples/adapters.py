"""Tunes a small language model to another style with LoRA on a base of 8 bits, and serves the adapter in ONNX Runtime.

A model of characters learns Python from the standard library's source code. Its weights are rounded to 8 bits, and an
adapter beside them learns the English of Python's reference manual. ONNX Runtime, without PyTorch, then writes Python
with the base, and English with the base and the adapter.

    python examples/adapters.py --out out/adapters
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn
from torch.nn import functional as F

from ort_trainer import ORTTrainer, optim, quantize
from ort_trainer.adapters import LoRA, add_adapter, export_adapter

CHARACTERS = 128  # ASCII
WIDTH, LAYERS, HEADS, TIME = 128, 3, 4, 64
BATCH = 16
RANK = 4
SOURCES = ("argparse", "ast", "dataclasses", "difflib", "doctest", "inspect", "subprocess", "tarfile", "typing")


@dataclass(frozen=True)
class Result:
    """Losses on unseen text, in nats for each character, sizes in bytes, and what the served models wrote."""

    english_before: float
    english_after: float
    served: float
    base_bytes: int
    adapter_bytes: int
    samples: dict[str, str]


class Block(nn.Module):
    """A layer of a transformer that sees only earlier characters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the activations [batch, time, WIDTH] of the next layer."""
        batch, time, _ = x.shape
        h = self.norm(x)
        q, k, v = (
            layer(h).view(batch, time, HEADS, -1).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, WIDTH)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Writer(nn.Module):
    """A language model of characters."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(TIME, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns scores [batch, time, CHARACTERS] of the characters that follow."""
        x = self.characters(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), label.flatten())


def encoded(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode("ascii", "replace")))


def texts() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns for each style the characters to train on, and others."""
    library = Path(sysconfig.get_path("stdlib"))
    python = "\n".join((library / f"{name}.py").read_text(encoding="utf-8") for name in SOURCES)
    english = "\n".join(topics[name] for name in sorted(topics))
    return {name: _parted(encoded(text)) for name, text in (("python", python), ("english", english))}


def _parted(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    held_out = len(text) // 10
    return text[:-held_out], text[-held_out:]


def batches(text: torch.Tensor, count: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields characters [BATCH, TIME], and those that follow them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(text) - TIME, (BATCH, 1), generator=generator)
        pieces = text[starts + torch.arange(TIME + 1)]
        yield pieces[:, :-1], pieces[:, 1:]


def train(trainer: ORTTrainer, text: torch.Tensor, steps: int, what: str) -> None:
    begun = time.perf_counter()
    loss = torch.zeros(())
    for step, batch in enumerate(batches(text, steps, seed=0), 1):
        loss = trainer.train_step(*batch)[0]
        if step % 100 == 0 or step == steps:
            print(f"{what}: step {step}, loss {loss.item():.3f}, {time.perf_counter() - begun:.0f} s", flush=True)


def evaluate(trainer: ORTTrainer, text: torch.Tensor) -> float:
    losses = [trainer.eval_step(*batch)[0].item() for batch in batches(text, 10, seed=1)]
    return sum(losses) / len(losses)


class Served:
    """The base in ONNX Runtime, with or without an adapter."""

    def __init__(self, base: Path, adapter: Path | None = None) -> None:
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(base), settings, providers=["CPUExecutionProvider"])
        self._options = onnxruntime.RunOptions()
        if adapter is not None:
            self._adapter = onnxruntime.LoraAdapter()
            self._adapter.Load(str(adapter))
            self._options.add_active_adapter(self._adapter)

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Returns what the model computes."""
        return self._session.run(None, {"ids": ids}, self._options)[0]

    def loss(self, text: torch.Tensor) -> float:
        """Returns the loss for each character, on the batches of :func:`evaluate`."""
        pairs = [(torch.from_numpy(self.logits(ids.numpy())), label) for ids, label in batches(text, 10, seed=1)]
        return sum(loss_of(*pair).item() for pair in pairs) / len(pairs)

    def write(self, prompt: str, length: int = 200) -> str:
        """Returns the prompt and the model's continuation."""
        generator = np.random.default_rng(0)
        ids = list(prompt.encode("ascii"))
        for _ in range(length):
            logits = self.logits(np.array([ids[-TIME:]]))[0, -1] / 0.6
            weights = np.exp(logits - logits.max())
            ids.append(int(generator.choice(CHARACTERS, p=weights / weights.sum())))
        return bytes(ids).decode("ascii")


def main(arguments: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/adapters"), help="folder of the results")
    parser.add_argument("--steps", type=int, default=500, help="batches for each of the two styles")
    options = parser.parse_args(arguments)
    if not hasattr(onnxruntime, "LoraAdapter"):
        raise SystemExit(
            f"onnxruntime {onnxruntime.__version__} can't serve adapters: this example needs 1.20 or newer. In a "
            "clone, 'make demo-adapters' installs it; elsewhere, install 'ort_trainer[stock]' in another environment."
        )
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    data = texts()

    torch.manual_seed(0)
    base = ORTTrainer(Writer(), "auto", optim.AdamWConfig(lr=2e-3), loss_fn=loss_of)
    train(base, data["python"][0], options.steps, "base, Python")
    base.export_for_inference(out / "float32.onnx")

    quantized = quantize(out / "float32.onnx", "int8")
    onnx.save(quantized, out / "int8.onnx")
    model = add_adapter(quantized, LoRA(rank=RANK, targets="linear"))
    trainer = ORTTrainer(model, "auto", optim.AdamWConfig(lr=4e-3), loss_fn=loss_of)
    trainer.prepare(next(batches(data["english"][0], 1, seed=0)))
    before = evaluate(trainer, data["english"][1])
    train(trainer, data["english"][0], options.steps, "adapter, English")
    after = evaluate(trainer, data["english"][1])
    export_adapter(trainer, out / "english.onnx_adapter", out / "base.onnx")

    base_file, adapter_file = out / "base.onnx", out / "english.onnx_adapter"
    served = {"base": Served(base_file), "base and adapter": Served(base_file, adapter_file)}
    result = Result(
        english_before=before,
        english_after=after,
        served=served["base and adapter"].loss(data["english"][1]),
        base_bytes=base_file.stat().st_size,
        adapter_bytes=adapter_file.stat().st_size,
        samples={name: model.write("The ") for name, model in served.items()},
    )
    print(f"\nloss on unseen English: {before:.3f} before, {after:.3f} with the adapter")
    print(f"in ONNX Runtime {onnxruntime.__version__}, the base with the adapter has {result.served:.3f}")
    for path in (out / "float32.onnx", base_file, adapter_file):
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")
    for name, text in result.samples.items():
        print(f"\n--- {name}, in ONNX Runtime:\n{text}")
    return result


if __name__ == "__main__":
    main()
