"""Checkpoints of ``fit``, and resuming from them bit for bit."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ort_trainer import CheckpointError, ORTTrainer
from ort_trainer.fit import Callback, Checkpoints, EarlyStopping, FitState
from ort_trainer.state import load_checkpoint_file, save_checkpoint_file

from ..helpers import MLP, assert_same_state, mlp_batches, mlp_trainer
from ..runs.loaders import Noisy, loader, seed
from .test_fit import Interrupt


def new_trainer() -> ORTTrainer:
    return mlp_trainer({"batch": {"gradient_accumulation_steps": 4}}, model=MLP(dropout=0.3))


class Draws(Callback):
    """Draws random numbers between batches; a resumed fit must not repeat these draws."""

    def on_train_batch_end(self, state: FitState, trainer: ORTTrainer) -> None:
        torch.rand(1)
        random.random()


class Keep(Callback):
    """Copies a checkpoint in the middle of an epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, state: FitState, trainer: ORTTrainer) -> None:
        if (state.epoch, state.batch) == (2, 3):
            shutil.copy(self.folder / "last.ortckpt", self.folder / "middle.ortckpt")


def figures(state: FitState) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "samples_per_second"} for row in state.history]


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["shuffled", "generator", "sampler generator", "workers"])
def test_in_the_middle_of_an_epoch_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """Resumes after three of six batches, in the middle of a window, from random data."""
    seed(0)
    whole = new_trainer()
    checkpoints = Checkpoints(tmp_path, every_n_batches=3)
    callbacks = [Draws(), Keep(tmp_path)]
    expected = whole.fit(loader(kind), mlp_batches(2), 3, callbacks=callbacks, checkpoints=checkpoints, progress=False)

    seed(99)  # the random state at the start must not matter
    resumed, middle = new_trainer(), tmp_path / "middle.ortckpt"
    if kind == "generator":  # as the first versions wrote it
        kept, user = load_checkpoint_file(middle)
        own = {name: user["fit"][name] for name in ("state", "random", "epoch_random", "callbacks", "others")}
        save_checkpoint_file(middle, kept, {"fit": own}, overwrite=True)
    result = resumed.fit(loader(kind), mlp_batches(2), 3, callbacks=[Draws()], resume=middle, progress=False)
    assert result.resumed and result.steps == 3 + 6
    assert figures(result) == figures(expected)
    assert_same_state(resumed.state_dict(), whole.state_dict())


def _at_step(number: int) -> Any:
    """Returns a dataset's hook that sends SIGINT while a batch is loaded."""

    class Late(Noisy):
        drawn = 0

        def __getitem__(self, index: int) -> Any:
            self.drawn += 1
            value = super().__getitem__(index)
            if self.drawn == number:
                signal.raise_signal(signal.SIGINT)
            return value

    return Late()


@pytest.mark.parametrize("moment", ["step", "loading", "evaluation", "epoch start"])
def test_after_an_interrupt_bit_for_bit(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluation() -> Any:
        return DataLoader(Noisy(), batch_size=11, shuffle=True)

    seed(0)
    whole = new_trainer()
    expected = whole.fit(loader("shuffled"), evaluation(), 3, progress=False)

    seed(0)
    first = new_trainer()
    train, evaluated = loader("shuffled"), evaluation()
    callbacks: list[Callback] = []
    if moment == "step":
        callbacks = [_InsideStep(first, 10, monkeypatch)]
    elif moment == "loading":
        train = DataLoader(_at_step(22 + 10), batch_size=4, shuffle=True)
    elif moment == "evaluation":
        evaluated = DataLoader(_at_step(22 + 15), batch_size=11, shuffle=True)
    else:
        callbacks = [_AtEpochStart()]
    result = first.fit(train, evaluated, 3, callbacks=callbacks, checkpoints=tmp_path, progress=False)
    assert result.status == "interrupted" and len(result.history) == 1

    torch.manual_seed(99)
    random.seed(99)
    second = new_trainer()
    result = second.fit(loader("shuffled"), evaluation(), 3, checkpoints=tmp_path, resume=True, progress=False)
    assert result.status == "completed"
    assert figures(result) == figures(expected)
    assert_same_state(second.state_dict(), whole.state_dict())


class _AtEpochStart(Callback):
    def on_train_epoch_start(self, state: FitState, trainer: ORTTrainer) -> None:
        if state.epoch == 2:
            signal.raise_signal(signal.SIGINT)


class _InsideStep(Callback):
    """Sends SIGINT before a step is counted, which is when Ctrl-C nearly always arrives."""

    def __init__(self, trainer: ORTTrainer, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        step = trainer.train_step

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            if trainer.train_step_info.step + 1 == number:
                signal.raise_signal(signal.SIGINT)
            return step(*args, **kwargs)

        monkeypatch.setattr(trainer, "train_step", interrupted)


@pytest.mark.parametrize("at", [4, 6, 8])
def test_between_evaluations_bit_for_bit(at: int, tmp_path: Path) -> None:
    """The checkpoint of step 6 is saved before its evaluation; after 8 steps, the fit goes on with more."""

    class Copies(Callback):
        def on_train_batch_start(self, state: FitState, trainer: ORTTrainer) -> None:
            self.keep(trainer)

        def on_validation_start(self, state: FitState, trainer: ORTTrainer) -> None:
            self.keep(trainer)

        def keep(self, trainer: ORTTrainer) -> None:
            if trainer.train_step_info.step == at and not (tmp_path / "middle.ortckpt").exists():
                shutil.copy(tmp_path / "last.ortckpt", tmp_path / "middle.ortckpt")

    def fit(trainer: ORTTrainer, steps: int, **more: Any) -> FitState:
        return trainer.fit(loader("shuffled"), mlp_batches(2), max_steps=steps, eval_every=3, progress=False, **more)

    seed(0)
    whole = new_trainer()
    expected = fit(whole, 16)
    seed(0)
    fit(new_trainer(), 8 if at == 8 else 16, callbacks=[Copies()], checkpoints=Checkpoints(tmp_path, every_n_batches=1))
    random.seed(99)
    again = new_trainer()
    result = fit(again, 16, resume=tmp_path / ("last.ortckpt" if at == 8 else "middle.ortckpt"))
    assert result.steps == 16 - at and result.status == "completed"
    if at == 8:  # which ended an epoch of steps
        assert [row["step"] for row in result.history] == [3, 6, 8, 11, 12, 15, 16]
    else:
        assert figures(result) == figures(expected)
        assert_same_state(again.state_dict(), whole.state_dict())


def test_best_and_last(tmp_path: Path) -> None:
    told = iter([0.2, 0.7, 0.5, 0.7])
    states: list[dict[str, torch.Tensor]] = []

    class Watch(Callback):
        def on_train_epoch_end(self, state: FitState, trainer: ORTTrainer) -> None:
            states.append(trainer.state_dict(pytorch_format=True))

    train = mlp_batches(3)
    trainer = mlp_trainer()
    result = trainer.fit(
        train,
        train[:1],
        4,
        metrics={"score": lambda *_: next(told)},
        callbacks=[Watch()],
        checkpoints=Checkpoints(tmp_path, monitor="eval_score", mode="max"),
        progress=False,
    )
    assert result.files == {"best": str(tmp_path / "best.ortckpt"), "last": str(tmp_path / "last.ortckpt")}
    for name, epoch in (("best", 2), ("last", 4)):
        other = mlp_trainer()
        user = other.load_checkpoint(result.files[name])
        assert len(user["fit"]["state"]["history"]) == epoch
        other.prepare(train[0])
        for key, value in other.state_dict(pytorch_format=True).items():
            assert torch.equal(value, states[epoch - 1][key])
    assert not torch.equal(states[1]["fc1.weight"], states[3]["fc1.weight"])


def test_the_best_is_remembered(tmp_path: Path) -> None:
    """The best value covers all epochs, not only those since the fit resumed; so does patience."""
    told = iter([0.1, 0.5, 0.4, 0.3])
    train = mlp_batches(2)

    def fit(epochs: int, patience: int) -> FitState:
        return mlp_trainer().fit(
            train,
            train[:1],
            epochs,
            metrics={"score": lambda *_: next(told)},
            callbacks=[EarlyStopping("eval_score", patience=patience)],
            checkpoints=Checkpoints(tmp_path, "eval_score"),
            resume=True,
            progress=False,
        )

    fit(2, 2)
    written = (tmp_path / "best.ortckpt").read_bytes()
    result = fit(9, 2)
    assert result.status == "stopped" and len(result.history) == 3
    assert (tmp_path / "best.ortckpt").read_bytes() == written
    assert fit(9, 2).steps == 0  # it stays stopped,
    assert len(fit(4, 9).history) == 4  # until patience is raised


def test_more_epochs_later_are_the_same(tmp_path: Path) -> None:
    seed(0)
    whole = new_trainer()
    whole.fit(loader("generator"), epochs=3, progress=False)
    seed(0)
    data = loader("generator")
    new_trainer().fit(data, epochs=1, checkpoints=tmp_path, progress=False)
    resumed = new_trainer()
    resumed.fit(loader("generator"), epochs=3, checkpoints=tmp_path, resume=True, progress=False)
    assert_same_state(resumed.state_dict(), whole.state_dict())


def test_user_values_in_checkpoints(tmp_path: Path) -> None:
    class Own(Callback):
        found: Any = None

        def on_save_checkpoint(self, state: FitState, trainer: ORTTrainer, checkpoint: dict[str, Any]) -> None:
            checkpoint["name"] = f"epoch {state.epoch}"

        def on_load_checkpoint(self, state: FitState, trainer: ORTTrainer, checkpoint: Any) -> None:
            self.found = checkpoint["name"]

    train, own = mlp_batches(2), Own()
    for epochs in (1, 2):
        mlp_trainer().fit(train, epochs=epochs, callbacks=[own], checkpoints=tmp_path, resume=True, progress=False)
    assert own.found == "epoch 1"


def test_an_interrupt_before_the_first_step_saves_nothing(tmp_path: Path) -> None:
    class AtOnce(Callback):
        def on_train_epoch_start(self, state: FitState, trainer: ORTTrainer) -> None:
            raise KeyboardInterrupt

    result = mlp_trainer().fit(mlp_batches(1), callbacks=[AtOnce()], checkpoints=tmp_path, progress=False)
    assert result.status == "interrupted" and not list(tmp_path.iterdir())


def test_what_can_not_be_resumed_is_refused(tmp_path: Path) -> None:
    train = mlp_batches(4)
    trainer = mlp_trainer()
    trainer.fit(train, epochs=2, callbacks=[Interrupt(2, 2)], checkpoints=tmp_path, progress=False)
    with pytest.raises(FileExistsError, match=r"last\.ortckpt.*resume=True.*overwrite=True"):
        mlp_trainer().fit(train, checkpoints=tmp_path, progress=False)
    with pytest.raises(ValueError, match="in the middle of an epoch of 4 batches, but the loader has 3"):
        mlp_trainer().fit(train[:3], epochs=2, checkpoints=tmp_path, resume=True, progress=False)
    mlp_trainer().fit(train, epochs=2, checkpoints=Checkpoints(tmp_path, overwrite=True), progress=False)
    with pytest.raises(ValueError, match="has 2 completed epochs, but epochs is only 1"):
        mlp_trainer().fit(train, epochs=1, checkpoints=tmp_path, resume=True, progress=False)
    trainer.save_checkpoint(tmp_path / "own.ortckpt", {"epoch": 1})
    with pytest.raises(CheckpointError, match="was not saved by fit"):
        mlp_trainer().fit(train, resume=tmp_path / "own.ortckpt", progress=False)


def test_values_of_any_kind_that_a_callback_adds(tmp_path: Path) -> None:
    class Adds(Callback):
        def on_validation_end(self, state: FitState, trainer: ORTTrainer) -> None:
            values: dict[str, Any] = {"eval_flag": True, "eval_tensor": torch.tensor(0.5)}
            state.metrics.update(values)

    for epochs in (1, 2):
        result = new_trainer().fit(
            mlp_batches(2),
            mlp_batches(1),
            epochs,
            callbacks=[Adds()],
            checkpoints=tmp_path,
            resume=epochs > 1,
            progress=False,
        )
    assert result.resumed and [row["eval_flag"] for row in result.history] == [True, True]
