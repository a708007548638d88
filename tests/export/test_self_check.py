"""An untested torch must train a small model as eager PyTorch does before it trains the user's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, optim
from ort_trainer.capture import capture, torch_versions
from ort_trainer.core.errors import ExportError
from ort_trainer.export import self_check
from ort_trainer.step.cache import export_cache


@pytest.fixture(autouse=True)
def untested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch_versions, "TESTED", ("1.9", "1.10"))
    monkeypatch.setattr(self_check, "_passed", set())
    monkeypatch.setenv("ORT_TRAINER_CACHE", str(tmp_path))


def train() -> None:
    desc = {"inputs": [("input", ["batch", 2]), ("label", ["batch"])], "outputs": [("loss", [], True)]}
    trainer = ORTTrainer(nn.Linear(2, 2), desc, optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy)
    trainer.train_step(torch.ones(3, 2), torch.zeros(3, dtype=torch.long))


def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, str]]:
    """Records the checks from now on, which succeed at once."""
    seen: list[tuple[bool, str]] = []
    monkeypatch.setattr(self_check, "_difference", lambda *args: float(seen.append(args) or 0))
    return seen


def test_a_check_that_passed_is_not_repeated(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    train()
    train()
    (warning,) = (str(w.message) for w in recwarn if "has not been tested" in str(w.message))
    assert warning.startswith(f"torch {torch.__version__} has") and "tested with 1.9, 1.10" in warning
    self_check._passed.clear()  # as in another process
    again = checked(monkeypatch)
    with pytest.warns(UserWarning, match="A small model trained correctly"):
        train()
    assert again == []
    monkeypatch.setattr(torch, "__version__", "99.0.0")
    with pytest.warns(UserWarning, match=r"torch 99\.0\.0"):
        self_check.check_torch("onnxruntime", export_cache())
    assert again == [(False, "onnxruntime"), (True, "onnxruntime")]


@pytest.mark.filterwarnings("error")
def test_a_tested_version_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_versions, "TESTED", (".".join(torch.__version__.split(".")[:2]),))
    seen = checked(monkeypatch)
    train()
    assert seen == []


@pytest.mark.parametrize(
    ("version", "tested"),
    [("1.10.2", True), ("1.10.0+cu130", True), ("1.1.0", False), ("1.10.0rc1", False), ("1.10.0a0+git12", False)],
)
def test_what_is_a_tested_version(monkeypatch: pytest.MonkeyPatch, version: str, tested: bool) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert torch_versions.is_tested() == tested


@contextlib.contextmanager
def seeing_nothing() -> Iterator[list[str]]:
    yield []


def losing_custom_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.14 did, before the export was adapted to it."""
    monkeypatch.setattr(capture, "_watch_autograd", seeing_nothing)


def losing_updates_of_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(*args: Any) -> Any:
        made = export(*args)
        return dataclasses.replace(made, step=dataclasses.replace(made.step, buffer_updates={}))

    export = self_check.export  # type: ignore[attr-defined]
    monkeypatch.setattr(self_check, "export", lossy)


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AttributeError("torch has no attribute 'moved'")

    monkeypatch.setattr(self_check, "export", fail)


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (
            losing_custom_backward,
            r"trains wrongly .*\n  with a custom autograd.Function, after 3 steps the values differ",
        ),
        (losing_updates_of_buffers, r"trains wrongly .*\n  without a custom autograd.Function, after 3 steps"),
        (failing, r"can not train .*\n  torch has no attribute 'moved'"),
    ],
    ids=["custom functions", "buffers", "an error"],
)
def test_a_version_that_trains_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, breaks: Any, message: str
) -> None:
    breaks(monkeypatch)
    with pytest.raises(ExportError, match=message) as error:
        train()
    assert list(tmp_path.iterdir()) == []  # a failure is not recorded
    assert "or a tested torch (1.9, 1.10): pip install 'torch==1.10.*'" in str(error.value)
