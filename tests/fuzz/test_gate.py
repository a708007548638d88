"""Some cases, which the commit determines, are trained as in PyTorch: others in every gate."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from .. import processes
from . import onnx_judge
from .recipe import draw
from .run import Fuzzer

# Processor seconds after which no case begins: a test may take 120, and the last case some 40. `make quick`, which
# takes three minutes in all, gets a few cases.
SECONDS, QUICK_SECONDS = 80.0, 10.0
# On a fast machine, so that the cases of a commit are the same on every one.
CASES = 60
GRAPHS, GRAPH_SECONDS = 40, 20.0


def test_onnx_graphs_of_this_commit(seed: int) -> None:
    outcomes, failures = onnx_judge.run(seed, GRAPHS, GRAPH_SECONDS)
    repeat = f"python -m tests.fuzz.onnx_judge --seed {seed}"
    assert not failures, f"{repeat} repeats it\n{failures}"
    assert outcomes["equal"] >= outcomes.total() / 2, outcomes


def test_cases_of_this_commit(seed: int, is_quick: bool, tmp_path: Path) -> None:
    seconds = QUICK_SECONDS if is_quick else SECONDS
    fuzzer = Fuzzer(tmp_path)
    try:
        for number in range(seed, seed + CASES):
            recipe = draw(number)
            # A compiler may take a minute for one case.
            ways = tuple(way for way in recipe.ways if "compiled" not in way)
            fuzzer.take(dataclasses.replace(recipe, ways=ways))
            if fuzzer.failures or fuzzer.worker.seconds > seconds:
                break
    finally:
        fuzzer.worker.close()
        processes.processor_seconds += fuzzer.worker.seconds
    assert not fuzzer.failures, f"make fuzz MINUTES=1 SEED={seed} repeats it\n{fuzzer.summary()}"
