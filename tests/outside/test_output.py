"""What a model writes for people, which a graph does not repeat: a warning names the line."""

from __future__ import annotations

import io
import logging
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTModule, ORTTrainer, optim

X, Y = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1])
LOG = logging.getLogger(__name__)
WRITER = "torch.utils.tensorboard.writer"
OF_LIBRARY = compile("LOG.warning('slow')", "/lib/site-packages/library.py", "exec")


def warn_in_library() -> None:
    exec(OF_LIBRARY)


class SummaryWriter:
    """Stands in for TensorBoard's, which the tests do not install."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def add_scalar(self, *event: Any) -> None:
        self.events.append(event)


SummaryWriter.__module__ = WRITER


class Writes(nn.Module):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.linear, self.step, self.path, self.file = nn.Linear(6, 2), 0, path, path.open("w")
        self.writer = SummaryWriter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        print(self.step, x.mean().item())
        LOG.info("step %d", self.step)
        self.path.with_suffix(".txt").write_text("x")
        self.file.write("x")
        self.writer.add_scalar("mean", x.mean().item(), self.step)
        return self.linear(x)


class Logs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(6, 2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        LOG.info("step %d of %s", self.step, x.mean().item())
        return self.linear(x)


class Silent(nn.Module):
    """Writes nothing in each step, or nothing that people read."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.linear, self.step, self.has_told, self.path = nn.Linear(6, 2), 0, False, path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        print("step", self.step, file=io.StringIO())
        LOG.debug("step %d", self.step)
        warn_in_library()
        self.path.read_text()
        if not self.has_told:
            self.has_told = True
            LOG.warning("this is slow")
        return self.linear(x)


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    module = types.ModuleType(WRITER)
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, WRITER, module)
    caplog.handler.setLevel(logging.INFO)
    LOG.setLevel(logging.INFO)


def warned_in_three_steps(model: nn.Module) -> list[str]:
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(), loss_fn=F.cross_entropy)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for _ in range(3):
            trainer.train_step(X, Y)
    assert len(trainer.session.graphs(True)) == 1
    return [str(entry.message) for entry in record if "This happens only while" in str(entry.message)]


def test_a_trainer_warns_once_for_each_line(tmp_path: Path) -> None:
    printed, logged, wrote, written, event = warned_in_three_steps(Writes(tmp_path / "log"))
    assert "Writes or the loss prints 1\n  File " in printed and "test_output.py" in printed
    assert "logs 'step %d'\n" in logged and "in forward: LOG.info(" in logged
    assert "writes the file " in wrote and '.with_suffix(".txt").write_text("x")' in wrote
    assert "calls SummaryWriter.add_scalar()\n" in written and "writes to 'file'\n" in event


def test_what_is_not_repeated_in_pytorch_is_not_warned_about(tmp_path: Path) -> None:
    (tmp_path / "read").write_text("x")
    assert not warned_in_three_steps(Silent(tmp_path / "read"))


def test_pytorch_runs_a_module_that_logs(caplog: pytest.LogCaptureFixture) -> None:
    ours = ORTModule(Logs())
    with pytest.warns(UserWarning, match=r"logs 'step %d of %s', which a graph does not do(.|\n)*in forward: LOG.info"):
        for _ in range(4):
            ours(X)
    lines = [record.getMessage() for record in caplog.records if record.name == __name__]
    assert lines == [f"step {step} of {X.mean().item()}" for step in range(1, 5)]
