"""Start-up: the import time of the package without torch's, and the time to the first training step.

Every figure is the best of several fresh processes, because other work on the machine only adds time. The first start
finds an empty export cache; the second one uses what the first has left. "First step" is the time from the finished
imports to the end of the first step: model, trainer, capture, graph, session and the step itself.

    python benchmarks/start_up.py
    python benchmarks/start_up.py --models mlp --repeat 5
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from typing import Any

from versions import ENGINES, versions

MODELS = ("mlp", "bert-2", "bert-4", "bert-base", "gpt2-base")


def train_one_step(name: str) -> Any:
    """Makes a trainer and runs a step."""
    import torch

    from ort_trainer import ORTTrainer, optim

    config = optim.AdamConfig(lr=1e-3)
    if name not in ("bert-2", "bert-4"):
        from step_models import make_task

        task = make_task(name)
        return ORTTrainer(task.model, task.description, config, loss_fn=task.loss_fn).train_step(*task.batch)
    from transformers import BertConfig, BertForSequenceClassification

    layers, width = (2, 128) if name == "bert-2" else (4, 256)
    settings = BertConfig(
        vocab_size=5000,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        num_labels=3,
    )
    ids = torch.randint(5000, (8, 64))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 3}
    return ORTTrainer(BertForSequenceClassification(settings), "auto", config).train_step(**batch)


def start(name: str) -> None:
    """Runs one process: prints the seconds of the import beyond torch's, and of the first step."""
    import torch  # noqa: F401

    begin = time.perf_counter()
    from ort_trainer import ORTTrainer  # noqa: F401

    imported = time.perf_counter() - begin
    if name != "mlp":
        from transformers import BertForSequenceClassification, GPT2LMHeadModel  # noqa: F401 - no part of the first step
    begin = time.perf_counter()
    train_one_step(name)
    print(json.dumps({"import": imported, "step": time.perf_counter() - begin}))


def measured(name: str, cache: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--start", name]
    environment = {**os.environ, "ORT_TRAINER_CACHE": cache, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--repeat", type=int, default=3, help="processes a figure")
    parser.add_argument("--start", choices=MODELS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start:
        start(arguments.start)
        return
    packages = ("torch", *ENGINES, "onnxscript", "transformers")
    print(f"Python {platform.python_version()}, {versions(packages)}; {os.cpu_count()} cores\n")
    print("| model | first start, s | second start, s | import above torch, s |")
    print("|---|---|---|---|")
    for name in arguments.models:
        first, second = [], []
        for _ in range(arguments.repeat):
            with tempfile.TemporaryDirectory() as cache:
                first.append(measured(name, cache))
                second.append(measured(name, cache))
        best = [min(found["step"] for found in runs) for runs in (first, second)]
        imported = min(found["import"] for found in (*first, *second))
        print(f"| {name} | {best[0]:.1f} | {best[1]:.1f} | {imported:.2f} |", flush=True)


if __name__ == "__main__":
    main()
