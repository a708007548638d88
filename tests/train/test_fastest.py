"""``utils.kernels="fastest"``: loops are compiled while training goes on, and what is faster in steps stays."""

from __future__ import annotations

import copy
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim

from ..helpers import assert_close, assert_same_weights
from ..racing import fix_race, needs_compiler


def trainer_of(model: nn.Module, **debug: Any) -> ORTTrainer:
    options = {"utils": {"kernels": "fastest", "grad_norm_clip": False}, "debug": debug}
    return ORTTrainer(
        model, "auto", optim.AdamConfig(lr=0.01), loss_fn=F.cross_entropy, options=ORTTrainerOptions(options)
    )


def net(dropout: float = 0.3) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 3)
    )


def batches() -> Any:
    draw = torch.Generator().manual_seed(4)
    while True:
        yield torch.randn(5, 6, generator=draw), torch.randint(0, 3, (5,), generator=draw)


def loops_run(trainer: ORTTrainer) -> list[bool]:
    """Returns of each training graph, the preferred first, whether it has loops."""
    steps = trainer._loop.executor.graphs(True)  # type: ignore[union-attr]
    return ["loops.cpp" in "".join(step.programs.programs.values()) for step in steps]  # type: ignore[union-attr]


@needs_compiler
@pytest.mark.parametrize("loops_win", [True, False])
def test_the_faster_kernels_stay(
    loops_win: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Losses and weights are PyTorch's before, during and after; the next trainer begins with the choice."""
    fix_race(monkeypatch, tmp_path, loops_win)
    caplog.set_level(logging.INFO, "ort_trainer")
    model = net(0.0)
    reference = copy.deepcopy(model)
    ours, drawn = trainer_of(model), batches()
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.01)

    def step() -> None:
        x, label = next(drawn)
        loss = ours.train_step(x, label)[0]
        optimizer.zero_grad()
        expected = F.cross_entropy(reference(x), label)
        expected.backward()
        optimizer.step()
        assert_close(loss.squeeze(), expected.detach(), 1e-4, "loss")

    step()
    assert loops_run(ours) == [False] and "compiling loops while training goes on" in caplog.text
    end = time.monotonic() + 100
    while "training goes on with" not in caplog.text and time.monotonic() < end:
        step()
        if not ours._loop.executor._turns:  # type: ignore[union-attr]
            time.sleep(0.2)  # leaves the processor to the compiler
    kernels = "compiled loops" if loops_win else "PyTorch's kernels"
    assert f"training goes on with {kernels}" in caplog.text
    for _ in range(5):
        step()
    assert_same_weights(ours, reference, 1e-4)
    assert loops_run(ours)[0] is loops_win
    caplog.clear()
    again = trainer_of(net(0.0))
    again.train_step(*next(drawn))
    assert loops_run(again) == [loops_win]
    assert f"these kernels were chosen in an earlier run: {kernels}, as a step's passes took" in caplog.text
    assert f"computed by PyTorch's kernels{' and compiled loops' * loops_win}: {tmp_path}" in caplog.text
    assert "compiling" not in caplog.text


def test_where_nothing_can_be_compiled_it_is_auto(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ORT_TRAINER_CACHE", "off")
    monkeypatch.delenv("ORT_TRAINER_EXPORT_IN_PROCESS", raising=False)
    caplog.set_level(logging.INFO, "ort_trainer")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    trainer_of(net()).train_step(*next(batches()))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    ours = trainer_of(net())
    ours.train_step(*next(batches()))
    if sys.platform == "linux":
        assert "training stays on PyTorch's kernels: there is one core only" in caplog.text
        assert "training stays on PyTorch's kernels: compiled loops need a C++ compiler" in caplog.text
    assert loops_run(ours) == [False]


@needs_compiler
def test_a_compilation_that_is_killed_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ORT_TRAINER_CACHE", "off")
    monkeypatch.delenv("ORT_TRAINER_EXPORT_IN_PROCESS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    caplog.set_level(logging.INFO, "ort_trainer")
    ours, drawn = trainer_of(net()), batches()
    ours.train_step(*next(drawn))
    ((compilation, _),) = ours._loop.graphs._compilations.running
    os.kill(compilation._child, signal.SIGKILL)
    end = time.monotonic() + 20
    while ours._loop.graphs._compilations.running and time.monotonic() < end:
        ours.train_step(*next(drawn))
    assert "training stays on PyTorch's kernels: the process that compiled has died" in caplog.text
    ours.train_step(*next(drawn))


def test_what_it_does_not_go_with() -> None:
    with pytest.raises(ValueError, match="deterministic_compute is True, but utils.kernels is 'fastest'"):
        trainer_of(net(), deterministic_compute=True)
    with pytest.raises(ValueError, match="check_indices is False, but utils.kernels is 'fastest'"):
        trainer_of(net(), check_indices=False)
