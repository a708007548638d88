"""``fit`` with a ``CheckpointManager``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ort_trainer import CheckpointManager, ORTTrainer, Position
from ort_trainer.fit import Callback, FitState, ManagedCheckpoints

from ..helpers import assert_same_state, mlp_batches, mlp_trainer
from ..runs.loaders import loader, seed
from .test_resume import Draws, figures, new_trainer


class Copy(Callback):
    """Copies the directory in the middle of an epoch."""

    def __init__(self, manager: CheckpointManager, target: Path) -> None:
        self.manager, self.target = manager, target

    def on_train_batch_start(self, state: FitState, trainer: ORTTrainer) -> None:
        if (state.epoch, state.batch) == (2, 3):
            self.manager.wait()
            shutil.copytree(self.manager.directory, self.target)


def test_in_the_middle_of_an_epoch_bit_for_bit(tmp_path: Path) -> None:
    seed(0)
    whole = new_trainer()
    manager = CheckpointManager(tmp_path / "run", keep_last=2, async_save=True)
    expected = whole.fit(
        loader("generator"),
        mlp_batches(2),
        3,
        callbacks=[Draws(), Copy(manager, tmp_path / "copy")],
        checkpoints=ManagedCheckpoints(manager, every_n_batches=3),
        progress=False,
    )
    assert [entry.step for entry in manager.checkpoints] == [15, 18]
    assert expected.files == {"last": str(manager.latest)}

    seed(99)
    resumed = new_trainer()
    copied = CheckpointManager(tmp_path / "copy", keep_last=2)
    result = resumed.fit(
        loader("generator"),
        mlp_batches(2),
        3,
        callbacks=[Draws()],
        checkpoints=ManagedCheckpoints(copied, every_n_batches=3),
        resume=True,
        progress=False,
    )
    assert result.resumed and result.steps == 3 + 6
    assert figures(result) == figures(expected)
    assert_same_state(resumed.state_dict(), whole.state_dict())

    again = new_trainer()  # a user's own loop can resume, too
    position = Position(loader("generator"))
    CheckpointManager(tmp_path / "run").resume(again, position)
    assert (position.epoch, position.batch) == (4, 0)
    again.prepare(mlp_batches(1)[0])
    assert_same_state(again.state_dict(), whole.state_dict())


def test_the_best_of_the_history_is_kept(tmp_path: Path) -> None:
    told = iter([0.2, 0.7, 0.5, 0.4, 0.6])
    train = mlp_batches(3)

    def fit(epochs: int, manager: CheckpointManager) -> FitState:
        return mlp_trainer().fit(
            train,
            train[:1],
            epochs,
            metrics={"score": lambda *_: next(told)},
            checkpoints=manager,
            resume=True,
            progress=False,
        )

    manager = CheckpointManager(tmp_path, keep_last=1, keep_best=("eval_score", "max"))
    result = fit(4, manager)
    assert [entry.step for entry in manager.checkpoints] == [6, 12]
    assert result.files == {"best": str(manager.best), "last": str(manager.latest)}
    assert manager.checkpoints[0].metrics["eval_score"] == 0.7 and manager.checkpoints[0].metrics["epoch"] == 2

    latest = manager.latest
    assert latest is not None
    data = bytearray(latest.read_bytes())
    data[-3] ^= 1
    latest.write_bytes(data)
    with pytest.warns(UserWarning, match="skipping .*step-00000012.ortckpt"):  # so the best one is the newest
        result = fit(3, CheckpointManager(tmp_path, keep_last=1, keep_best=("eval_score", "max")))
    assert result.resumed and result.steps == 3 and len(result.history) == 3


def test_what_is_wrong_is_said_before_training(tmp_path: Path) -> None:
    train = mlp_batches(1)
    with pytest.raises(ValueError, match=r"keep_best=.*monitors 'eval_loss', which is not in the history"):
        mlp_trainer().fit(train, checkpoints=CheckpointManager(tmp_path, keep_best=("eval_loss", "min")))
    with pytest.raises(TypeError, match="manager must be an ort_trainer.CheckpointManager, but 'folder'"):
        ManagedCheckpoints("folder")
    assert mlp_trainer().fit(train, checkpoints=CheckpointManager(tmp_path), progress=False).steps == 1
    trainer = mlp_trainer()
    with pytest.raises(FileExistsError, match="has checkpoints of another run, such as .step-00000001.ortckpt.*resume"):
        trainer.fit(train, checkpoints=CheckpointManager(tmp_path), progress=False)
    assert trainer.train_step_info.step == 0
    path = CheckpointManager(tmp_path).latest
    assert path is not None
    manager = CheckpointManager(tmp_path)
    result = trainer.fit(train, epochs=2, checkpoints=manager, resume=path, progress=False)
    assert result.resumed and [entry.step for entry in manager.checkpoints] == [1, 2]
