"""Ctrl-C at any moment: a step is either complete or not begun."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ort_trainer import ORTTrainer, optim
from ort_trainer.core.interrupts import uninterrupted

from ..helpers import MLP, mlp_batches, mlp_trainer

STEPS = 1500
BATCHES = mlp_batches(7, size=64)


def make_trainer() -> ORTTrainer:
    torch.manual_seed(0)
    options = {
        "batch": {"gradient_accumulation_steps": 3},
        "lr_scheduler": optim.LinearWarmupLRScheduler(total_steps=STEPS, warmup=0.5),
        "mixed_precision": {"enabled": True, "dtype": "float16"},
    }
    trainer = mlp_trainer(options, model=MLP(dropout=0.5, hidden=64))
    trainer.prepare(BATCHES[0])
    return trainer


def train(trainer: ORTTrainer, steps: int) -> None:
    while (step := trainer.train_step_info.step) < steps:
        trainer.train_step(*BATCHES[step % len(BATCHES)])


def same(first: object, second: object) -> bool:
    if isinstance(first, dict):
        return (
            isinstance(second, dict) and first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
        )
    equal: Any = first == second
    return bool(equal.all()) if hasattr(first, "all") else equal


class Interrupter(threading.Thread):
    """Sends SIGINT to this process at random moments, each one only after the last has arrived."""

    def __init__(self, count: int) -> None:
        super().__init__(daemon=True)
        self.left = count
        self.arrived = threading.Event()

    def run(self) -> None:
        generator = random.Random(0)
        while self.left:
            time.sleep(generator.random() * 2e-3)
            self.arrived.wait()
            self.arrived.clear()
            self.left -= 1
            os.kill(os.getpid(), signal.SIGINT)


def test_interrupted_steps_are_done_or_not_begun(tmp_path: Path) -> None:
    expected = make_trainer()
    train(expected, STEPS)
    trainer, other = make_trainer(), make_trainer()
    interrupter = Interrupter(300)
    interrupter.start()
    found = 0
    while trainer.train_step_info.step < STEPS or interrupter.left:
        try:
            interrupter.arrived.set()
            train(trainer, STEPS if interrupter.left < 250 else STEPS // 2)
            time.sleep(1e-3)
        except KeyboardInterrupt:
            found += 1
            info, window = trainer.train_step_info, trainer.state_dict()["window"]
            assert (info.optimization_step, window["micro_batches"]) == divmod(info.step, 3)
            if found % 50 == 0:
                trainer.save_checkpoint(tmp_path / f"{found}.ortckpt")
                other.load_checkpoint(tmp_path / f"{found}.ortckpt")
                assert same(other.state_dict(), trainer.state_dict())
    assert found == 300
    assert same(trainer.state_dict(), expected.state_dict())


def test_handlers_run_at_the_end_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT)}
    signal.signal(signal.SIGUSR1, lambda *_: order.append("user"))
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGUSR1)
                signal.raise_signal(signal.SIGINT)
            order.append("inner done")
            signal.raise_signal(signal.SIGUSR1)
            order.append("outer done")
        assert order == ["inner done", "outer done", "user", "user"]
        assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_error_inside_is_raised_and_other_threads_are_left_alone() -> None:
    with pytest.raises(ValueError, match="inside"), uninterrupted():
        raise ValueError("inside")
    ran: list[bool] = []

    def work() -> None:
        with uninterrupted():
            ran.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [True]
