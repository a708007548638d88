"""Model types drawn by lot from the registries of transformers, timm and torch_geometric, and the layers of torch.nn.

Each is made small by the names of its settings (model_types.py), and trained in eager PyTorch, by an `ORTTrainer` and
by an `ORTModule`, with the dropout that it has by default and without. tests/fuzz judges: wrong is what differs by more
than PyTorch does after its weights were changed by one rounding. Each type has a process, seconds and memory of its
own. A library that isn't installed is left out, and so is a type that PyTorch can't train with arguments made up from
their names.

    python benchmarks/population.py --minutes 20                # a fresh seed, which is printed
    python benchmarks/population.py --seed 7 --count 100
    python benchmarks/population.py --only transformers:BertModel
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import logging
import os
import random
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.model_types import SIZES, Drawn, drawn, types, without_dropout  # noqa: E402
from tests import processes  # noqa: E402
from tests.fuzz.compare import BAD, compare  # noqa: E402
from tests.fuzz.program import source  # noqa: E402
from tests.fuzz.recipe import Recipe  # noqa: E402

WAYS = {"pytorch": "trainer", "module": "module"}
SHARES = {"transformers": 0.7, "timm": 0.1, "geometric": 0.1, "torch": 0.1}
"""Library -> its part of the draws."""
SECONDS, GIGABYTES = 240, 10
"""Limits of one type: its processor time, and the memory of its process."""
RATE = 0.02
_CLOCK: list[tuple[str, list[float]]] = []
"""(way, moments at which its steps began)."""


def made(name: str, seed: int, with_dropout: bool) -> tuple[Drawn, nn.Module]:
    """Returns how a type is called, and a model."""
    with torch.random.fork_rng([]):
        kind = drawn(name)
    torch.manual_seed(seed)
    model = kind.make()
    if not with_dropout:
        without_dropout(model)
    return kind, model


def started(step: int) -> None:
    """Records that a step begins."""
    _CLOCK[-1][1].append(time.perf_counter())


# What replaces the model and the data of a drawn program.
_PROGRAM = """
from benchmarks import model_types, population
kind, model = population.made({name!r}, {seed}, {dropout})
IN_FORWARD, KEYWORDS, change = kind.has_loss, True, population.started
loss_fn = model_types.loss_outside
start = {{name: value.detach().clone() for name, value in model.named_parameters()}}
def batch(step):
    arguments = kind.arguments(*SIZES[step], torch.Generator().manual_seed({seed} + step))
    return (*arguments.values(), *([] if IN_FORWARD else [torch.tensor(0.5)]))
NAMES = (*kind.arguments(*SIZES[0], torch.Generator()), *([] if IN_FORWARD else ["goal"]))
LABELS = 0 if IN_FORWARD else 1
def face(*values):
    return values
def optimizer():
    return torch.optim.SGD(model.parameters(), lr={rate})
def config():
    return optim.SGDConfig(lr={rate})
def state():
    # The sum of the gradients, which may be small beside the weights.
    return [(value.detach() - start[name]) / {rate} for name, value in model.named_parameters()]
"""


def judge(name: str, seed: int, seconds: int) -> None:
    """Prints the outcome of each variant of a type as a line of JSON, from a process of its own."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30,) * 2)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    recipe = Recipe(seed, sizes=SIZES, ways=tuple(WAYS))
    try:
        variants = [True, False] if without_dropout(drawn(name).make()) else [True]
    except TypeError as error:
        print(json.dumps({"as it is": {"case": ["dropped", str(error), ""]}}))
        return
    for dropout in variants:
        _CLOCK[:] = [("eager", [])]
        text = _PROGRAM.format(name=name, seed=seed, dropout=dropout, rate=RATE)
        outcomes = compare(recipe, source(recipe) + text, lambda way: _CLOCK.append((way, [])))
        steps = {way: min((b - a for a, b in itertools.pairwise(times)), default=0.0) for way, times in _CLOCK}
        said = {}
        for way, outcome in outcomes.items():
            ratio = f"{steps['eager'] / steps[way]:.2f}" if steps.get(way) else ""
            said[way] = [outcome.kind, " ".join(outcome.text.split()), outcome.place, ratio]
        print(json.dumps({"as it is" if dropout else "without dropout": said}), flush=True)


_ENVIRONMENT = {"ORT_TRAINER_EXPORT_IN_PROCESS": "1", "ORT_TRAINER_PROGRESS": "0", "ORT_TRAINER_CACHE": "off"}


def outcomes_of(name: str, seed: int, seconds: int) -> dict[str, dict[str, list[str]]]:
    """Returns variant -> way -> kind of outcome, its text, the place of an error, and the speed relative to eager."""
    call = processes.Call(judge, (name, seed, seconds), {**os.environ, **_ENVIRONMENT, "OMP_NUM_THREADS": "1"})
    (ended,) = processes.run([call], 5 * SECONDS)  # on a busy machine
    lines = [json.loads(line) for line in ended.output.splitlines() if line.startswith('{"')]
    found = dict(itertools.chain(*(line.items() for line in lines)))
    if ended.code != 0:
        last = (ended.output.strip().splitlines() or ["no output"])[-1]
        kind = "dropped" if ended.code == -signal.SIGXCPU and seconds < SECONDS else "crash"
        found["its process"] = {"case": [kind, f"ended with {ended.code}, of {seconds} s: {last[:200]}", "", ""]}
    return found


def draws(seed: int) -> Iterator[str]:
    """Yields names of types, each once."""
    draw = random.Random(f"population {seed}")
    left = {library: draw.sample(names, len(names)) for library, names in types().items()}
    while left:
        (library,) = draw.choices([*left], [SHARES[library] for library in left])
        yield f"{library}:{left[library].pop()}"
        left = {library: names for library, names in left.items() if names}


class Survey:
    """The outcomes of the types that were drawn.

    Args:
        seed: Of weights and data.
        seconds: The processor time of a type; one that takes more is a failure only at the default.

    Attributes:
        seed: As given.
        counts: (way, kind of outcome) -> number of trainings.
        failures: Lines of types that are wrong, or stop without a way out.
    """

    def __init__(self, seed: int, seconds: int = SECONDS) -> None:
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.failures: list[str] = []
        self.types = 0
        self.seed, self._seconds = seed, seconds

    def take(self, name: str) -> str:
        """Trains a type, and returns its line."""
        start, parts = time.monotonic(), []
        outcomes = outcomes_of(name, self.seed, self._seconds)
        is_type = any(way in WAYS for variant in outcomes.values() for way in variant) or "its process" in outcomes
        self.types += is_type
        for variant, ways in outcomes.items():
            for way, (kind, text, place, *ratio) in ways.items():
                kind = "in PyTorch" if text.startswith("in PyTorch") else kind
                self.counts[WAYS.get(way, way), kind] += 1
                parts.append(f"{variant}, {WAYS.get(way, way)}: {kind} {''.join(ratio)} {text} {place}".strip())
                if kind in BAD:
                    self.failures.append(f"{name} {parts[-1]}")
        return f"{name} ({time.monotonic() - start:.0f} s)\n" + "\n".join(f"    {part[:400]}" for part in parts)

    def summary(self) -> str:
        """Returns what ran, and what came out."""
        lines = [f"{self.types} types that PyTorch trains"]
        lines += [f"  {way}: {count} {kind}" for (way, kind), count in sorted(self.counts.items())]
        return "\n".join([*lines, f"{len(self.failures)} failures", *self.failures])


def main() -> int:
    """Runs the command; returns 1 if a type is wrong or stops without a way out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--count", type=int, default=10**6, help="of types that PyTorch trains")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", nargs="+", help="names such as transformers:BertModel")
    given = parser.parse_args()
    print(f"--seed {given.seed}", flush=True)
    survey, end = Survey(given.seed), time.monotonic() + 60 * given.minutes
    for name in given.only or draws(given.seed):
        if survey.types >= given.count or time.monotonic() > end:
            break
        print(survey.take(name), flush=True)
    print(survey.summary())
    return int(bool(survey.failures))


if __name__ == "__main__":
    from benchmarks import population  # as the processes and the programs import it

    sys.exit(population.main())
