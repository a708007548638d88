"""The memory saved and the time spent by the options that recompute forward values in the backward pass.

Each setting trains the same transformer encoder in a separate process. "Memory of a step" is the peak of the process
over the steps minus what it held before the first (weights, the loaded graph); the peak is read from /proc, so this
needs Linux. Time is processor time of all threads, which a busy machine affects least. The losses must equal those
without recomputation.

    python benchmarks/recompute.py
    python benchmarks/recompute.py --layers 12 --batch 8 --length 256
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

from turns import memory
from versions import ENGINES, versions

SETTINGS: dict[str, dict[str, Any]] = {
    "off": {},
    "attn_dropout_recompute": {"graph_transformer": {"attn_dropout_recompute": True}},
    "gelu_recompute": {"graph_transformer": {"gelu_recompute": True}},
    "attention dropout and GELU": {"graph_transformer": {"attn_dropout_recompute": True, "gelu_recompute": True}},
    "transformer_layer_recompute": {"graph_transformer": {"transformer_layer_recompute": True}},
    "memory_efficient_gradient": {"utils": {"memory_efficient_gradient": True}},
    "torch.utils.checkpoint": {},
}


def train(setting: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains in this process and returns losses, step times and memory."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    from ort_trainer import ORTTrainer, ORTTrainerOptions, optim

    width = arguments.width

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.1, "gelu", batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, arguments.layers, enable_nested_tensor=False)
            self.head = nn.Linear(width, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.encoder.layers:
                x = checkpoint(layer, x, use_reentrant=False) if setting == "torch.utils.checkpoint" else layer(x)
            return self.head(x[:, 0])

    torch.manual_seed(0)
    trainer = ORTTrainer(
        Encoder(),
        {"inputs": [("x", ["batch", "length", width]), ("label", ["batch"])], "outputs": [("loss", [], True)]},
        optim.SGDConfig(lr=0.01),
        loss_fn=nn.functional.cross_entropy,
        options=ORTTrainerOptions(SETTINGS[setting]),
    )
    batch = torch.randn(arguments.batch, arguments.length, width), torch.randint(0, 2, (arguments.batch,))
    trainer.prepare(batch)
    before = memory("VmRSS", reset=True)
    losses, times = [], []
    for _ in range(arguments.steps):
        start = time.process_time()
        losses.append(trainer.train_step(*batch).item())
        times.append(time.process_time() - start)
    return {"losses": losses, "time": statistics.median(times[1:]), "memory": memory("VmHWM") - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--setting", choices=list(SETTINGS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.setting:
        print(json.dumps(train(arguments.setting, arguments)))
        return
    print(f"Python {platform.python_version()}, {versions(['torch', *ENGINES])}; {os.cpu_count()} cores")
    print(f"{arguments.layers} layers of width {arguments.width}, batches of {arguments.batch} x {arguments.length}\n")
    print("| setting | memory of a step, MB | against off | processor time of a step, ms | against off |")
    print("|---|---|---|---|---|")
    off: dict[str, Any] = {}
    for setting in SETTINGS:
        command = [sys.executable, __file__, *sys.argv[1:], "--setting", setting]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        off = off or found
        if any(abs(ours / theirs - 1) > 1e-5 for ours, theirs in zip(found["losses"], off["losses"], strict=True)):
            sys.exit(f"{setting}: the losses are {found['losses']} instead of {off['losses']}")
        print(
            f"| {setting} | {found['memory']:.0f} | {found['memory'] / off['memory']:.2f} "
            f"| {found['time'] * 1e3:.0f} | {found['time'] / off['time']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
