"""The output of ``fit``: lines or a bar, CSV files, TensorBoard, a plot."""

from __future__ import annotations

import csv
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from ort_trainer.fit import Callback, CSVLogger, FitState, Progress, TensorBoardLogger

from ..helpers import mlp_batches, mlp_trainer
from .test_fit import Evaluate, Interrupt, classes

FIGURES = r"loss [\d.]+  rate 0\.01  norm [\d.]+  \d+ samples/s  \d:\d\d:\d\d left"


def test_plain_lines_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    mlp_trainer().fit(mlp_batches(3), mlp_batches(1), 2, progress=Progress(seconds=0))
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    batches = [line for line in lines if "batch" in line]
    assert len(batches) == 6 and len(lines) == 8
    for line, (epoch, batch) in zip(batches, [(e, b) for e in (1, 2) for b in (1, 2, 3)], strict=True):
        assert re.fullmatch(rf"epoch {epoch}/2  batch {batch}/3  {FIGURES}", line), line
    assert re.fullmatch(r"epoch 1/2  done  loss [\d.]+  eval_loss [\d.]+  \d+ samples/s  \d:\d\d:\d\d left", lines[3])
    assert lines[-1].startswith("epoch 2/2  done") and "\r" not in shown.err


class Stop(Callback):
    def on_train_epoch_end(self, state: FitState, trainer: Any) -> None:
        state.stop("enough")


def test_lines_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = mlp_trainer()
    print(trainer.fit(mlp_batches(3), epochs=2))
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 2 and (shown.out + shown.err).count("completed") == 1
    trainer.fit(mlp_batches(3), epochs=2, callbacks=[Stop()])
    assert capsys.readouterr().err.splitlines()[-1] == "stopped: enough"
    trainer.fit(mlp_batches(3), progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("there", [True, False])
def test_a_bar_on_a_terminal(there: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if there:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    trainer = mlp_trainer()
    trainer.prepare(mlp_batches(1)[0])  # on a terminal, an export would print its own line
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    trainer.fit(mlp_batches(3), epochs=2)
    shown = capsys.readouterr().err
    if there:
        assert re.search(rf"epoch 2/2 100%\|█+\| 3/3, {FIGURES}", shown), shown
    else:
        assert "\r" not in shown and len(shown.splitlines()) == 2


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("of another run\n")
    train = mlp_batches(4)
    losses: list[float] = []

    class Watch(Interrupt):
        def on_train_batch_end(self, state: FitState, trainer: Any) -> None:
            losses.append(state.loss or 0.0)

    result = mlp_trainer().fit(
        train,
        train,
        2,
        metrics=(Evaluate(), classes),
        callbacks=[CSVLogger(path, every_n_batches=2), Watch(9, 9)],
        progress=False,
    )
    found = rows(path)
    assert [(row["epoch"], row["batch"], row["step"]) for row in found] == [
        ("1", "2", "2"),
        ("1", "4", "4"),
        ("1", "", "4"),
        ("2", "2", "6"),
        ("2", "4", "8"),
        ("2", "", "8"),
    ]
    assert [float(row["loss"]) for row in found if row["batch"]] == losses[1::2]
    for row, expected in zip([row for row in found if not row["batch"]], result.history, strict=True):
        assert {name: float(value) for name, value in row.items() if value} == expected
        assert "eval_accuracy" in row


def test_a_csv_file_goes_on(tmp_path: Path) -> None:
    """Rows of repeated steps appear once."""
    train, path = mlp_batches(4), tmp_path / "log.csv"
    checkpoint = tmp_path / "saved.ortckpt"

    class Save(Interrupt):
        def on_train_batch_end(self, state: FitState, trainer: Any) -> None:
            if (state.epoch, state.batch) == (2, 2):
                trainer.save_checkpoint(checkpoint, state.checkpoint())

    mlp_trainer().fit(train, train, 2, callbacks=[CSVLogger(path, 1), Save(9, 9)], progress=False)
    expected = rows(path)
    mlp_trainer().fit(train, train, 2, callbacks=[CSVLogger(path, 1)], resume=checkpoint, progress=False)
    found = rows(path)
    assert list(found[0]) == list(expected[0])
    for row in (*found, *expected):
        row["samples_per_second"] = ""
    assert found == expected


@pytest.mark.parametrize("maker", [lambda: CSVLogger("a.csv", 0), lambda: TensorBoardLogger("a", every_n_batches=0)])
def test_refused_intervals(maker: Any) -> None:
    with pytest.raises(ValueError, match="every_n_batches must be at least 1.*, but 0"):
        maker()


def test_a_csv_file_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="'nowhere'|nowhere"):
        mlp_trainer().fit(mlp_batches(1), callbacks=[CSVLogger(tmp_path / "nowhere" / "a.csv")], progress=False)


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a writer that records its calls, because the tests do not require tensorboard."""
    made: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            self.folder, self.purge_step, self.closed = folder, purge_step, False
            self.scalars: dict[tuple[str, int], float] = {}
            made.append(self)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars[name, step] = value

        def close(self) -> None:
            self.closed = True

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(torch.utils, "tensorboard", module, raising=False)
    train = mlp_batches(4)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    arguments: dict[str, Any] = {
        "callbacks": [TensorBoardLogger(tmp_path / "board", every_n_batches=2)],
        "checkpoints": folder,
        "resume": True,
        "progress": False,
    }
    result = mlp_trainer().fit(train, train, 1, **arguments)
    (writer,) = made
    assert (writer.folder, writer.purge_step, writer.closed) == (str(tmp_path / "board"), None, True)
    assert {step for name, step in writer.scalars if name == "train/loss"} == {2, 4}
    assert writer.scalars["epoch/eval_loss", 4] == result.history[0]["eval_loss"]
    assert writer.scalars["train/learning_rate", 4] == 0.01 and writer.scalars["train/grad_norm", 4] > 0
    mlp_trainer().fit(train, train, 2, **arguments)
    assert made[1].purge_step == 5 and ("epoch/loss", 8) in made[1].scalars


def test_tensorboard_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.utils, "tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    trainer = mlp_trainer()
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboard"):
        trainer.fit(mlp_batches(1), callbacks=[TensorBoardLogger(tmp_path)], progress=False)
    assert trainer.train_step_info.step == 0


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    train = mlp_batches(2)
    result = mlp_trainer().fit(train, train, 2, metrics={"one": lambda *_: 1}, progress=False)
    result.plot(tmp_path / "curves.svg")
    picture = (tmp_path / "curves.svg").read_text()
    assert all(f"<!-- {name} -->" in picture for name in ("loss", "eval_loss", "eval_one", "epoch"))
    stopped = mlp_trainer().fit(train, callbacks=[Interrupt(1, 1)], progress=False)
    with pytest.raises(ValueError, match="no epoch was completed"):
        stopped.plot(tmp_path / "none.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        result.plot(tmp_path / "none.png")
