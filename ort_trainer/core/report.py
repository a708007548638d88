"""What a trainer or an ``ORTModule`` has run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_MEGA = 1e6


@dataclass(frozen=True)
class GraphRuns:
    """A graph and its runs.

    Attributes:
        name: What it computes: ``training``, ``evaluation``, or the name of a method.
        runs: How often it has run.
        kernels: Whose kernels compute it.
        seconds: How long this process took to export it, or to load it from the cache.
        file: The cache file; empty if there is none.
        with_backward: Whether a method's backward pass is a graph beside it.
    """

    name: str
    runs: int
    kernels: str
    seconds: float
    file: str = ""
    with_backward: bool = False


@dataclass(frozen=True)
class Report:
    """What has run; ``print()`` shows it.

    Attributes:
        title: Of whom.
        graphs: The graphs that are in use, in the order in which they were made.
        in_pytorch: Why PyTorch ran calls instead of a graph -> how many.
        verified: The last run that was compared with PyTorch's, 0 for none; see the option ``debug.verify_every``.
        memory: What takes memory -> bytes.
    """

    title: str
    graphs: tuple[GraphRuns, ...]
    in_pytorch: Mapping[str, int]
    verified: int
    memory: Mapping[str, int]

    def __str__(self) -> str:
        lines = [self.title]
        for graph in self.graphs:
            file = f", cached as {graph.file}" if graph.file else ""
            made = f"made in {graph.seconds:.1f} s" if graph.seconds else "made before"
            name = f"{graph.name} with its backward pass" if graph.with_backward else graph.name
            runs = "1 run" if graph.runs == 1 else f"{graph.runs} runs"
            lines.append(f"{name}: {runs} on {graph.kernels} kernels, {made}{file}")
        for reason, count in self.in_pytorch.items():
            lines.append(f"in PyTorch, {count} calls: {', '.join(map(str.strip, reason.splitlines()[:2]))}")
        lines.append(f"compared with PyTorch: {f'run {self.verified} at last' if self.verified else 'none yet'}")
        lines.append("memory: " + ", ".join(f"{name} {size / _MEGA:.3g} MB" for name, size in self.memory.items()))
        return "\n  ".join(lines)


def _nbytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def peak_memory() -> int | None:
    """Returns the highest resident memory of this process in bytes; None on Windows."""
    try:
        import resource
    except ImportError:
        return None
    # In bytes on macOS, and in KiB elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memory_of(weights: Iterable[Any], gradients: Iterable[Any]) -> dict[str, int]:
    """Returns the memory of a training in bytes, by what takes it."""
    peak = peak_memory()
    process = {} if peak is None else {"the process at most": peak}
    return {"weights": _nbytes(weights), "gradients": _nbytes(gradients), **process}
