"""The cost of a step outside its graph: the Python part of a step whose model is one multiplication.

Each optimizer runs in a separate process, in alternating blocks. The graph's part is measured in the same steps, around
its one call, and subtracted; the rest is the trainer, including PyTorch's kernels of the weight update.

``ORTModule`` is a call with its backward pass, without an optimizer. Its own part is without its graphs, and without
what PyTorch takes for a call of a module that is one operator (``exp``), and for its backward pass.

    python benchmarks/step_overhead.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from versions import ENGINES, versions

from ort_trainer import ORTModule, ORTTrainer, optim
from ort_trainer.engine.programs.runner import ProgramRunner

OPTIMIZERS = ("SGDConfig", "AdamConfig")
MODULE = "ORTModule"
CONTENDERS = (*OPTIMIZERS, MODULE)
STEPS = 3000


class Multiply(nn.Module):
    """One multiplication."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss."""
        return (self.weight * x).sum()


class Timed:
    """A function that measures its calls.

    Args:
        function: The function.

    Attributes:
        seconds: In calls so far.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function."""
        start = time.perf_counter()
        found = self._function(*arguments)
        self.seconds += time.perf_counter() - start
        return found


class Exponential(nn.Module):
    """One operator without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the exponentials."""
        return x.exp()


def microseconds(function: Callable[[], Any]) -> float:
    """Returns the time of a call."""
    for _ in range(200):
        function()
    start = time.perf_counter()
    for _ in range(STEPS):
        function()
    return (time.perf_counter() - start) / STEPS * 1e6


def measure_module() -> None:
    """Prints the microseconds of a call of an ORTModule with its backward pass, and of what is not its own part."""
    torch.set_num_threads(1)
    module, x = ORTModule(Multiply()), torch.randn(8, 4)
    module(x).backward()
    runners = [found for found in gc.get_objects() if isinstance(found, ProgramRunner)]
    timed = [Timed(runner.run_programs) for runner in runners]
    for runner, function in zip(runners, timed, strict=True):
        runner.run_programs = function
    whole = microseconds(lambda: module(x).backward())
    inside = sum(function.seconds for function in timed) / (STEPS + 200) * 1e6
    leaf, single = torch.ones((), requires_grad=True), Exponential()
    least = microseconds(lambda: single(leaf).backward()) - microseconds(lambda: leaf.detach().exp())
    print(whole, inside + least)


def measure(optimizer: str) -> None:
    """Prints the microseconds of a step, and of the graph in it."""
    torch.set_num_threads(1)
    description = {"inputs": [("x", ["batch", 4])], "outputs": [("loss", [], True)]}
    trainer = ORTTrainer(Multiply(), description, getattr(optim, optimizer)(lr=1e-3))
    x = torch.randn(8, 4)
    for _ in range(200):
        trainer.train_step(x)
    plan = trainer.loop.bind((x,), {}).plan
    assert plan.function is not None
    graph = Timed(plan.function)
    object.__setattr__(plan, "function", graph)
    start = time.perf_counter()
    for _ in range(STEPS):
        trainer.train_step(x)
    print((time.perf_counter() - start) / STEPS * 1e6, graph.seconds / STEPS * 1e6)


def main() -> None:
    """Runs the blocks and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", choices=CONTENDERS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure_module() if arguments.measure == MODULE else measure(arguments.measure)
        return
    print(versions(["torch", *ENGINES]))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    for _ in range(arguments.rounds):
        for name in CONTENDERS:
            done = subprocess.run(
                [sys.executable, __file__, "--measure", name], check=True, capture_output=True, text=True
            )
            step, graph = map(float, done.stdout.split())
            found[name].append((step, graph))
    for name, rounds in found.items():
        step, graph = (statistics.median(values) for values in zip(*rounds, strict=True))
        own = statistics.median(step - graph for step, graph in rounds)
        print(f"{name:12} step {step:6.1f} us, not its own {graph:6.1f} us, Python part {own:6.1f} us")


if __name__ == "__main__":
    main()
