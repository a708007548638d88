"""Training steps on a GPU: this package, eager PyTorch with fused AdamW, and torch.compile in two modes.

Each row has a process of its own, in which the contenders take turns; CUDA events measure blocks of steps. The memory
of each contender is measured in a further process. ``make gpu`` runs this after the tests.

    python benchmarks/gpu.py --out results.json                  # every row that fits into --seconds
    python benchmarks/gpu.py --rows small-gpt2,bert-base --precisions bf16
    python benchmarks/gpu.py --write results.json                # writes docs/gpu.md; needs no GPU
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sections import write_section

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
CONTENDERS = ("ort_trainer", "eager", "compile", "reduce-overhead")
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

    if contender == "ort_trainer":
        from ort_trainer import ORTTrainer, optim

        options: Any = {"mixed_precision": {"enabled": precision != "fp32", "dtype": "bfloat16"}}
        config = optim.AdamWConfig(lr=1e-4)
        trainer = ORTTrainer(task.model, task.description, config, task.loss_fn, options if precision != "fp32" else {})
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


def measure_row(row: str, precision: str, contenders: list[str]) -> dict[str, Any]:
    """Measures the contenders of a row in turns; returns milliseconds for a step, and seconds until the first ended."""
    import torch

    steps: dict[str, Any] = {}
    first: dict[str, Any] = {}
    for contender in contenders:
        begin = time.perf_counter()
        steps[contender] = _step(contender, _task(row), precision)
        for _ in range(8):  # until graphs are captured
            steps[contender]()
            torch.cuda.synchronize()
            first.setdefault(contender, time.perf_counter() - begin)
    count = max(3, math.ceil(_SECONDS_OF_BLOCK * 1e3 / _milliseconds(steps["eager"], 3)))
    times: dict[str, list[float]] = {contender: [] for contender in contenders}
    for _ in range(_ROUNDS):
        for contender, step in steps.items():
            times[contender].append(_milliseconds(step, count))
    return {"ms": {name: statistics.median(values) for name, values in times.items()}, "first s": first}


def measure_memory(row: str, precision: str, contender: str) -> dict[str, Any]:
    """Returns the most memory, in MB, that a contender's process had reserved, and that its tensors took."""
    import torch

    step = _step(contender, _task(row), precision)
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    return {"reserved": torch.cuda.max_memory_reserved() / 1e6, "tensors": torch.cuda.max_memory_allocated() / 1e6}


def _in_process(seconds: float, *arguments: str) -> dict[str, Any]:
    """Returns what this script prints for some arguments, in another process; why it failed under the key "error"."""
    command = [sys.executable, __file__, *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1.0), check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {seconds:.0f} s"}
    if result.returncode:
        return {"error": result.stderr.strip().rpartition("\n")[2][-300:]}
    answer: dict[str, Any] = json.loads(result.stdout.strip().rpartition("\n")[2])
    return answer


def measure(rows: list[str], precisions: list[str], contenders: list[str], seconds: float) -> dict[str, Any]:
    """Measures rows one after another, as long as there is time."""
    import torch

    end, results = time.monotonic() + seconds, {}
    for precision in precisions:
        for row in rows:
            key, left = f"{row} {precision}", end - time.monotonic()
            found = _in_process(left, "--one", row, precision, ",".join(contenders))
            for contender in contenders[:2] if "error" not in found else ():
                left = end - time.monotonic()
                found.setdefault("MB", {})[contender] = _in_process(left, "--memory", row, precision, contender)
            results[key] = found
            print(key, json.dumps(found), flush=True)
    versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    return {"versions": versions, "rows": results}


def table(results: dict[str, Any]) -> str:
    """Returns the page's section about measured results."""
    where = results["versions"]
    lines = [
        f"Measured on one {where['device']} with torch {where['torch']}, fp32 without TF32: milliseconds for a step, "
        "and MB that the process had reserved at most.",
        "",
        "| model | ort_trainer | eager | compile | reduce-overhead | eager / ort_trainer | best other / ort_trainer | "
        "memory | eager's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ratios, best_ratios = [], []
    for name, row in results["rows"].items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} |" + " |" * 7)
            continue
        times, memory = row["ms"], row.get("MB", {})
        others = min(value for contender, value in times.items() if contender != "ort_trainer")
        ratios.append(times["eager"] / times["ort_trainer"])
        best_ratios.append(others / times["ort_trainer"])
        cells = [f"{times[contender]:.3g}" if contender in times else "" for contender in CONTENDERS]
        cells += [f"**{ratios[-1]:.2f}**", f"{best_ratios[-1]:.2f}"]
        cells += [f"{memory.get(contender, {}).get('reserved', math.nan):.0f}" for contender in CONTENDERS[:2]]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if ratios:
        means = [math.exp(statistics.fmean(map(math.log, values))) for values in (ratios, best_ratios)]
        lines += ["", f"Geometric means: {means[0]:.2f} of eager, {means[1]:.2f} of the best other contender measured."]
    return "\n".join(lines)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--precisions", default="bf16,fp32")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", type=Path, metavar="RESULTS")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--memory", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        write_section(PAGE, "gpu", table(json.loads(given.write.read_text())))
    elif given.one:
        row, precision, contenders = given.one
        print(json.dumps(measure_row(row, precision, contenders.split(","))))
    elif given.memory:
        print(json.dumps(measure_memory(*given.memory)))
    else:
        chosen = (given.rows.split(","), given.precisions.split(","), given.contenders.split(","))
        results = measure(*chosen, given.seconds)
        print(table(results))
        if given.out:
            given.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
