from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch

from ort_trainer import ExportError
from ort_trainer.capture import isolation
from ort_trainer.capture.isolation import can_isolate, run_in_child
from ort_trainer.core.errors import IdleOptionError

from ..helpers import mlp_batches, mlp_trainer

pytestmark = pytest.mark.skipif(sys.platform != "linux" or torch.cuda.is_available(), reason="no fork here")


def test_answer_and_isolation() -> None:
    changed = []

    def work() -> bytes:
        changed.append(1)
        return b"x" * 3_000_000

    assert run_in_child(work) == b"x" * 3_000_000
    assert changed == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ExportError("a"), ExportError), (ValueError("a"), ValueError), (KeyError("a"), ExportError)],
)
def test_errors_come_back(error: Exception, expected: type[Exception]) -> None:
    def work() -> bytes:
        raise error

    with pytest.raises(expected, match="a"):
        run_in_child(work)


def test_an_idle_option_comes_back_with_its_name() -> None:
    def work() -> bytes:
        raise IdleOptionError("graph_transformer.gelu_recompute", "no GELU")

    with pytest.raises(IdleOptionError, match="^graph_transformer.gelu_recompute: no GELU$") as caught:
        run_in_child(work)
    assert caught.value.option == "graph_transformer.gelu_recompute"


def test_a_child_that_dies_or_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_STANDSTILL_SECONDS", 0.2)
    assert run_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL)) is None  # type: ignore[arg-type, return-value]
    start = time.perf_counter()
    assert run_in_child(lambda: time.sleep(60)) is None  # type: ignore[arg-type, return-value]
    assert time.perf_counter() - start < 10


def test_export_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = mlp_batches(1)[0]
    monkeypatch.setenv("ORT_TRAINER_EXPORT_IN_PROCESS", "")
    assert can_isolate()
    expected = mlp_trainer().train_step(x, y)
    torch.manual_seed(0)
    monkeypatch.setenv("ORT_TRAINER_EXPORT_IN_PROCESS", "1")
    assert not can_isolate()
    trainer = mlp_trainer()
    assert trainer.train_step(x, y)[0].shape == expected[0].shape
    with monkeypatch.context() as patch:
        patch.setattr("ort_trainer.export.builder.can_isolate", lambda: True)
        patch.setattr("ort_trainer.export.builder.run_in_child", lambda *_: None)
        mlp_trainer().train_step(x, y)  # the child failed, so the export runs in this process
