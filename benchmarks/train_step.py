"""Full training steps (forward, backward, AdamW) of ORTTrainer and ORTModule against PyTorch eager and torch.compile.

The contenders take turns, each in its own process (see turns.py). Two of them take part only if installed: the newest
stock onnxruntime as ort_trainer's engine (make setup-stock), and the ORTTrainer of onnxruntime-training 1.16.3
(make setup-legacy; legacy_step.py), in full precision and without accumulation.

After a row is timed, the contenders that are ORTTrainers run ten more steps under their own profiler. It reports the
fraction of a step spent in matrix products, convolutions, attention and recurrent layers, and the fraction spent
outside operators and the weight update.

    python benchmarks/train_step.py                       # everything; three quarters of an hour on two cores
    python benchmarks/train_step.py --quick               # less of everything; five minutes
    python benchmarks/train_step.py --rows mlp lstm       # these rows only
    python benchmarks/train_step.py --write               # and writes docs/benchmarks.md and its charts
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import charts
from sections import write_section
from step_rows import HALVES, ROWS, Row, ort_training
from turns import Contender, Profile, Result, Training, measure, ratio, serve
from versions import ENGINES, versions

ROOT = Path(__file__).parents[1]
STOCK = ROOT / ".stock"
LEGACY_PYTHON = ROOT / ".legacy" / "bin" / "python"
PAGE = ROOT / "docs" / "benchmarks.md"
PACKAGES = ("torch", *ENGINES, "onnx", "onnxscript", "transformers")

EAGER, COMPILE, MODULE, OURS, LOOPS, ON_STOCK, LEGACY = CONTENDERS = (
    "eager",
    "compile",
    "ORTModule",
    "ort_trainer",
    "ort_trainer, compiled",
    "ort_trainer, stock engine",
    "legacy 1.16.3",
)
QUICK = (EAGER, MODULE, OURS, ON_STOCK)
LARGE = ("bert-base", "gpt2-base", "resnet50", "bert-lora", "gpt2-lora")
SLOW_ROWS = (*LARGE, "bert-no-dropout", "gpt2-no-dropout", "bert-accumulation")
# PyTorch itself takes five seconds per step if the processor has no fp16 arithmetic: see precisions.py.
NOT_HERE = ("bert-fp16",)
# Not timed; it shows where the time went before PyTorch's kernels were used.
BEFORE = "ort_trainer, ONNX Runtime's kernels"
KERNELS = {LOOPS: "compiled", BEFORE: "onnxruntime"}
ROWS_BY_OPERATOR = ("bert", "gpt2")
PROFILED = 10
# With fewer rounds, dropout may hide that a loss falls.
ENOUGH_ROUNDS = 3


def eager_training(row: Row, compiled: bool = False, as_module: bool = False) -> Training:
    """Returns the training of a row by PyTorch's own loop."""
    import torch
    from step_models import make_task

    task = make_task(row.model, row.dropout)
    task.model.train()
    if as_module:
        from ort_trainer import ORTModule

        task = dataclasses.replace(task, model=ORTModule(task.model))
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    compute = torch.compile(task.loss) if compiled else task.loss
    dtype = getattr(torch, HALVES.get(row.precision, "bfloat16"))
    done = 0

    def step() -> torch.Tensor:
        nonlocal done
        with torch.autocast("cpu", dtype, enabled=row.precision in HALVES):
            loss = compute(task.batch)
        (loss / row.accumulation if row.accumulation > 1 else loss).backward()
        done += 1
        if done % row.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return Training(step)


def serve_contender(name: str, row: Row) -> None:
    """Runs a contender's process."""
    import torch  # noqa: F401 - imports are no part of the start-up that is measured

    if name in (EAGER, COMPILE, MODULE):
        serve(functools.partial(eager_training, row, name == COMPILE, name == MODULE))
        return
    from ort_trainer import ORTTrainer  # noqa: F401

    serve(functools.partial(ort_training, row, {"kernels": KERNELS.get(name, "auto")}))


def takes_part(name: str, row: Row) -> bool:
    """Returns whether a contender is installed and supports a row."""
    if name == LEGACY:
        return LEGACY_PYTHON.exists() and row.precision == "fp32" and row.accumulation == 1
    return name != ON_STOCK or STOCK.exists()


def contender(name: str, row: str) -> Contender:
    """Returns how a contender's process is started."""
    if name == LEGACY:
        script = str(ROOT / "benchmarks" / "legacy_step.py")
        without = () if ROWS[row].dropout else ("--no-dropout",)
        return Contender((str(LEGACY_PYTHON), script, ROWS[row].model, *without), {"PYTHONPATH": ""})
    path = f"{STOCK}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    command = (sys.executable, __file__, "--serve", name, "--rows", row)
    return Contender(command, {"PYTHONPATH": path} if name == ON_STOCK else {})


def table(row: Row, results: Mapping[str, Result], died: Mapping[str, str]) -> list[str]:
    """Returns the lines of a row's table."""
    from step_models import make_task

    eager = results[EAGER]
    samples = len(make_task(row.model).batch[0])
    lines = []
    for name, result in results.items():
        middle, low, high = ratio(eager, result)
        tenth = statistics.quantiles(result.times, n=10)[-1] if len(result.times) > 1 else result.median
        speed = "1" if name == EAGER else f"**{middle:.2f}** ({low:.2f} - {high:.2f})"
        again = f"{result.starts[1]:.1f}" if len(result.starts) > 1 else "-"
        lines.append(
            f"| {row.title} | {name} | {result.median * 1e3:.4g} | {tenth * 1e3:.4g} | {speed} | "
            f"{samples / result.median:.4g} | {result.peak:.0f} | {result.peak / eager.peak:.2f} | "
            f"{share(result.profile, 'products')} | {share(result.profile, 'overhead')} | "
            f"{result.starts[0]:.1f} | {again} | {paid_back(eager, result)} |"
        )
    return lines + [f"| {row.title} | {name} |{' - |' * (HEAD[0].count('|') - 3)}" for name in died]


def share(profile: Profile | None, part: str) -> str:
    """Returns the fraction of a step that a part took."""
    return f"{profile[part] / profile['milliseconds']:.0%}" if profile else "-"


def paid_back(eager: Result, result: Result) -> str:
    """Returns the number of steps after which a second start pays off."""
    if result is eager or len(result.starts) < 2:
        return "-"
    gain, cost = eager.median - result.median, result.starts[1] - eager.starts[1]
    return f"{max(0.0, cost / gain):.0f}" if gain > 0 else "never"


HEAD = [
    "| model | contender | median, ms | p90, ms | eager's time / its time (95 %) | samples/s | peak memory, MB "
    "| / eager's | products, convolutions | Python, overhead | first start, s | second start, s "
    "| steps until the second start is paid back |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
]


def remarks(row: Row, results: Mapping[str, Result], died: Mapping[str, str]) -> list[str]:
    """Returns the remarks below the table: contenders that died or did not learn."""
    lines = [f"- {name}, {row.label}: fails with `{why[:200].replace('`', '')}`." for name, why in died.items()]
    for name, result in results.items():
        first, last = result.losses[0], result.losses[-1]
        if len(result.rounds) >= ENOUGH_ROUNDS and not last < first:
            lines.append(f"- {name}, {row.label}: its loss did not fall, from {first:.3g} to {last:.3g}.")
    return lines


def before_and_after(row: str, after: Profile | None) -> dict[str, Profile]:
    """Returns the profiles of a row on ONNX Runtime's kernels and on PyTorch's; empty if they are unavailable."""
    if after is None:
        return {}
    found, _ = measure({BEFORE: contender(BEFORE, row)}, ROWS[row].steps, 0, starts=1, profiled=PROFILED)
    before = found[BEFORE].profile if BEFORE in found else None
    label = ROWS[row].label
    return {f"{label}, ONNX Runtime's kernels": before, f"{label}, PyTorch's kernels": after} if before else {}


def draw(rows: Mapping[str, Mapping[str, Result]], profiles: Mapping[str, Profile]) -> list[str]:
    """Draws the charts and returns the lines that show them."""
    folder = PAGE.parent / "images"
    speeds: dict[str, dict[str, charts.Bar]] = {}
    peaks: dict[str, dict[str, charts.Bar]] = {}
    for row, results in rows.items():
        others = {name: result for name, result in results.items() if name != EAGER}
        label, eager = ROWS[row].label, results[EAGER]
        speeds[label] = {name: charts.Bar(*ratio(eager, result)) for name, result in others.items()}
        peaks[label] = {name: charts.Bar(result.peak / eager.peak) for name, result in others.items()}
    charts.draw_ratios(folder / "speed.svg", "speed, eager = 1 (longer is faster)", CONTENDERS[1:], speeds)
    charts.draw_ratios(folder / "memory.svg", "peak memory, eager = 1 (shorter is less)", CONTENDERS[1:], peaks)
    lines = ["![Speed of a training step against eager](images/speed.svg)", ""]
    lines += ["![Peak memory of training against eager](images/memory.svg)", ""]
    if profiles:
        charts.draw_operators(folder / "operators.svg", profiles)
        lines += ["![Time of a training step by kinds of operators](images/operators.svg)", ""]
    return lines


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help=f"by default all but {', '.join(NOT_HERE)}")
    parser.add_argument("--rounds", type=int, help="blocks of steps of every contender; 8, or 3 with --quick")
    parser.add_argument("--steps", type=int, help="steps of a block, instead of the row's own number")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, help="all by default")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"three rounds and one start of {', '.join(QUICK)}; by default not the rows {', '.join(SLOW_ROWS)}",
    )
    parser.add_argument(
        "--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}, and charts"
    )
    parser.add_argument("--serve", choices=(*CONTENDERS, BEFORE), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.serve:
        serve_contender(arguments.serve, ROWS[arguments.rows[0]])
        return
    if arguments.write:
        charts.require_matplotlib()  # fail now rather than after all measurements
    wanted: Sequence[str] = arguments.contenders or (QUICK if arguments.quick else CONTENDERS)
    rounds = arguments.rounds or (3 if arguments.quick else 8)
    text = [f"Python {platform.python_version()}, {versions(PACKAGES)}; {os.cpu_count()} cores.", "", *HEAD]
    print("\n".join(text), flush=True)
    measured: dict[str, dict[str, Result]] = {}
    profiles: dict[str, Profile] = {}
    below: list[str] = []
    skipped = (*NOT_HERE, *(SLOW_ROWS if arguments.quick else ()))
    rows = arguments.rows or [name for name in ROWS if name not in skipped]
    for name in rows:
        row = ROWS[name]
        contenders = {
            each: contender(each, name)
            for each in CONTENDERS
            if takes_part(each, row) and (each in wanted or each == EAGER)
        }
        starts = 1 if arguments.quick else 2
        results, died = measure(contenders, arguments.steps or row.steps, rounds, starts, PROFILED, EAGER)
        lines = table(row, results, died)
        print("\n".join(lines), flush=True)
        text += lines
        below += remarks(row, results, died)
        measured[name] = results
        if arguments.write and name in ROWS_BY_OPERATOR and OURS in results:
            profiles |= before_and_after(name, results[OURS].profile)
    for line in below:
        print(line)
    if arguments.write:
        write_section(
            PAGE, "training steps", "\n".join([*text, "", *below, *[""] * bool(below), *draw(measured, profiles)])
        )


if __name__ == "__main__":
    main()
