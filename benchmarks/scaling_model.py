"""The cost of data parallel training on more processes than this machine has: the tables of docs/reference/scaling.md.

This is a simple model, not a measurement: a step is its computation, then the exchange of its gradients.
benchmarks/data_parallel.py compares the formula with measured steps.

    python benchmarks/scaling_model.py                    # prints the tables
    python benchmarks/scaling_model.py --write            # and writes docs/reference/scaling.md
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sections import write_section

__all__ = ["Network", "all_reduce", "fit_ring", "ring"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "scaling.md"

SIZES = (8, 16, 64, 256, 1024)
MODELS = {"110 M": 110e6, "1.3 B": 1.3e9, "7 B": 7e9}
TYPICAL = "1.3 B"
FLOPS = 989e12  # an H100 SXM, bfloat16, dense: NVIDIA's data sheet
UTILISATION = 0.4
REACHED = 0.8  # fraction of a link's bandwidth
TOKENS = 8192  # per GPU and update
BUCKET = 25 * 2**20
FORWARD = 1 / 3  # fraction of a step's computation
WIDTHS = {"float32": 4, "bfloat16": 2, "bfloat16, with ZeRO-1": 3}
WANTED = 0.9


def ring(size: int, nbytes: float, bandwidth: float, latency: float = 0.0, calls: int = 1) -> float:
    """Returns the seconds of a ring all-reduce (Patarasuk and Yuan 2009).

    Args:
        size: The number of processes.
        nbytes: The bytes of all tensors together.
        bandwidth: Bytes per second that each process can send while it receives as many.
        latency: Seconds of a message, whatever its size.
        calls: The number of tensors, reduced one after another.
    """
    return 2 * (size - 1) / size * nbytes / bandwidth + 2 * (size - 1) * latency * calls


def fit_ring(size: int, measured: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the bandwidth and latency with which :func:`ring` best fits measured times.

    Args:
        size: The number of processes.
        measured: Bytes and seconds of all-reduces, with equal weights: errors are relative.
    """
    rows = [(1 / seconds, 2 * (size - 1) / size * nbytes / seconds) for nbytes, seconds in measured]
    # Least squares of: nothing * one + inverse * sent = 1.
    ones, mixed, sent = (sum(a * b for a, b in pairs) for pairs in _products(rows))
    sum_one, sum_sent = (sum(row[place] for row in rows) for place in (0, 1))
    determinant = ones * sent - mixed**2
    nothing = max((sum_one * sent - sum_sent * mixed) / determinant, 0.0)
    inverse = (ones * sum_sent - mixed * sum_one) / determinant
    return 1 / inverse, nothing / (2 * (size - 1))


def _products(rows: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    return [[(row[a], row[b]) for row in rows] for a, b in ((0, 0), (0, 1), (1, 1))]


@dataclass(frozen=True)
class Network:
    """Machines of several GPUs.

    Attributes:
        name: The name in the tables.
        gpus: The number of GPUs of a machine.
        within: Bytes per second that each GPU sends, while it receives as many, within its machine.
        between: The same between machines.
        latency_within: Seconds of a message within a machine.
        latency_between: Seconds of a message between machines.
    """

    name: str
    gpus: int
    within: float
    between: float
    latency_within: float
    latency_between: float


INFINIBAND = Network("NVLink; InfiniBand, 400 Gb/s a GPU", 8, 450e9, 50e9, 3e-6, 10e-6)
ETHERNET = Network("NVLink; Ethernet, 100 Gb/s a machine", 8, 450e9, 12.5e9 / 8, 3e-6, 30e-6)
NETWORKS = (INFINIBAND, ETHERNET)


def all_reduce(network: Network, size: int, nbytes: float, calls: int = 1, trees: bool = True) -> float:
    """Returns the seconds of an all-reduce in two levels: within machines, and of each part between machines.

    Two binary trees send as much as a ring, with fewer consecutive messages (Sanders, Speck and Traeff 2009); NCCL has
    both and chooses.

    Args:
        network: The machines.
        size: The number of GPUs; if more than one machine has, they must fill machines.
        nbytes: The bytes of all tensors together.
        calls: The number of tensors, reduced one after another.
        trees: Whether machines form trees instead of a ring.
    """
    inner = min(size, network.gpus)
    machines = size // inner
    inside = ring(inner, nbytes, REACHED * network.within, network.latency_within, calls)
    outside = ring(machines, nbytes / inner, REACHED * network.between)
    return inside + outside + hops(machines, trees) * network.latency_between * calls


def hops(size: int, trees: bool) -> int:
    """Returns the number of consecutive messages in an all-reduce: in a ring, or in two binary trees."""
    return 2 * (math.ceil(math.log2(size)) if trees else size - 1)


def compute(parameters: float, tokens: float = TOKENS) -> float:
    """Returns the seconds of a forward and backward pass: 6 operations per parameter and token (Kaplan et al. 2020)."""
    return 6 * parameters * tokens / (UTILISATION * FLOPS)


def calls(parameters: float, bucket: float = BUCKET) -> int:
    """Returns the number of buckets; their size is that of float32 gradients, whatever dtype is sent."""
    return math.ceil(4 * parameters / bucket)


def shares_computing(parameters: float, network: Network, size: int, width: float) -> tuple[float, float]:
    """Returns the fraction of a step that computes: with the exchange after it, and hidden behind the backward pass.

    Args:
        parameters: The number of parameters of the model.
        network: The machines.
        size: The number of GPUs.
        width: The bytes of a gradient's element.
    """
    busy, exchange = compute(parameters), all_reduce(network, size, parameters * width, calls(parameters))
    return busy / (busy + exchange), busy / (FORWARD * busy + max((1 - FORWARD) * busy, exchange))


def exchange_table() -> list[str]:
    """Returns the table of milliseconds."""
    lines = [
        f"| parameters | computation, ms | network | {' | '.join(f'{size} GPUs, ms' for size in SIZES)} |",
        "|---|---|---|" + "---|" * len(SIZES),
    ]
    for name, parameters in MODELS.items():
        for network in NETWORKS:
            found = [all_reduce(network, size, 4 * parameters, calls(parameters)) for size in SIZES]
            cells = " | ".join(f"{seconds * 1e3:,.0f}" for seconds in found)
            lines.append(f"| {name} | {compute(parameters) * 1e3:,.0f} | {network.name} | {cells} |")
    return lines


def efficiency_table() -> list[str]:
    """Returns the table of the efficiency of N GPUs, which hardly depends on the number of parameters."""
    lines = [
        f"| network | gradients sent as | {' | '.join(f'{size} GPUs' for size in SIZES)} |",
        "|---|---|" + "---|" * len(SIZES),
    ]
    for network in NETWORKS:
        for dtype, width in WIDTHS.items():
            found = [shares_computing(MODELS[TYPICAL], network, size, width) for size in SIZES]
            cells = " | ".join(f"**{after:.0%}** ({behind:.0%})" for after, behind in found)
            lines.append(f"| {network.name} | {dtype} | {cells} |")
    return lines


def tokens_table() -> list[str]:
    """Returns the table of tokens for a given computing fraction; without latencies it holds for any model."""
    sizes = (8, 64, 1024)
    lines = [
        f"| network | gradients sent as | {' | '.join(f'{size} GPUs' for size in sizes)} |",
        "|---|---|" + "---|" * len(sizes),
    ]
    for network in NETWORKS:
        for dtype, width in WIDTHS.items():
            per_parameter = [all_reduce(network, size, width, 0) for size in sizes]
            tokens = [WANTED / (1 - WANTED) * seconds / compute(1, 1) for seconds in per_parameter]
            lines.append(f"| {network.name} | {dtype} | {' | '.join(f'{count:,.0f}' for count in tokens)} |")
    return lines


def buckets_table() -> list[str]:
    """Returns the table of the overhead of many buckets."""
    size, parameters = SIZES[-1], MODELS[TYPICAL]
    lines = ["| `bucket_cap_mb` | buckets | network | trees, ms | rings, ms |", "|---|---|---|---|---|"]
    for limit in (25, 100, 400):
        count = calls(parameters, limit * 2**20)
        for network in NETWORKS:
            cells = (f"{all_reduce(network, size, 0, count, trees) * 1e3:,.0f}" for trees in (True, False))
            lines.append(f"| {limit} | {count} | {network.name} | {' | '.join(cells)} |")
    return lines


def memory_table() -> list[str]:
    """Returns the table of a process's float32 memory without activations: with Adam, two moments."""
    lines = [
        "| parameters | weights, GB | gradients, GB | moments, GB | all, GB "
        f"| {' | '.join(f'ZeRO-1 on {size}, GB' for size in SIZES)} |",
        "|---|---|---|---|---|" + "---|" * len(SIZES),
    ]
    for name, parameters in MODELS.items():
        each = 4 * parameters / 1e9
        cells = " | ".join(f"{2 * each + 2 * each / size:.3g}" for size in SIZES)
        lines.append(f"| {name} | {each:.3g} | {each:.3g} | {2 * each:.3g} | **{4 * each:.3g}** | {cells} |")
    return lines


TABLES = {
    "exchange": exchange_table,
    "efficiency": efficiency_table,
    "tokens": tokens_table,
    "buckets": buckets_table,
    "memory per process": memory_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    for name, table in TABLES.items():
        text = "\n".join(table())
        print(f"{name}\n\n{text}\n")
        if arguments.write:
            write_section(PAGE, name, text)


if __name__ == "__main__":
    main()
