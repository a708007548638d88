"""Training steps on a GPU: this package, also with compiled loops, eager PyTorch, and torch.compile in two modes.

All have fused AdamW. Each row has a process of its own, in which the contenders take turns; CUDA events measure blocks
of steps. The processes set up at the same time, and measure one after another. The memory of each contender is measured
in a further process. ``make gpu`` runs this after the tests.

    python benchmarks/gpu.py --out results.json                  # every row that fits into --seconds
    python benchmarks/gpu.py --rows small-gpt2,bert-base --precisions bf16
    python benchmarks/gpu.py --write results.json                # writes docs/gpu.md; needs no GPU
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sections import write_section

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
CONTENDERS = ("ort_trainer", "compiled", "eager", "compile", "reduce-overhead")
# Row -> how many times the batch of the model in step_models.py.
ROWS = {"small-gpt2": 4, "bert-base": 4, "mlp": 1, "gpt2-base": 8, "resnet50": 8, "dlrm": 4, "llama-300m": 4}
_ROUNDS, _SECONDS_OF_BLOCK = 7, 0.15


def _task(row: str) -> Any:
    """Returns the model of a row and its batch, on the GPU."""
    import torch
    from step_models import MODELS, Task, make_task

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    if row in MODELS:
        task = make_task(row)
    else:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=16000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=20, num_attention_heads=16
        )
        template = make_task("llama")
        task = Task(type(template.model)(LlamaForCausalLM(config)), template.batch, template.description, None)
    batch = tuple(torch.cat([value] * ROWS[row]).cuda() for value in task.batch)
    return replace(task, model=task.model.cuda(), batch=batch)


def _step(contender: str, task: Any, precision: str) -> Callable[[], Any]:
    """Returns a function that does one step of training."""
    import torch

    if contender in CONTENDERS[:2]:
        from ort_trainer import ORTTrainer, optim

        options: Any = {"utils": {"kernels": "pytorch" if contender == "ort_trainer" else contender}}
        if precision != "fp32":
            options["mixed_precision"] = {"enabled": True, "dtype": "bfloat16"}
        config = optim.AdamWConfig(lr=1e-4)
        trainer = ORTTrainer(task.model, task.description, config, task.loss_fn, options)
        return lambda: trainer.train_step(*task.batch)
    if contender != "eager":
        mode = None if contender == "compile" else contender
        task = replace(task, model=torch.compile(task.model, mode=mode))
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision != "fp32"):
            loss = task.loss(task.batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _milliseconds(step: Callable[[], Any], count: int) -> float:
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / count


def _measure_row(parent: Connection, row: str, precision: str, contenders: list[str], seconds: float) -> None:
    """Sets up the contenders of a row, and measures them in turns when the parent says so.

    Sends seconds until each one's first step ended, and why others failed, or had no time to begin in; later
    milliseconds for a step.
    """
    import torch

    steps: dict[str, Any] = {}
    first: dict[str, Any] = {}
    end = time.perf_counter() + seconds
    for contender in contenders:
        begin = time.perf_counter()
        if begin > end:
            first[contender] = "no time"
            continue
        try:
            step = _step(contender, _task(row), precision)
            for _ in range(8):  # until graphs are captured
                step()
                torch.cuda.synchronize()
                first.setdefault(contender, time.perf_counter() - begin)
            steps[contender] = step
        except Exception as error:
            first[contender] = _shown(error)
    parent.send({"first s": first})
    parent.recv()
    count = max(3, math.ceil(_SECONDS_OF_BLOCK * 1e3 / _milliseconds(steps["eager"], 3)))
    times: dict[str, list[float]] = {contender: [] for contender in steps}
    for _ in range(_ROUNDS):
        for contender, step in steps.items():
            times[contender].append(_milliseconds(step, count))
    parent.send({"ms": {name: statistics.median(values) for name, values in times.items()}})


def _measure_memory(parent: Connection, row: str, precision: str, contender: str) -> None:
    """Sends the most memory, in MB, that a contender's process had reserved, and that its tensors took."""
    import torch

    step = _step(contender, _task(row), precision)
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    peaks = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    parent.send({"reserved": peaks[0] / 1e6, "tensors": peaks[1] / 1e6})


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _run(parent: Connection, function: Callable[..., None], *arguments: Any) -> None:
    try:
        function(parent, *arguments)
    except Exception as error:
        parent.send({"error": _shown(error)})


class _Child:
    """Another process that runs a function, with a connection to this one as its first argument."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self._process = context.Process(target=_run, args=(there, function, *arguments), daemon=True)
        self._process.start()
        there.close()

    def answer(self, until: float) -> dict[str, Any]:
        """Returns what the function sends next; ends it, and says why under the key "error", if there is nothing."""
        found: dict[str, Any] = {"error": "not done in time"}
        try:
            if self.connection.poll(max(until - time.monotonic(), 0.01)):
                found = self.connection.recv()
        except EOFError:
            found = {"error": "the process crashed"}
        if "error" in found:
            self._process.kill()
        return found


def measure(
    rows: list[str], precisions: list[str], contenders: list[str], memory: list[str], seconds: float
) -> dict[str, Any]:
    """Sets up all rows at the same time, in at most three quarters of the time, and measures one after another."""
    import torch

    begin, results = time.monotonic(), {}
    keys = [(row, precision) for precision in precisions for row in rows]
    children = {key: _Child(_measure_row, *key, contenders, seconds * 0.55) for key in keys}
    peaks = {
        key: {name: _Child(_measure_memory, *key, name) for name in contenders[:3]} for key in keys if key[0] in memory
    }
    ready = {key: child.answer(begin + seconds * 0.75) for key, child in children.items()}
    memories = {
        key: {name: child.answer(begin + seconds * 0.8) for name, child in peak.items()} for key, peak in peaks.items()
    }
    for key, child in children.items():
        found = ready[key] | {"MB": memories.get(key, {})}
        if "error" not in found:
            child.connection.send("measure")
            found |= child.answer(begin + seconds)
        results[" ".join(key)] = found
        print(*key, json.dumps(found), flush=True)
    versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    return {"versions": versions, "rows": results}


def table(results: dict[str, Any]) -> str:
    """Returns the page's section about measured results."""
    where = results["versions"]
    lines = [
        f"Measured on one {where['device']} with torch {where['torch']}, fp32 without TF32: milliseconds for a step; "
        "how many times as long eager PyTorch and the fastest of the last three take as the better of the first two; "
        "and MB that the process of each of the first three had reserved at most.",
        "",
        f"| model | {' | '.join(CONTENDERS)} | eager | fastest | memory |",
        "|---" * (len(CONTENDERS) + 4) + "|",
    ]
    ratios, best_ratios = [], []
    for name, row in results["rows"].items():
        if "ms" not in row or not {*CONTENDERS[:2]} & {*row["ms"]}:
            lines.append(f"| {name} | {row.get('error', row.get('first s'))} |" + " |" * (len(CONTENDERS) + 2))
            continue
        times, memory = row["ms"], row.get("MB", {})
        ours = min(times[contender] for contender in CONTENDERS[:2] if contender in times)
        ratios.append(times["eager"] / ours)
        best_ratios.append(min(times[contender] for contender in CONTENDERS[2:] if contender in times) / ours)
        cells = [f"{times[contender]:.3g}" if contender in times else "" for contender in CONTENDERS]
        peaks = [
            f"{memory[contender].get('reserved', math.nan):.0f}" for contender in CONTENDERS[:3] if contender in memory
        ]
        lines.append(
            f"| {name} | {' | '.join(cells)} | **{ratios[-1]:.2f}** | {best_ratios[-1]:.2f} | {', '.join(peaks)} |"
        )
    if ratios:
        means = [math.exp(statistics.fmean(map(math.log, values))) for values in (ratios, best_ratios)]
        lines += ["", f"Geometric means: {means[0]:.2f} of eager, {means[1]:.2f} of the fastest other contender."]
    return "\n".join(lines)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--precisions", default="bf16,fp32")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--memory-of", default=",".join(ROWS), help="rows whose memory is measured")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", type=Path, metavar="RESULTS")
    given = parser.parse_args()
    if given.write:
        write_section(PAGE, "gpu", table(json.loads(given.write.read_text())))
        return
    rows, precisions, contenders, memory = (
        value.split(",") for value in (given.rows, given.precisions, given.contenders, given.memory_of)
    )
    results = measure(rows, precisions, contenders, memory, given.seconds)
    print(table(results))
    if given.out:
        given.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
