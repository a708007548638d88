"""Several trainers in threads, and beside workers of data loaders: each gets the same numbers as alone."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ort_trainer import ORTTrainer
from tests.helpers import MLP, assert_same_state, mlp_batches, mlp_trainer

STEPS = 12


def make(number: int, kernels: str) -> ORTTrainer:
    """Returns a trainer; its size, precision and seed depend on the number."""
    torch.manual_seed(number)
    options: dict[str, Any] = {"utils": {"kernels": kernels}, "batch": {"gradient_accumulation_steps": number + 1}}
    if number:
        options["mixed_precision"] = {"enabled": True, "dtype": "float16"}
    trainer = mlp_trainer(options, model=MLP(dropout=0.5, hidden=16 * (number + 1)))
    trainer.prepare(mlp_batches(1)[0])
    return trainer


def train(trainer: ORTTrainer, number: int) -> None:
    for x, label in mlp_batches(STEPS, size=8 + number, seed=number):
        trainer.train_step(x, label)
        trainer.eval_step(x, label)


@pytest.mark.engine
@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
def test_interleaved_and_in_threads_as_alone(kernels: str) -> None:
    alone, mixed, threaded = ([make(number, kernels) for number in (0, 1)] for _ in range(3))
    for number in (0, 1):
        train(alone[number], number)
    batches = [mlp_batches(STEPS, size=8 + number, seed=number) for number in (0, 1)]
    for pair in zip(*batches, strict=True):
        for trainer, batch in zip(mixed, pair, strict=True):
            trainer.train_step(*batch)
            trainer.eval_step(*batch)
    together = threading.Barrier(2)

    def work(number: int) -> None:
        together.wait()
        train(threaded[number], number)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for number in (0, 1):
        assert_same_state(mixed[number].state_dict(), alone[number].state_dict())
        assert_same_state(threaded[number].state_dict(), alone[number].state_dict())


def test_an_error_in_one_thread_is_not_that_of_another() -> None:
    """PyTorch's kernels pass their errors around ONNX Runtime, through a record of the thread."""
    trainers = [mlp_trainer({"debug": {"check_indices": False}}) for _ in range(2)]
    (good, label), (bad, _) = mlp_batches(2)
    for trainer in trainers:
        trainer.train_step(good, label)
    failed = [0, 0]

    def work(number: int) -> None:
        for _ in range(100):
            try:
                trainers[number].train_step(bad, label + 3 * number)
            except (IndexError, RuntimeError):
                failed[number] += 1

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == [0, 100]
    assert [trainer.train_step_info.step for trainer in trainers] == [101, 1]


def loader(method: str | None) -> DataLoader:
    batches = mlp_batches(4, size=4)
    data = TensorDataset(torch.cat([x for x, _ in batches]), torch.cat([label for _, label in batches]))
    context = None if method is None else multiprocessing.get_context(method)
    return DataLoader(data, batch_size=4, num_workers=0 if method is None else 1, multiprocessing_context=context)


def with_workers(kernels: str, method: str | None, before_first_step: bool) -> ORTTrainer:
    """Trains with workers started before the export, or after a step."""
    torch.manual_seed(0)
    trainer = mlp_trainer({"utils": {"kernels": kernels}}, model=MLP(dropout=0.5))
    if not before_first_step:
        trainer.train_step(*mlp_batches(1)[0])
    for x, label in loader(method):
        trainer.train_step(x, label)
    return trainer


def test_workers_of_a_loader() -> None:
    """Runs in its own process with threads, which a forked worker lacks: if it waited for them, it would hang."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "tests.train.test_side_by_side"]
    done = subprocess.run(command, cwd=root, env=environment, timeout=180, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["fork", "fork", "spawn", "fork"]


def _compare_workers() -> None:
    for kernels, cases in (
        ("auto", [("fork", True), ("fork", False), ("spawn", False)]),
        ("onnxruntime", [("fork", False)]),
    ):
        expected = {first: with_workers(kernels, None, first).state_dict() for first in {first for _, first in cases}}
        for method, first in cases:
            assert_same_state(with_workers(kernels, method, first).state_dict(), expected[first])
            print(method, flush=True)


if __name__ == "__main__":
    _compare_workers()
