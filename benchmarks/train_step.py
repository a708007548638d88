"""Full training steps (forward, backward, AdamW) of ORTTrainer against PyTorch eager and torch.compile.

Each contender runs in a separate process, because two runtimes' thread pools disturb each other. The processes take
turns, because the speed of a shared machine changes: a short block of steps each, over several rounds; while one
computes, the others sleep on a pipe. What is compared are the medians of the blocks of a round, so that a slow minute
hits all contenders alike; the interval is from a bootstrap over the rounds. ort_trainer also runs on the newest stock
onnxruntime, which is taken from the folder .stock if there is one (make setup-stock).

    python benchmarks/train_step.py                       # everything; 40 minutes on two cores
    python benchmarks/train_step.py --quick               # fewer rounds, and no torch.compile: 8 minutes
    python benchmarks/train_step.py --rows mlp lstm       # these rows only
    python benchmarks/train_step.py --write               # and writes docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sections import write_section
from versions import versions

ROOT = Path(__file__).parents[1]
STOCK = ROOT / ".stock"
PAGE = ROOT / "docs" / "benchmarks.md"
PACKAGES = ("torch", "onnxruntime-training", "onnxruntime", "onnx", "onnxscript", "transformers")
CONTENDERS = ("eager", "compile", "ort_trainer", "ort_trainer, stock engine")
Step = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """What is measured.

    Attributes:
        title: For the table.
        model: Name in ``step_models.MODELS``.
        steps: Steps of a block.
        dropout: Whether the model keeps its dropout.
        bf16: Whether with mixed precision in bfloat16.
        accumulation: Micro-batches of an update.
    """

    title: str
    model: str
    steps: int
    dropout: bool = True
    bf16: bool = False
    accumulation: int = 1


ROWS = {
    "mlp": Row("MLP 784-512-10, batch 64", "mlp", 150),
    "convolutions": Row("six convolutions with batch norm, 16 x 32 x 32", "convolutions", 8),
    "resnet18": Row("ResNet-18, 16 x 32 x 32", "resnet18", 3),
    "lstm": Row("two-layer LSTM of 256, 16 x 32 tokens", "lstm", 12),
    "bert": Row("BERT, 4 layers of 256, 8 x 128 tokens", "bert", 5),
    "bert-no-dropout": Row("the same without dropout", "bert", 5, dropout=False),
    "gpt2": Row("GPT-2, 4 layers of 256, vocabulary 8000, 8 x 128 tokens", "gpt2", 4),
    "gpt2-no-dropout": Row("the same without dropout", "gpt2", 4, dropout=False),
    "bert-bf16": Row("BERT in bfloat16", "bert", 5, bf16=True),
    "bert-accumulation": Row("BERT, 4 micro-batches an update", "bert", 8, accumulation=4),
}


def make_step(contender: str, row: Row) -> Step:
    """Returns the function that does one training step."""
    import torch
    from step_models import make_task

    task = make_task(row.model, row.dropout)
    if contender.startswith("ort_trainer"):
        from ort_trainer import ORTTrainer, ORTTrainerOptions, optim

        config = optim.AdamConfig(lr=1e-3, lambda_coef=0.01)
        options = ORTTrainerOptions(
            {
                "utils": {"grad_norm_clip": False},  # the others do not clip either
                "batch": {"gradient_accumulation_steps": row.accumulation},
                "mixed_precision": {"enabled": row.bf16, "dtype": "bfloat16"} if row.bf16 else {},
            }
        )
        trainer = ORTTrainer(task.model, task.description, config, loss_fn=task.loss_fn, options=options)
        return lambda: trainer.train_step(*task.batch)

    task.model.train()
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    compute = torch.compile(task.loss) if contender == "compile" else task.loss
    done = 0

    def step() -> torch.Tensor:
        nonlocal done
        with torch.autocast("cpu", torch.bfloat16, enabled=row.bf16):
            loss = compute(task.batch)
        (loss / row.accumulation if row.accumulation > 1 else loss).backward()
        done += 1
        if done % row.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def serve(contender: str, row: Row) -> None:
    """A contender's process: reads how many steps to do from stdin, answers with their times."""
    import torch  # noqa: F401 - imports are not part of the start-up that is measured

    if contender.startswith("ort_trainer"):
        import ort_trainer  # noqa: F401
    start = time.perf_counter()
    step = make_step(contender, row)
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


@dataclasses.dataclass
class Result:
    """What was found of one contender: seconds and megabytes.

    Attributes:
        first: Start-up with nothing in any cache.
        again: Start-up of a second process.
        rounds: The times of each round.
        peak: Largest resident memory, of the process or of its children.
    """

    first: float
    again: float = 0.0
    rounds: list[list[float]] = dataclasses.field(default_factory=list)
    peak: float = 0.0

    @property
    def times(self) -> list[float]:
        """All times."""
        return [value for part in self.rounds for value in part]

    @property
    def median(self) -> float:
        """The median step."""
        return statistics.median(self.times)


def start(contender: str, row: str, caches: str) -> subprocess.Popen[str]:
    """Starts the process of a contender."""
    environment = {
        **os.environ,
        "ORT_TRAINER_CACHE": f"{caches}/exports",
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
    }
    if contender.endswith("stock engine"):
        environment["PYTHONPATH"] = f"{STOCK}:{environment.get('PYTHONPATH', '')}".rstrip(":")
    command = [sys.executable, __file__, "--serve", contender, "--rows", row]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def measure(row: str, contenders: Sequence[str], rounds: int) -> dict[str, Result]:
    """Returns the results of every contender for one row; one that died is left out."""
    processes: dict[str, subprocess.Popen[str]] = {}
    found: dict[str, Result] = {}
    for contender in contenders:
        with tempfile.TemporaryDirectory() as caches:
            first = start(contender, row, caches)
            answer = _answer(first, contender)
            if answer is None:
                continue
            _end(first)
            again = start(contender, row, caches)
            second = _answer(again, contender)
            assert second is not None
            processes[contender] = again
            found[contender] = Result(answer["startup"], second["startup"])
    for number in range(rounds + 1):
        for contender, process in processes.items():
            assert process.stdin is not None
            process.stdin.write(f"{ROWS[row].steps}\n")
            process.stdin.flush()
            block = _answer(process, contender)
            assert block is not None
            found[contender].peak = max(block["peak"], block["child_peak"])
            if number > 0:  # the first round warms up
                found[contender].rounds.append(block["times"])
    for process in processes.values():
        _end(process)
    return found


def _answer(process: subprocess.Popen[str], contender: str) -> dict[str, Any] | None:
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    if not line:
        last = process.stderr.read().strip().rpartition("\n")[2]
        print(f"{contender} died with status {process.wait()}: {last}", file=sys.stderr)
        return None
    answer: dict[str, Any] = json.loads(line)
    return answer


def _end(process: subprocess.Popen[str]) -> None:
    process.communicate()


def ratio(theirs: Result, ours: Result) -> tuple[float, float, float]:
    """Returns how many times faster ours is, with a 95 % interval from a bootstrap over the rounds."""
    pairs = [statistics.median(a) / statistics.median(b) for a, b in zip(theirs.rounds, ours.rounds, strict=True)]
    draw = random.Random(0)
    resampled = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(2000))
    return statistics.median(pairs), resampled[49], resampled[1949]


def table(row: Row, results: dict[str, Result]) -> list[str]:
    """Returns the lines of a row's table."""
    from step_models import make_task

    eager = results["eager"]
    samples = len(make_task(row.model).batch[0])
    lines = []
    for contender, result in results.items():
        middle, low, high = ratio(eager, result)
        tenth = statistics.quantiles(result.times, n=10)[-1]
        gain, cost = eager.median - result.median, result.again - eager.again
        paid = "-" if contender == "eager" else f"{max(0.0, cost / gain):.0f}" if gain > 0 else "never"
        speed = "1" if contender == "eager" else f"**{middle:.2f}** ({low:.2f} - {high:.2f})"
        lines.append(
            f"| {row.title} | {contender} | {result.median * 1e3:.4g} | {tenth * 1e3:.4g} | {speed} | "
            f"{samples / result.median:.4g} | {result.peak:.0f} | {result.peak / eager.peak:.2f} | "
            f"{result.first:.1f} | {result.again:.1f} | {paid} |"
        )
    return lines


HEAD = [
    "| model | contender | median, ms | p90, ms | eager's time / its time (95 %) | samples/s | peak memory, MB "
    "| / eager's | first start, s | second start, s | steps until the second start is paid back |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--rounds", type=int, default=8, help="blocks of steps of every contender")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--quick", action="store_true", help="three rounds, and no torch.compile")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, ROWS[arguments.rows[0]])
        return
    contenders = [name for name in arguments.contenders if STOCK.exists() or not name.endswith("stock engine")]
    if arguments.quick:
        contenders = [name for name in contenders if name != "compile"]
    if "eager" not in contenders:
        contenders.insert(0, "eager")
    text = [f"Python {platform.python_version()}, {versions(PACKAGES)}; {os.cpu_count()} cores.", "", *HEAD]
    print("\n".join(text), flush=True)
    for name in arguments.rows:
        lines = table(ROWS[name], measure(name, contenders, 3 if arguments.quick else arguments.rounds))
        print("\n".join(lines), flush=True)
        text += lines
    if arguments.write:
        write_section(PAGE, "training steps", "\n".join(text))


if __name__ == "__main__":
    main()
