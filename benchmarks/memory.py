"""Memory and time of training, by the options that compute values again or keep less, and of eager PyTorch.

Each setting trains the same model in a process of its own, one after the other: large models don't fit into memory
twice. Peaks are those of the process over the steps after the first, and over a save; they are read from /proc, so this
needs Linux. The losses must equal those of the first setting to 1e-5 (1e-3 with moments in bfloat16).

    python benchmarks/memory.py                    # an encoder with dropout
    python benchmarks/memory.py --model gpt2       # 355 million parameters; six minutes
    python benchmarks/memory.py --model llama      # 1.1 billion parameters; ten minutes, 18 GB of memory
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turns import memory
from versions import ENGINES, versions

CHECKPOINT, EAGER = "torch.utils.checkpoint", "eager"
SETTINGS: dict[str, dict[str, Any]] = {
    EAGER: {},
    f"{EAGER}, {CHECKPOINT}": {},
    "ort_trainer": {},
    "attn_dropout_recompute": {"graph_transformer": {"attn_dropout_recompute": True}},
    "gelu_recompute": {"graph_transformer": {"gelu_recompute": True}},
    "attention dropout and GELU": {"graph_transformer": {"attn_dropout_recompute": True, "gelu_recompute": True}},
    "transformer_layer_recompute": {"graph_transformer": {"transformer_layer_recompute": True}},
    "memory_efficient_gradient": {"utils": {"memory_efficient_gradient": True}},
    CHECKPOINT: {},
    "memory_efficient_gradient, moments in bfloat16": {
        "utils": {"memory_efficient_gradient": True, "moments": "bfloat16"}
    },
}
ENCODER = tuple(name for name in SETTINGS if EAGER not in name and "moments" not in name)
LARGE = tuple(name for name in SETTINGS if "dropout" not in name and name not in ("gelu_recompute", CHECKPOINT))


def encoder(checkpointed: bool) -> Any:
    """Returns six layers of width 256 with dropout, and a batch of 16 x 128."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.1, "gelu", batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
            self.head = nn.Linear(256, 2)

        def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            for layer in self.encoder.layers:
                x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            return nn.functional.cross_entropy(self.head(x[:, 0]), label)

    return Encoder(), (torch.randn(16, 128, 256), torch.randint(0, 2, (16,)))


def language_model(config: Any, texts: int, length: int, checkpointed: bool) -> Any:
    """Returns a language model of transformers with its loss, and a batch."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(ids, labels=ids).loss

    return WithLoss(), (torch.randint(0, config.vocab_size, (texts, length)),)


def gpt2(checkpointed: bool) -> Any:
    from transformers import GPT2Config

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False, **dropout)
    return language_model(config, 2, 512, checkpointed)


def llama(checkpointed: bool) -> Any:
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        use_cache=False,
    )
    return language_model(config, 1, 256, checkpointed)


MODELS: dict[str, tuple[str, Callable[[bool], Any], tuple[str, ...]]] = {
    "encoder": ("six layers of width 256 with dropout 0.1, batches of 16 x 128", encoder, ENCODER),
    "gpt2": ("GPT-2 of 355 million parameters, 2 x 512 tokens, AdamW", gpt2, LARGE),
    "llama": ("Llama of 1.1 billion parameters, 1 x 256 tokens, AdamW", llama, LARGE),
}


def eager(module: Any) -> Callable[..., Any]:
    """Returns a training step of PyTorch."""
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step(*batch: Any) -> Any:
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def train(name: str, setting: str, steps: int) -> dict[str, Any]:
    """Trains in this process; returns losses, seconds and MB."""
    import torch

    from ort_trainer import ORTTrainer, ORTTrainerOptions, optim

    torch.manual_seed(0)
    module, batch = MODELS[name][1](CHECKPOINT in setting)
    if setting.startswith(EAGER):
        trainer, step = None, eager(module)
    else:
        options: Any = {**SETTINGS[setting], "utils": {"grad_norm_clip": False, **SETTINGS[setting].get("utils", {})}}
        trainer = ORTTrainer(module, "auto", optim.AdamWConfig(lr=1e-4), options=ORTTrainerOptions(options))
        step = trainer.train_step
    losses, times = [], []
    begin = time.perf_counter()
    losses.append(float(step(*batch)))
    first = time.perf_counter() - begin
    memory("VmRSS", reset=True)
    for _ in range(steps):
        begin = time.perf_counter()
        losses.append(float(step(*batch)))
        times.append(time.perf_counter() - begin)
    found = {"losses": losses, "first": first, "time": statistics.median(times), "peak": memory("VmHWM"), "save": None}
    if trainer is not None:
        memory("VmRSS", reset=True)
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(Path(folder) / "checkpoint")
        found["save"] = memory("VmHWM")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="encoder")
    parser.add_argument("--steps", type=int, default=4, help="beside the first")
    parser.add_argument("--setting", choices=list(SETTINGS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.setting:
        print(json.dumps(train(arguments.model, arguments.setting, arguments.steps)))
        return
    title, _, settings = MODELS[arguments.model]
    print(
        f"Python {platform.python_version()}, {versions(['torch', *ENGINES, 'transformers'])}; {os.cpu_count()} cores"
    )
    print(f"{title}\n")
    columns = (
        "peak memory, MB",
        "against the first",
        "peak of a save, MB",
        "a step, s",
        "against the first",
        "first start, s",
    )
    print(f"| setting | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
    base: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        for setting in settings:
            command = [sys.executable, __file__, *sys.argv[1:], "--setting", setting]
            environment = {**os.environ, "ORT_TRAINER_CACHE": cache}
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            found = json.loads(done.stdout.splitlines()[-1])
            base = base or found
            near = 1e-3 if "bfloat16" in setting else 1e-5
            if any(abs(ours / theirs - 1) > near for ours, theirs in zip(found["losses"], base["losses"], strict=True)):
                sys.exit(f"{setting}: the losses are {found['losses']} instead of {base['losses']}")
            save = "-" if found["save"] is None else f"{found['save']:.0f}"
            print(
                f"| {setting} | {found['peak']:.0f} | {found['peak'] / base['peak']:.2f} | {save} "
                f"| {found['time']:.2f} | {found['time'] / base['time']:.2f} | {found['first']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
