"""Training steps on a GPU: this package, also with compiled loops, eager PyTorch, and torch.compile in two modes.

All have fused AdamW, and a process each. The processes of three rows set up at the same time; then the contenders of a
row take turns, while CUDA events measure blocks of steps. ``make gpu`` runs this after the tests.

    python benchmarks/gpu.py --out results.json                  # every row that fits into --seconds
    python benchmarks/gpu.py --rows small-gpt2,bert-base --precisions bf16
    python benchmarks/gpu.py --write results.json                # writes docs/kernels.md; needs no GPU
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

PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"
CONTENDERS = ("ort_trainer", "compiled", "eager", "compile", "reduce-overhead")
# Row -> how many times the batch of the model in step_models.py.
ROWS = {"small-gpt2": 4, "bert-base": 4, "mlp": 1, "gpt2-base": 8, "resnet50": 8, "dlrm": 4, "llama-300m": 4}
_ROUNDS, _SECONDS_OF_BLOCK = 7, 0.15
_ROWS_AT_ONCE = 3


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


def _contend(parent: Connection, row: str, precision: str, contender: str) -> None:
    """Sets up a contender, sends what that took, and measures a block of steps whenever the parent sends a number."""
    import torch

    try:
        begin = time.perf_counter()
        step = _step(contender, _task(row), precision)
        for count in range(8):  # until graphs are captured
            step()
            torch.cuda.synchronize()
            if not count:
                first = time.perf_counter() - begin
        parent.send({"first s": first, "MB": torch.cuda.max_memory_reserved() / 1e6, "ms": _milliseconds(step, 3)})
        while count := parent.recv():
            parent.send({"ms": _milliseconds(step, count)})
    except Exception as error:
        parent.send({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]})


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


class _Contender:
    """A contender of a row, in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_contend, args=(there, *arguments), daemon=True)
        self.process.start()
        there.close()

    def answer(self, until: float) -> dict[str, Any]:
        """Returns what the process sends next; ends it, and says why under the key "error", if there is nothing."""
        found: dict[str, Any] = {"error": "not done in time"}
        try:
            if self.connection.poll(max(until - time.monotonic(), 0.01)):
                found = self.connection.recv()
        except EOFError:
            found = {"error": "the process crashed"}
        if "error" in found:
            self.process.kill()
        return found

    def milliseconds(self, count: int, until: float) -> float:
        """Returns the time of a step in a block of them; not a number if there is none."""
        self.connection.send(count)
        return float(self.answer(until).get("ms", math.nan))


def _measure_wave(
    rows: list[str], precision: str, contenders: list[str], end: float, results: dict[str, dict[str, Any]]
) -> None:
    """Sets up all contenders of some rows at the same time, and measures row after row, in turns."""
    ready = time.monotonic() + (end - time.monotonic()) * 0.8
    children = {(row, name): _Contender(row, precision, name) for row in rows for name in contenders}
    found = {key: child.answer(ready) for key, child in children.items()}
    for row in rows:
        those = {name: children[row, name] for name in contenders if "ms" in found[row, name]}
        slowest = max((found[row, name]["ms"] for name in those), default=1.0)
        count = max(3, math.ceil(_SECONDS_OF_BLOCK * 1e3 / slowest))
        rounds = [{name: child.milliseconds(count, end) for name, child in those.items()} for _ in range(_ROUNDS)]
        results[f"{row} {precision}"] = {
            name: {**found[row, name], **({"ms": statistics.median(r[name] for r in rounds)} if name in those else {})}
            for name in contenders
        }
        print(row, precision, json.dumps(results[f"{row} {precision}"]), flush=True)
    for child in children.values():
        child.process.kill()


def measure(rows: list[str], precisions: list[str], contenders: list[str], seconds: float) -> dict[str, Any]:
    """Measures rows in waves, whose models fit into the memory of a device together."""
    import torch

    results: dict[str, dict[str, Any]] = {}
    waves = [(rows[at : at + _ROWS_AT_ONCE], each) for each in precisions for at in range(0, len(rows), _ROWS_AT_ONCE)]
    end = time.monotonic() + seconds
    for number, (wave, precision) in enumerate(waves):
        now = time.monotonic()
        _measure_wave(wave, precision, contenders, now + (end - now) / (len(waves) - number), results)
    versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    return {"versions": versions, "rows": results}


def table(results: dict[str, Any]) -> str:
    """Returns the page's section about measured results."""
    where = results["versions"]
    lines = [
        f"Measured on one {where['device']} with torch {where['torch']}, fp32 without TF32. The first five columns are "
        'milliseconds for a step. The later columns "eager" and "fastest" compare the better of ort_trainer and '
        "compiled: with eager PyTorch, and with the fastest of eager, compile and reduce-overhead; 2 means twice as "
        'fast. "memory" is the MB that ort_trainer, compiled and eager had reserved at most.',
        "",
        f"| model | {' | '.join(CONTENDERS)} | eager | fastest | memory |",
        "|---" * (len(CONTENDERS) + 4) + "|",
    ]
    ratios, best_ratios = [], []
    for name, row in results["rows"].items():
        times = {contender: found["ms"] for contender, found in row.items() if "ms" in found}
        cells = [f"{times[c]:.3g}" if c in times else row.get(c, {}).get("error", "") for c in CONTENDERS]
        ours = min((times[contender] for contender in CONTENDERS[:2] if contender in times), default=math.nan)
        ratio = times.get("eager", math.nan) / ours
        best = min((times[contender] for contender in CONTENDERS[2:] if contender in times), default=math.nan) / ours
        peaks = ", ".join(f"{row[contender]['MB']:.0f}" for contender in CONTENDERS[:3] if contender in times)
        lines.append(f"| {name} | {' | '.join(cells)} | **{ratio:.2f}** | {best:.2f} | {peaks} |")
        if ratio > 0:
            ratios.append(ratio)
            best_ratios.append(best)
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
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", type=Path, metavar="RESULTS")
    given = parser.parse_args()
    if given.write:
        write_section(PAGE, "gpu", table(json.loads(given.write.read_text())))
        return
    rows, precisions, contenders = (value.split(",") for value in (given.rows, given.precisions, given.contenders))
    results = measure(rows, precisions, contenders, given.seconds)
    print(table(results))
    if given.out:
        given.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
