"""Compares the graphs that a changing model needs with the compilations of TorchDynamo, for docs/models.md.

    python benchmarks/recompilations.py

Each of the random programs of ``tests/outside/programs.py`` reads a setting that changes after the second
of five steps, or leaves a value in each, in one of 68 kinds of places. It trains in a trainer, in an ``ORTModule``,
and compiled by Dynamo with a backend that runs its graphs as they are. Where Dynamo breaks the model's graph, it
compiles several parts in a step: each step in which it compiles counts once.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from ort_trainer import ORTModule, ORTTrainer, ORTTrainerOptions, optim
from tests.outside.programs import KINDS, in_a_loop, programs, trained

COLUMNS = ("Dynamo", "trainer", "ORTModule")


def of_dynamo(used: Any) -> tuple[list[float], int]:
    """Returns the losses of a program, and the number of steps in which Dynamo compiled."""
    steps: set[int] = set()
    number = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        steps.add(number)
        return graph.forward

    torch._dynamo.reset()
    compiled: Any = torch.compile(used.model, backend=backend)
    train_step = in_a_loop(compiled)

    def counted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number += 1
        return train_step(x, y)

    return trained(used, counted), len(steps)


def of_trainer(used: Any) -> tuple[list[float], int]:
    """Returns the losses of a program, and the number of graphs."""
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False}})
    trainer = ORTTrainer(used.model, "auto", optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy, options=options)
    losses = trained(used, lambda x, y: trainer.train_step(x, y)[0])
    assert trainer.session is not None
    return losses, len(trainer.session.graphs(True))


def of_module(used: Any) -> tuple[list[float], int]:
    """Returns the losses of a program, and the number of graphs of its wrapped module."""
    wrapped = ORTModule(used.model)
    losses = trained(used, in_a_loop(wrapped))
    return losses, sum(map(len, wrapped._graphs._by_kind.values()))


def main() -> None:
    """Prints the kinds for each combination of numbers, and then the kinds that need more graphs than Dynamo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="what sizes, numbers and uses are drawn from")
    parser.add_argument("--only", default="", help="a part of the names of the kinds to run")
    arguments = parser.parse_args()
    os.environ.setdefault("ORT_TRAINER_EXPORT_IN_PROCESS", "1")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: dict[tuple[int, ...], list[str]] = collections.defaultdict(list)
    more, wrong = [], []
    for how, kind in KINDS:
        for seed in arguments.seeds:
            name = f"{how}: {kind}"
            if arguments.only not in name:
                continue
            counts = []
            for column, run in zip(COLUMNS, (of_dynamo, of_trainer, of_module), strict=True):
                used, reference = programs(how, kind, seed)
                losses, count = run(used)
                counts.append(count)
                expected = torch.tensor(trained(reference, in_a_loop(reference.model)))
                states = used.state().float(), reference.state().float()
                if not (torch.allclose(torch.tensor(losses), expected) and torch.allclose(*states)):
                    wrong.append(f"{name} in {column}")
                for each in (used, reference):
                    del sys.modules[each.__name__]
            rows[tuple(counts)].append(name)
            if max(counts[1:]) > counts[0]:
                more.append(name)
    print(f"| {' | '.join(COLUMNS)} | programs |\n|{'---|' * (len(COLUMNS) + 1)}")
    for found, names in sorted(rows.items()):
        print(f"| {' | '.join(map(str, found))} | {len(names)}: {', '.join(dict.fromkeys(names))} |")
    print(f"\nMore graphs than Dynamo's compilations: {', '.join(more) or 'none'}.")
    print(f"Other losses than PyTorch's: {', '.join(wrong) or 'none'}.")


if __name__ == "__main__":
    main()
