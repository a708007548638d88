"""Full training steps (forward, backward, AdamW) of ORTTrainer against PyTorch eager and torch.compile.

Each contender runs in a separate process, because two runtimes' thread pools disturb each other. The processes take
turns, because the speed of a shared machine changes: a short block of steps each, over several rounds; while one
computes, the others sleep on a pipe. Reported are the median step over all blocks, the seconds from the start of the
contender (imports done, model not yet made) to the end of its first step, and the peak resident memory.

    python benchmarks/train_step.py                 # both models, all contenders
    python benchmarks/train_step.py --models mlp --rounds 5
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

CONTENDERS = ("eager", "compile", "ort_trainer")
STEPS = {"mlp": 200, "encoder": 8}
Step = Callable[[], Any]


def make_model(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns model, one batch and model description."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "mlp":

        class MLP(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc1, self.fc2 = nn.Linear(784, 512), nn.Linear(512, 10)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.fc2(torch.relu(self.fc1(x)))

        return (
            MLP(),
            (torch.randn(64, 784), torch.randint(0, 10, (64,))),
            {"inputs": [("x", ["batch", 784]), ("label", ["batch"])], "outputs": [("loss", [], True)]},
        )

    class Encoder(nn.Module):
        """Shaped like a small BERT: 4 layers, hidden size 256, dropout 0.1."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(5000, 256), nn.Embedding(512, 256)
            self.norm, self.dropout = nn.LayerNorm(256), nn.Dropout(0.1)
            layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.1, activation="gelu", batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.head = nn.Linear(256, 2)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(tokens.shape[1])
            hidden = self.dropout(self.norm(self.tokens(tokens) + self.positions(positions)))
            return self.head(self.encoder(hidden)[:, 0])

    return (
        Encoder(),
        (torch.randint(0, 5000, (8, 64)), torch.randint(0, 2, (8,))),
        {"inputs": [("tokens", ["batch", "length"]), ("label", ["batch"])], "outputs": [("loss", [], True)]},
    )


def make_step(contender: str, name: str, dropout: bool) -> Step:
    """Returns the function that does one training step."""
    import torch
    from torch.nn import functional as F

    model, batch, description = make_model(name)
    if not dropout:
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if isinstance(module, torch.nn.MultiheadAttention):
                module.dropout = 0.0
    if contender == "ort_trainer":
        from ort_trainer import ORTTrainer, ORTTrainerOptions, optim

        config = optim.AdamConfig(lr=1e-3, lambda_coef=0.01)
        # The others do not clip either.
        options = ORTTrainerOptions({"utils": {"grad_norm_clip": False}})
        trainer = ORTTrainer(model, description, config, loss_fn=F.cross_entropy, options=options)
        return lambda: trainer.train_step(*batch)

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)

    def loss_of(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), label)

    compute = torch.compile(loss_of) if contender == "compile" else loss_of

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = compute(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def serve(contender: str, name: str, dropout: bool) -> None:
    """A contender's process: reads how many steps to do from stdin, answers with their times."""
    import torch  # noqa: F401 - imports are not part of the start-up that is measured

    if contender == "ort_trainer":
        import ort_trainer  # noqa: F401
    start = time.perf_counter()
    step = make_step(contender, name, dropout)
    step()
    print(json.dumps({"startup": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(json.dumps({"times": times, "peak": peak, "child_peak": children}), flush=True)


def measure(name: str, rounds: int, dropout: bool) -> dict[str, dict[str, float]]:
    """Returns the figures of every contender for one model."""
    processes, found = {}, {}
    for contender in CONTENDERS:
        command = [
            sys.executable,
            __file__,
            "--serve",
            contender,
            "--models",
            name,
            *(["--dropout"] if dropout else []),
        ]
        processes[contender] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        found[contender] = {**_answer(processes[contender], contender), "times": []}
    for number in range(rounds + 1):
        for contender, process in processes.items():
            assert process.stdin is not None
            process.stdin.write(f"{STEPS[name]}\n")
            process.stdin.flush()
            answer = _answer(process, contender)
            times = answer.pop("times")
            found[contender].update(answer)
            if number > 0:  # the first round warms up
                found[contender]["times"] += times
    for process in processes.values():
        process.stdin.close()
        process.wait()
    return found


def _answer(process: subprocess.Popen[str], contender: str) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{contender} died with status {process.wait()}")
    return json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "encoder"], choices=list(STEPS))
    parser.add_argument("--rounds", type=int, default=8, help="blocks of steps of every contender")
    parser.add_argument("--dropout", action="store_true", help="with --serve: keep the model's dropout")
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.models[0], arguments.dropout)
        return
    versions = ", ".join(
        f"{name} {_version(name)}" for name in ("torch", "onnxruntime-training", "onnxruntime", "onnxscript")
    )
    print(f"Python {platform.python_version()}, {versions}; {os.cpu_count()} cores\n")
    print("| model | contender | median step, ms | against eager | start-up, s | peak memory, MB | against eager |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.models:
        for dropout in (False, True) if name == "encoder" else (False,):
            results = measure(name, arguments.rounds, dropout)
            label = f"{name}, dropout 0.1" if dropout else name
            eager = results["eager"]
            for contender, result in results.items():
                median, reference = (statistics.median(r["times"]) * 1e3 for r in (result, eager))
                # An export runs in a child process; what counts is the larger of the two.
                peak, eager_peak = (max(r["peak"], r["child_peak"]) for r in (result, eager))
                print(
                    f"| {label} | {contender} | {median:.2f} | {median / reference:.2f} | {result['startup']:.1f} | "
                    f"{peak:.0f} | {peak / eager_peak:.2f} |",
                    flush=True,
                )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
