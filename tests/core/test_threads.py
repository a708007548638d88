"""One thread at a time: who is inside, who is refused, and who is gone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ort_trainer.core.forked import forked
from ort_trainer.core.threads import OneThread, turns
from ort_trainer.module import ORTModule

from ..helpers import mlp_batches, mlp_trainer


def in_thread(work: Callable[[], Any]) -> Any:
    """Returns what a function returns or raises in another thread."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_enters_again_and_then_another_one() -> None:
    guard = OneThread("it")
    assert guard.enter() and not guard.enter()
    guard.leave()
    assert in_thread(guard.enter)


def test_a_thread_that_is_gone_or_was_interrupted_is_not_inside() -> None:
    """An interrupt may come between the end of a call and the note of it."""
    guard = OneThread("it")
    assert in_thread(guard.enter) and guard.enter()
    assert in_thread(guard.enter), "this thread runs, but nothing of the package"


def test_a_forked_child_is_free_of_the_parents_other_threads() -> None:
    lock, guard, held, done = turns(), OneThread("it"), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            guard.enter()
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert not lock.acquire(blocking=False)
    child, reader = forked(lambda pipe: os.write(pipe, bytes([lock.acquire(blocking=False), guard.enter()])) and None)
    done.set()
    thread.join()
    os.waitpid(child, 0)
    assert os.read(reader, 2) == bytes([True, True])
    os.close(reader)


def test_a_trainer_refuses_a_second_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    trainer, batch = mlp_trainer(), mlp_batches(1)[0]
    trainer.train_step(*batch)
    session = trainer.session
    assert session is not None
    bind, inside, go_on = trainer.loop.bind, threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "slow" and not inside.is_set():
            inside.set()
            go_on.wait()
            trainer.eval_step(*batch)  # the same thread, as in a hook
        return bind(*args, **kwargs)

    monkeypatch.setattr(trainer.loop, "bind", slow)
    state = trainer.state_dict()
    thread = threading.Thread(target=lambda: trainer.train_step(*batch), name="slow")
    thread.start()
    inside.wait()
    try:
        for call in (
            lambda: trainer.train_step(*batch),
            lambda: trainer.eval_step(*batch),
            lambda: trainer.predict(batch[0]),
            lambda: trainer.forward(*batch),
            lambda: trainer.forward_backward(*batch),
            trainer.optimizer_step,
            trainer.lazy_reset_grad,
            trainer.prepare,
            trainer.state_dict,
            lambda: trainer.load_state_dict(state),
            lambda: trainer.save_checkpoint(tmp_path / "x"),
            lambda: trainer.load_checkpoint(tmp_path / "x"),
            lambda: trainer.save_as_onnx(tmp_path / "x"),
            lambda: trainer.export_for_inference(tmp_path / "x"),
            lambda: trainer.export_artifacts(tmp_path / "x"),
            lambda: trainer.set_parameter("fc1.bias", torch.zeros(16)),
            lambda: trainer.get_gradient("fc1.bias"),
            lambda: setattr(trainer, "gradient_accumulation_steps", 2),
            trainer.profile,
            lambda: session.train_step(batch),
            lambda: session.eval_step(batch),
            lambda: session.set_learning_rate(0.1),
            session.optimizer_step,
        ):
            with pytest.raises(RuntimeError, match="MLP is in use by another thread, .slow.: only one thread"):
                call()
        assert not list(tmp_path.iterdir()) and trainer.train_step_info.step == 1
    finally:
        go_on.set()
        thread.join()
    assert trainer.train_step_info.step == 2
    trainer.train_step(*batch)
    in_thread(lambda: trainer.train_step(*batch))
    assert trainer.train_step_info.step == 4


@pytest.mark.parametrize("kernels", ["pytorch", "onnxruntime"])
def test_threads_take_turns_in_a_module(kernels: str) -> None:
    """Forward passes with other shapes and numbers, and backward passes in between, give PyTorch's results."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
            return torch.tanh(self.fc(x) * factor)

    net = Scaled()
    model = ORTModule(net, {"utils": {"kernels": kernels}}, fallback="error")

    xs = {size: torch.randn(size, 8, requires_grad=True) for size in (3, 5)}
    expected = {(size, factor): net(x, factor).detach() for size, x in xs.items() for factor in range(7)}

    for size, factor in expected:  # exports them, for which PyTorch changes all modules of the process for a while
        model(xs[size], float(factor))

    def work(size: int) -> bool:
        for step in range(60):
            factor = (step + size) % 7
            y = model(xs[size], float(factor))
            torch.testing.assert_close(y, expected[size, factor])
            (gradient,) = torch.autograd.grad(y.sum(), xs[size])
            torch.testing.assert_close(gradient, ((1 - y * y) * factor) @ net.fc.weight)
        return True

    found: list[bool] = []
    threads = [threading.Thread(target=lambda size=size: found.append(work(size))) for size in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True, True]
