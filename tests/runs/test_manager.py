"""Which checkpoints a manager keeps, and from which it resumes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ort_trainer import CheckpointError, CheckpointManager, ORTTrainer, Position
from ort_trainer.runs import manager as manager_module
from ort_trainer.state import read_parts

from ..helpers import assert_same_state, mlp_batches, mlp_trainer

BATCHES = mlp_batches(12)


@pytest.fixture(scope="module")
def trainer() -> ORTTrainer:
    made = mlp_trainer()
    made.train_step(*BATCHES[0])
    return made


def names(manager: CheckpointManager) -> list[str]:
    return sorted(path.name.removeprefix("step-").removesuffix(".ortckpt").lstrip("0") for path in files(manager))


def files(manager: CheckpointManager) -> list[Path]:
    return sorted(manager.directory.glob("step-*.ortckpt"))


def save(manager: CheckpointManager, trainer: ORTTrainer, step: int, **metrics: float) -> Path:
    trainer.train_step_info.step = step  # pretends to have made this many steps
    return manager.save(trainer, metrics=metrics or None, user_dict={"step": step})


def damage(path: Path, place: float) -> None:
    """Flips a bit of a file, at a place given as a fraction of its length."""
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 4
    path.write_bytes(data)


def test_the_last_and_the_best_are_kept(trainer: ORTTrainer, tmp_path: Path) -> None:
    made = tmp_path / "new" / "run"
    with CheckpointManager(made, keep_last=2, keep_best=("score", "max")) as manager:
        assert manager.latest is None and manager.best is None and manager.checkpoints == []
        for step, score in enumerate([0.2, 0.9, float("nan"), 0.9, 0.1], start=1):
            path = save(manager, trainer, step, score=score, other=1)
            assert path == manager.latest and (made / "latest").read_text() == f"{Path(path).name}\n"
        save(manager, trainer, 6)  # without metrics
        assert names(manager) == ["2", "5", "6"] and manager.best == made / "step-00000002.ortckpt"

    again = CheckpointManager(made, keep_last=1, keep_best=("score", "max"))  # after a restart it knows the metrics
    assert [(entry.step, dict(entry.metrics)) for entry in again.checkpoints] == [
        (2, {"score": 0.9, "other": 1}),
        (5, {"score": 0.1, "other": 1}),
        (6, {}),
    ]
    assert again.resume(trainer) == {"step": 6}
    save(again, trainer, 7, score=0.5)
    assert names(again) == ["2", "7"]
    save(again, trainer, 8, score=torch.tensor(1.5))
    assert names(again) == ["8"] and again.best == again.latest
    save(again, trainer, 8)  # the same step again, at the end of a run: it is still the best
    assert again.checkpoints[0].metrics == {"score": 1.5}
    assert sorted(path.name for path in made.iterdir()) == ["latest", "step-00000008.ortckpt"]


def test_min_and_all(trainer: ORTTrainer, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=None, keep_best=("loss", "min"))
    (tmp_path / "step-by-step.ortckpt").write_text("my own notes")
    (tmp_path / "step-00000001.txt").write_text("my own notes")
    for step, loss in enumerate([float("inf"), 0.5, -1.0, 0.0], start=1):
        save(manager, trainer, step, loss=loss)
    assert len(manager.checkpoints) == 4 and manager.best == tmp_path / "step-00000003.ortckpt"
    fewer = CheckpointManager(tmp_path, keep_last=1, overwrite=True)
    save(fewer, trainer, 5)
    assert [path.name for path in files(fewer)] == ["step-00000005.ortckpt", "step-by-step.ortckpt"]
    assert (tmp_path / "step-00000001.txt").exists()


def test_a_run_that_went_back_goes_on_from_there(trainer: ORTTrainer, tmp_path: Path) -> None:
    """The newest checkpoint is the one saved last; an earlier one with a higher step does not replace it."""
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (100, 150):
        save(manager, trainer, step)
    assert manager.resume(trainer, path=tmp_path / "step-00000100.ortckpt") == {"step": 100}
    assert trainer.train_step_info.step == 100
    save(manager, trainer, 120)
    assert names(manager) == ["120", "150"]
    assert manager.latest == tmp_path / "step-00000120.ortckpt"
    save(manager, trainer, 130)
    assert names(manager) == ["120", "130"]


@pytest.mark.parametrize("place", [0.001, 0.2, 0.95])
def test_damaged_files_are_skipped(trainer: ORTTrainer, tmp_path: Path, place: float) -> None:
    manager = CheckpointManager(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        save(manager, trainer, step)
    damage(tmp_path / "step-00000003.ortckpt", place)
    fresh = CheckpointManager(tmp_path, keep_last=1)
    with pytest.warns(UserWarning, match=r"skipping the checkpoint '.*step-00000003\.ortckpt': .*damaged"):
        assert fresh.resume(trainer) == {"step": 2}
    save(fresh, trainer, 4)  # the damaged one is ignored, and kept for inspection
    assert names(fresh) == ["3", "4"] and [entry.step for entry in fresh.checkpoints] == [4]
    damage(tmp_path / "step-00000004.ortckpt", place)
    before = trainer.state_dict()
    with (
        pytest.warns(UserWarning, match="skipping the checkpoint"),
        pytest.raises(CheckpointError, match="none of the 2 checkpoints .* can be used.* move them away"),
    ):
        CheckpointManager(tmp_path).resume(trainer)
    for name, value in before["model"]["full_precision"].items():
        assert np.array_equal(trainer.state_dict()["model"]["full_precision"][name], value)
    with pytest.raises(CheckpointError, match="damaged"):
        fresh.resume(trainer, path=tmp_path / "step-00000004.ortckpt")


def test_a_damaged_one_never_pushes_out_a_good_one(trainer: ORTTrainer, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (1, 2):
        save(manager, trainer, step)
    damage(tmp_path / "step-00000002.ortckpt", 0.95)
    with pytest.warns(UserWarning, match="skipping"):
        manager.resume(trainer)
    save(manager, trainer, 3)
    assert names(manager) == ["1", "2", "3"]


def test_what_no_manager_has_saved_comes_last(trainer: ORTTrainer, tmp_path: Path) -> None:
    foreign = tmp_path / "step-00000009.ortckpt"
    trainer.save_checkpoint(foreign, {"by": "hand"})
    (tmp_path / "step-folder.ortckpt").mkdir()
    manager = CheckpointManager(tmp_path)
    trainer.train_step_info.step = 9
    before = foreign.read_bytes()
    with pytest.raises(FileExistsError, match=r"such as 'step-00000009\.ortckpt'"):
        manager.save(trainer)
    assert foreign.read_bytes() == before
    assert manager.resume(trainer) == {"by": "hand"}  # there is nothing else
    save(manager, trainer, 1)
    assert CheckpointManager(tmp_path).resume(trainer) == {"step": 1}
    assert foreign.read_bytes() == before


def test_a_file_that_vanishes_is_skipped(
    trainer: ORTTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Another process may remove an outdated checkpoint."""
    manager = CheckpointManager(tmp_path)
    paths = [save(manager, trainer, step) for step in (1, 2)]
    reader = CheckpointManager(tmp_path)
    monkeypatch.setattr(reader, "_candidates", lambda: paths[::-1])
    paths[1].unlink()
    assert reader.resume(trainer) == {"step": 1}
    assert [str(entry.message) for entry in recwarn if "ortckpt': there is no checkpoint" in str(entry.message)]


def test_a_run_without_steps_left_saves_what_it_has_loaded(trainer: ORTTrainer, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, trainer, 3)
    again = mlp_trainer()
    manager.resume(again)
    manager.save(again)
    assert names(manager) == ["3"] and again.state_dict()["train_step_info"]["step"] == 3


def test_the_directory_stays_the_same(trainer: ORTTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    manager = CheckpointManager("run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    save(manager, trainer, 1)
    assert [path.name for path in files(manager)] == ["step-00000001.ortckpt"] and not list(Path.cwd().iterdir())
    assert manager.resume(trainer) == {"step": 1}


def test_what_is_wrong_is_refused(trainer: ORTTrainer, tmp_path: Path) -> None:
    for wrong, error, text in (
        ({"keep_last": 0}, ValueError, "keep_last must be at least 1, or None to keep all, but 0 was given"),
        ({"keep_last": 1.5}, TypeError, "keep_last must be an int"),
        ({"keep_best": "loss"}, TypeError, "keep_best must be the name of a metric and 'min' or 'max', but 'loss'"),
        ({"keep_best": ("loss", "lowest")}, ValueError, "must be 'min' or 'max', but 'lowest' was given"),
        ({"async_save": 1}, TypeError, "async_save must be True or False"),
        ({"overwrite": None}, TypeError, "overwrite must be True or False"),
    ):
        with pytest.raises(error, match=text):
            CheckpointManager(tmp_path / "none", **wrong)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file: choose another"):
        CheckpointManager(tmp_path / "file")
    assert not (tmp_path / "none").exists()

    manager = CheckpointManager(tmp_path, keep_best=("loss", "min"))
    with pytest.raises(ValueError, match=r"compares 'loss', but the metrics are \['acc'\]: include it, or pass no"):
        save(manager, trainer, 1, acc=1.0)
    with pytest.raises(TypeError, match="the metric 'loss' must be a number, but Tensor"):
        manager.save(trainer, metrics={"loss": torch.ones(2)})
    with pytest.raises(TypeError, match="metrics must be a dict"):
        manager.save(trainer, metrics=0.5)
    with pytest.raises(TypeError, match="user/thing is a object"):
        manager.save(trainer, user_dict={"thing": object()})
    assert not files(manager) and manager.resume(trainer) is None

    save(manager, trainer, 1)
    other = CheckpointManager(tmp_path)
    with pytest.raises(
        FileExistsError, match="checkpoints of another run, such as .step-00000001.ortckpt.*overwrite=True"
    ):
        save(other, trainer, 2)
    with pytest.raises(FileNotFoundError):
        other.resume(trainer, path=tmp_path / "nothing.ortckpt")
    for method in (other.save, other.resume):  # and the checkpoint is still good
        with pytest.raises(TypeError, match=r"must be an ort_trainer.Position, such as Position\(loader\), but \[1\]"):
            method(trainer, [1])
    assert other.resume(trainer) == {"step": 1}
    save(other, trainer, 2)
    assert [entry.number for entry in other.checkpoints] == [1, 2]


def test_a_position_of_nobody(trainer: ORTTrainer, tmp_path: Path) -> None:
    """Resuming reports that a checkpoint saved by the trainer has no position."""
    trainer.save_checkpoint(tmp_path / "own.ortckpt", {"mine": 1})
    manager = CheckpointManager(tmp_path / "run")
    assert manager.resume(trainer, path=tmp_path / "own.ortckpt") == {"mine": 1}
    with pytest.raises(CheckpointError, match="was not saved by a CheckpointManager"):
        manager.resume(trainer, Position(BATCHES), path=tmp_path / "own.ortckpt")


def test_random_states_are_put_back(trainer: ORTTrainer, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    torch.manual_seed(5)
    np.random.seed(5)
    save(manager, trainer, 1)
    expected = torch.rand(3), np.random.rand(3)
    manager.resume(trainer)
    assert torch.equal(torch.rand(3), expected[0]) and np.array_equal(np.random.rand(3), expected[1])


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Yields an event; files are not written until it is set."""
    may, write = threading.Event(), manager_module.save_checkpoint_file  # type: ignore[attr-defined]

    def slow(*args: Any, **kwargs: Any) -> None:
        assert may.wait(60)
        write(*args, **kwargs)

    monkeypatch.setattr(manager_module, "save_checkpoint_file", slow)
    yield may
    may.set()


@pytest.mark.engine
def test_an_async_save_has_the_state_of_its_moment(held: threading.Event, tmp_path: Path) -> None:
    """Training continues while it is written: in the middle of a window, with a schedule and user values."""
    made = mlp_trainer({"batch": {"gradient_accumulation_steps": 2}})
    for batch in BATCHES[:3]:
        made.train_step(*batch)
    user: dict[str, Any] = {"list": [1], "tensor": torch.ones(2), "array": np.ones(2)}
    made.save_checkpoint(tmp_path / "sync.ortckpt")
    manager = CheckpointManager(tmp_path / "run", async_save=True)
    path = manager.save(made, user_dict=user)
    assert not path.exists()
    user["list"].append(2)
    user["tensor"].zero_()
    user["array"][:] = 0
    for batch in BATCHES[3:6]:
        made.train_step(*batch)
    assert not path.exists()
    held.set()
    manager.close()
    ours, theirs = (mlp_trainer({"batch": {"gradient_accumulation_steps": 2}}) for _ in range(2))
    found = manager.resume(ours)
    theirs.load_checkpoint(tmp_path / "sync.ortckpt")
    for other in (ours, theirs):
        other.prepare(BATCHES[0])
    assert_same_state(ours.state_dict(), theirs.state_dict())
    assert found is not None and found["list"] == [1]
    assert found["tensor"].tolist() == [1, 1] and found["array"].tolist() == [1, 1]


def test_one_async_save_at_a_time(trainer: ORTTrainer, held: threading.Event, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1, async_save=True)
    save(manager, trainer, 1)
    threading.Timer(0.2, held.set).start()
    second = save(manager, trainer, 2)  # waits for the first
    assert (tmp_path / "step-00000001.ortckpt").exists() or second.exists()
    manager.wait()
    assert names(manager) == ["2"] and manager.latest == second


def test_an_error_of_an_async_save_is_raised_once(
    trainer: ORTTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = manager_module.save_checkpoint_file  # type: ignore[attr-defined]

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError("the disk is full")

    manager = CheckpointManager(tmp_path, async_save=True)
    for call in (lambda: save(manager, trainer, 2), manager.close, manager.wait, lambda: manager.resume(trainer)):
        monkeypatch.setattr(manager_module, "save_checkpoint_file", fails)
        save(manager, trainer, 1)
        with pytest.raises(OSError, match="the disk is full"):
            call()
        monkeypatch.setattr(manager_module, "save_checkpoint_file", write)
        manager.close()
    save(manager, trainer, 3)
    manager.close()
    assert names(manager) == ["3"]

    monkeypatch.setattr(manager_module, "save_checkpoint_file", fails)
    with pytest.raises(OSError, match="the disk is full"), CheckpointManager(tmp_path / "a", async_save=True) as other:
        save(other, trainer, 1)
    with (
        pytest.warns(UserWarning, match="a checkpoint was not saved: OSError: the disk is full"),
        pytest.raises(KeyError),
        CheckpointManager(tmp_path / "b", async_save=True) as other,
    ):
        save(other, trainer, 1)
        raise KeyError


AT_THE_END = """if True:
    import sys, threading, time
    import torch
    from tests.runs import test_manager
    from ort_trainer import CheckpointManager
    from ort_trainer.runs import manager as manager_module
    trainer = test_manager.mlp_trainer()
    trainer.train_step(*test_manager.BATCHES[0])
    write, begun, end = manager_module.save_checkpoint_file, threading.Event(), threading.main_thread()
    def late(file, *args, **kwargs):  # while Python ends
        begun.set()
        end.join()
        time.sleep(0.5)
        if "failing" in str(file):
            raise OSError("the disk is full")
        write(file, *args, **kwargs)
    manager_module.save_checkpoint_file = late
    for name in ("failing", "run"):
        manager = CheckpointManager(f"{sys.argv[1]}/{name}", async_save=True)
        manager.save(trainer, user_dict={"large": torch.ones(1 << 20)})
    assert begun.wait(60)
    raise SystemExit(3)
"""


def test_the_end_of_the_process_loses_nothing_silently(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AT_THE_END, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert "a checkpoint was not saved: OSError: the disk is full" in done.stderr
    found = CheckpointManager(tmp_path / "run").resume(mlp_trainer())
    assert found is not None and found["large"].sum() == 1 << 20


def test_what_a_file_says_of_its_run(trainer: ORTTrainer, tmp_path: Path) -> None:
    path = save(CheckpointManager(tmp_path), trainer, 4, loss=0.5)
    run, position, none = read_parts(path, "run", "position", "nothing")
    assert run == {"number": 1, "step": 4, "metrics": {"loss": 0.5}, "between_epochs": True} and none == {}
    assert [place["epoch"] for place in position["places"]] == [1]
    other = mlp_trainer()
    assert other.load_checkpoint(path) == {"step": 4}
