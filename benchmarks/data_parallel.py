"""Training in several processes on one machine, against one process and against torch's DistributedDataParallel.

1. Step times. Contenders take turns, each in its own processes (turns.py, ranks.py): two processes with one thread
   each, one process with two threads and twice the batch, and a single process with one thread. Each of the two
   processes trains the same batch as the single one, so at best it takes as long.
2. Where a step of two processes spends its time on communication: waiting for the slower process, exchanging messages
   before a reduction, reducing, and sending results that only some processes have.
3. The bytes that a process sends in a step, from the counters of its TCP connections, against the theory:
   2 (N - 1) / N of the gradients for a ring (Patarasuk and Yuan 2009).
4. All-reduces of several sizes, which determine the bandwidth and latency in the formula of scaling_model.py; it then
   predicts the steps of 2.

    python benchmarks/data_parallel.py                    # everything; five minutes on two cores
    python benchmarks/data_parallel.py --rows mlp         # this model only
    python benchmarks/data_parallel.py --write            # and writes docs/reference/benchmarks.md
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ranks import Rank, launch
from scaling_model import fit_ring, ring
from sections import write_section
from step_rows import ROWS, ort_training
from turns import Contender, Profile, Result, Training, measure, ratio, serve
from versions import ENGINES, versions

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
MB = 1e6
STEPS = {"mlp": 50, "bert-no-dropout": 3}
EXAMINED = {"mlp": 60, "bert-no-dropout": 8}
REDUCED = tuple(2**exponent for exponent in range(14, 26))


@dataclass(frozen=True)
class Kind:
    """A way to train.

    Attributes:
        size: The number of processes.
        threads: The number of threads of each process.
        batch: The batch of each process, as a multiple of the row's batch.
        distributed: Options of ``ORTTrainer``.
        torch: Whether PyTorch trains instead of ``ORTTrainer``.
        sharded: Whether ``ZeroRedundancyOptimizer`` is used.
        bucket: The size of a bucket in MB.
    """

    size: int = 2
    threads: int = 1
    batch: int = 1
    distributed: Mapping[str, Any] = field(default_factory=dict)
    torch: bool = False
    sharded: bool = False
    bucket: float = 25


ALONE, OURS, DDP = "ort_trainer, 1 process", "ort_trainer, 2 processes", "DDP, 2 processes"
EAGER = "eager, 1 process"
ZERO = {"deepspeed_zero_optimization": {"stage": 1}}
KINDS = {
    ALONE: Kind(size=1),
    OURS: Kind(),
    f"{OURS}, ZeRO-1": Kind(distributed=ZERO),
    "ort_trainer, 1 process of 2 threads, twice the batch": Kind(size=1, threads=2, batch=2),
    EAGER: Kind(size=1, torch=True),
    DDP: Kind(torch=True),
    f"{DDP}, buckets of 4 MB": Kind(torch=True, bucket=4),
    f"{DDP}, ZeroRedundancyOptimizer": Kind(torch=True, sharded=True),
}
# What a process should send, as a multiple of (N - 1) / N of the gradients.
SENT: dict[str, tuple[dict[str, Any], str, Callable[[int], float]]] = {
    "all gradients": ({}, "2 (N - 1) / N", lambda size: 2 * (size - 1) / size),
    "in bfloat16": ({"reduce_dtype": "bfloat16"}, "(N - 1) / N", lambda size: (size - 1) / size),
    "ZeRO-1": (ZERO, "3 (N - 1) / N", lambda size: 3 * (size - 1) / size),
    "Adasum": ({"enable_adasum": True}, "log2 N", lambda size: size.bit_length() - 1),
}
SURVEY = "survey"


def part_of(batch: tuple[Any, ...], kind: Kind) -> tuple[Any, ...]:
    """Returns the batch of this process: the rank's own, or the concatenated batches of several ranks."""
    import torch

    first = int(os.environ.get("RANK", "0"))
    # Other samples of the same kind: inputs are shifted along their last dimension, labels against the inputs.
    return tuple(torch.cat([tensor.roll(first + rank, -1) for rank in range(kind.batch)]) for tensor in batch)


def ort_rank(row: str, kind: Kind) -> Rank:
    """Returns the training of a process by ort_trainer."""
    training = ort_training(ROWS[row], distributed=kind.distributed, batch=lambda batch: part_of(batch, kind))
    loop = training.trainer._loop

    def describe() -> dict[str, float]:
        moments = [value for slots in loop.optimizer.slots.values() for value in slots.values()]
        gradients = [value for name, value in loop.executor.parameters.items() if name in loop.optimizer.slots]
        return {"gradients": _nbytes(gradients), "moments": _nbytes(moments)}

    return Rank(training.step, training.trainer, strategy=loop.strategy, describe=describe)


def torch_rank(row: str, kind: Kind) -> Rank:
    """Returns the training of a process by PyTorch."""
    import torch
    import torch.distributed as dist
    from step_models import make_task
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    task = make_task(ROWS[row].model, ROWS[row].dropout)
    model: Any = task.model.train()
    loss_fn: Any = task.loss_fn
    batch = part_of(task.batch, kind)
    if kind.size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, bucket_cap_mb=kind.bucket, gradient_as_bucket_view=True)
        model._set_ddp_runtime_logging_sample_rate(1)
    hyper: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "fused": True}
    if kind.sharded:
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **hyper)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **hyper)

    def step() -> torch.Tensor:
        loss = loss_fn(model(*batch[:-1]), batch[-1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def describe() -> dict[str, float]:
        states = (optimizer.optim if kind.sharded else optimizer).state.values()
        found: dict[str, float] = {
            "gradients": _nbytes(list(model.parameters())),
            "moments": _nbytes([value for state in states for value in state.values() if value.ndim]),
        }
        if kind.size == 1:
            return found
        times = model._get_ddp_logging_data()
        overlap = times["avg_backward_compute_comm_overlap_time"]
        return {**found, "reduce": times["avg_backward_comm_time"] / 1e9, "overlap": overlap / 1e9}

    return Rank(step, describe=describe)


class Survey(Training):
    """Measurements without turns: the times of all-reduces, and the bytes that steps send."""

    def profile(self, steps: int) -> Profile:
        """Returns bytes and seconds of all-reduces, profiles of the ways to send gradients, and what was refused."""
        found: Profile = {"all_reduces": _all_reduces(), "sent": {}, "refused": {}}
        for name, (distributed, _, _) in SENT.items():
            try:
                rank = ort_rank("mlp", Kind(distributed=distributed))
            except ValueError as error:
                found["refused"][name] = str(error)
                continue
            rank.step()
            found["sent"][name] = rank.profile(steps)
        return found


def survey() -> Survey:
    """Returns a process of a survey."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return Survey(lambda: 0.0)


def _all_reduces() -> list[tuple[int, float]]:
    import torch
    import torch.distributed as dist

    whole = torch.zeros(REDUCED[-1] // 4)
    found: dict[int, list[float]] = {nbytes: [] for nbytes in REDUCED}
    for _ in range(9):
        for nbytes, times in found.items():
            tensor = whole[: nbytes // 4]
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - begin)
    return [(nbytes, statistics.median(times)) for nbytes, times in found.items()]


def _nbytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def serve_rank(name: str, row: str, size: int) -> None:
    """Runs a process of a contender; launches the others first if needed."""
    if size > 1 and "RANK" not in os.environ:
        launch((sys.executable, *sys.argv), size)
        return
    import torch
    import torch.distributed as dist

    # Imports are not part of the measured start-up.
    import ort_trainer  # noqa: F401

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if name == SURVEY:
        serve(survey)
    else:
        serve(functools.partial(torch_rank if KINDS[name].torch else ort_rank, row, KINDS[name]))
    if dist.is_initialized():
        dist.destroy_process_group()


def contender(name: str, row: str, cache: str, size: int | None = None) -> Contender:
    """Returns how a contender is started. All share one cache, because their exports are the same."""
    kind = KINDS.get(name, Kind())
    command = (sys.executable, __file__, "--serve", name, "--rows", row, "--size", str(size or kind.size))
    return Contender(command, {"OMP_NUM_THREADS": str(kind.threads), "ORT_TRAINER_CACHE": cache})


@dataclass(frozen=True)
class Fit:
    """The bandwidth and latency of all-reduces for a number of processes: bytes per second, and seconds."""

    bandwidth: float
    latency: float

    def seconds(self, size: int, nbytes: float) -> float:
        """Returns how long the gradients should take."""
        return ring(size, nbytes, self.bandwidth, self.latency)


def fitted(size: int, all_reduces: Sequence[tuple[int, float]]) -> tuple[Fit, str]:
    """Returns the best fit to measured all-reduces, and a line that reports its accuracy."""
    fit = Fit(*fit_ring(size, all_reduces))
    errors = [abs(fit.seconds(size, nbytes) / seconds - 1) for nbytes, seconds in all_reduces]
    return fit, (
        f"| {size} | {fit.bandwidth / 1e9:.2f} | {fit.latency * 1e6:.0f} | "
        f"{statistics.median(errors):.0%} | {max(errors):.0%} |"
    )


def step_lines(row: str, results: Mapping[str, Result]) -> list[str]:
    """Returns the lines of step times."""
    from step_models import make_task

    samples = len(make_task(ROWS[row].model).batch[0])
    lines = []
    for name, result in results.items():
        kind = KINDS[name]
        alone = results.get(EAGER if kind.torch else ALONE)
        kept = "-" if kind.size == 1 or alone is None else "{:.0%} ({:.0%} - {:.0%})".format(*ratio(alone, result))
        rate = samples * kind.size * kind.batch / result.median
        found = result.profile
        memory = f"{found['peak']:.0f} | {found['moments'] / MB:.3g}" if found else "- | -"
        lines.append(f"| {ROWS[row].label} | {name} | {result.median * 1e3:.4g} | {rate:.4g} | {kept} | {memory} |")
    return lines


def waiting_lines(row: str, results: Mapping[str, Result], fit: Fit) -> list[str]:
    """Returns the lines of what a step of several processes waits for, with the formula's predictions."""
    lines = []
    for name, result in results.items():
        kind, found = KINDS[name], result.profile
        if kind.size == 1 or found is None:
            continue
        if kind.torch:  # its own figures
            parts = ["-", "-", f"{found['reduce'] * 1e3:.3g}", "-", f"{found['overlap'] / found['reduce']:.0%}"]
        else:
            shares = [found[part] for part in ("wait", "messages", "reduce", "spread")]
            parts = [*(f"{part * 1e3:.3g} ({part / found['step']:.0%})" for part in shares), "-"]
        # On gloo, all processes get the complete sums; ZeRO-1 then sends the weights, which is half a ring.
        foretold = fit.seconds(kind.size, found["gradients"]) * (1.5 if kind.sharded or kind.distributed else 1)
        alone = results.get(EAGER if kind.torch else ALONE)
        step = "-" if alone is None else f"{(alone.median + foretold) * 1e3:.4g}"
        lines.append(
            f"| {ROWS[row].label} | {name} | {found['step'] * 1e3:.4g} | {' | '.join(parts)} | "
            f"{foretold * 1e3:.3g} | {step} |"
        )
    return lines


def sent_lines(size: int, profiles: Mapping[str, Profile]) -> list[str]:
    """Returns the lines of the bytes sent."""
    lines = []
    for name, found in profiles.items():
        _, formula, factor = SENT[name]
        expected, most = factor(size) * found["gradients"], max(found["sent"])
        lines.append(
            f"| {size} | {name} | {formula} | {expected / MB:.3f} | {most / MB:.3f} | **{most / expected:.3f}** |"
        )
    return lines


STEP_HEAD = [
    "| model | contender | median, ms | samples/s | speed of a process / alone (95 %) | peak memory of steps, MB "
    "| moments of a process, MB |",
    "|---|---|---|---|---|---|---|",
]
WAITING_HEAD = [
    "| model | contender | step, ms | waits for the slower, ms | messages, ms | reduction, ms | giving out, ms "
    "| behind the backward pass | formula: exchange, ms | formula: step, ms |",
    "|---|---|---|---|---|---|---|---|---|---|",
]
SENT_HEAD = [
    "| processes | gradients | theory, of the gradients | MB in theory | MB sent by a process | sent / theory |",
    "|---|---|---|---|---|---|",
]
FIT_HEAD = ["| processes | GB/s | latency, µs | error: median | largest |", "|---|---|---|---|---|"]


def differing(row: str, results: Mapping[str, Result]) -> list[str]:
    """Returns remarks on contenders whose losses differ from DDP's: the losses of rank 0 should agree."""
    if DDP not in results:
        return []
    expected = results[DDP].losses
    return [
        f"- {name}, {ROWS[row].label}: its losses differ from DDP's, {result.losses} and {expected}."
        for name, result in results.items()
        if KINDS[name].size > 1
        and any(abs(ours / theirs - 1) > 0.02 for ours, theirs in zip(result.losses, expected, strict=True))
    ]


def report(arguments: argparse.Namespace, cache: str) -> list[str]:
    """Measures everything and returns the lines."""
    steps, waiting, sent, fits, below = [], [], [], [], []
    surveys: dict[int, Profile] = {}
    for row in arguments.rows:
        # Exports first, so that no contender's memory includes the export.
        measure({ALONE: contender(ALONE, row, cache)}, 1, 0, 1)
    for size in arguments.sizes:
        results, _ = measure({SURVEY: contender(SURVEY, "mlp", cache, size)}, 1, 0, 1, 10, SURVEY)
        print(f"{size} processes: what they send is known", file=sys.stderr)
        found = surveys[size] = results[SURVEY].profile or {}
        fits.append(fitted(size, found["all_reduces"])[1])
        sent += sent_lines(size, found["sent"])
        below += [f"- {name}, {size} processes: refused, {why}." for name, why in found["refused"].items()]
    for row in arguments.rows:
        contenders = {name: contender(name, row, cache) for name in arguments.contenders or KINDS}
        count = arguments.steps
        results, died = measure(contenders, count or STEPS[row], arguments.rounds, 1, count or EXAMINED[row])
        print(f"{ROWS[row].label}: all times taken", file=sys.stderr)
        steps += step_lines(row, results)
        waiting += waiting_lines(row, results, fitted(2, surveys[2]["all_reduces"])[0])
        below += [f"- {name}, {ROWS[row].label}: fails with {why}." for name, why in died.items()]
        below += differing(row, results)
    lines = [f"Python {platform.python_version()}, {versions(('torch', *ENGINES))}; {os.cpu_count()} cores.", ""]
    for head, table in ((STEP_HEAD, steps), (WAITING_HEAD, waiting), (SENT_HEAD, sent), (FIT_HEAD, fits)):
        lines += [*head, *table, ""]
    return lines + below


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--contenders", nargs="+", choices=list(KINDS), help="all by default")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of steps of every contender")
    parser.add_argument("--steps", type=int, help="steps of a block, instead of the row's own number")
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[2, 4], help="processes whose traffic is measured; 2 among them"
    )
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--serve", choices=(*KINDS, SURVEY), help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve_rank(arguments.serve, arguments.rows[0], arguments.size)
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        text = "\n".join(report(arguments, cache)).rstrip()
    print(f"\n{text}")
    if arguments.write:
        write_section(PAGE, "several processes", text)


if __name__ == "__main__":
    main()
