"""The cases that the processes of test_manager.py run."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from ort_trainer import CheckpointManager, ORTTrainer, Position
from ort_trainer.fit import Callback, FitState, ManagedCheckpoints
from ort_trainer.runs import manager as manager_module

from .fit_cases import data, new_trainer, part, shared_folder, weights


def start(rank: int) -> tuple[ORTTrainer, Position]:
    """Returns a trainer and this rank's data, in its own order; rank 1 has fewer batches."""
    trainer = new_trainer(2, dropout=0.3)
    torch.manual_seed(5 + rank)
    return trainer, Position(DataLoader(data(40 - 10 * rank), batch_size=5, shuffle=True))


def joined(trainer: ORTTrainer, position: Position) -> AbstractContextManager[None]:
    return trainer.join(position.share)


def own_loop(rank: int, size: int) -> dict[str, Any]:
    """Two epochs; a second run stops in mid-epoch, when rank 1 is at its end, and a third resumes."""
    whole, position = start(rank)
    folder = shared_folder(whole)

    def train(trainer: ORTTrainer, position: Position, manager: CheckpointManager | None, last: int = 0) -> None:
        for epoch in position.epochs(2):
            with joined(trainer, position):
                for x, y in position.batches():
                    trainer.train_step(x, y)
                    if manager is not None and position.batch == 7:  # rank 0 only: rank 1 has six batches
                        manager.save(trainer, position, {"epoch": epoch})
                    if (epoch, position.batch) == (2, last):
                        break
            if last and epoch == 2:
                return
            trainer.optimizer_step()
            if manager is not None:
                manager.save(trainer, position, {"epoch": epoch})

    train(whole, position, None)
    broken, position = start(rank)
    with CheckpointManager(folder, keep_last=2, async_save=True) as manager:
        manager.resume(broken, position)
        train(broken, position, manager, last=7)
    broken.gather({})  # waits for the file of rank 0
    again, position = start(rank)
    torch.manual_seed(99)
    with CheckpointManager(folder, keep_last=2, async_save=True) as manager:
        manager.resume(again, position)
        place = [position.epoch, position.batch]
        train(again, position, manager)
    found = weights(again)
    again.gather({})
    return {
        "place": place,
        "same": all(np.array_equal(value, found[name]) for name, value in weights(whole).items()),
        "left": sorted(path.name for path in folder.iterdir()),
    }


def errors(rank: int, size: int) -> dict[str, Any]:
    """An error in one process is raised in all, and then they continue."""
    trainer, position = start(rank)
    folder = shared_folder(trainer)
    x, y = data(8).tensors
    trainer.train_step(x, y)
    manager = CheckpointManager(folder, async_save=True)
    texts = []

    def save(metrics: Any = None) -> None:
        try:
            manager.save(trainer, position, metrics)
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")

    write = manager_module.save_checkpoint_file  # type: ignore[attr-defined]

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError("the disk is full")

    manager_module.save_checkpoint_file = fails  # type: ignore[attr-defined]
    save()
    save()  # waits for the writing thread, so the file may be written again only after it
    manager_module.save_checkpoint_file = write  # type: ignore[attr-defined]
    save(metrics=["wrong"] if rank else None)
    save()
    manager.close()
    trainer.gather({})
    other, place = start(rank)
    before = len(list(folder.glob("step-*")))
    trainer.train_step(x, y)
    newest = manager.save(trainer, position)
    manager.close()
    trainer.gather({})
    if rank == 0:
        content = bytearray(newest.read_bytes())
        content[-1] ^= 1
        newest.write_bytes(content)
    trainer.gather({})
    fresh = CheckpointManager(folder)
    if rank == 0:
        with pytest.warns(UserWarning, match="skipping the checkpoint"):
            fresh.resume(other, place)
    else:
        fresh.resume(other, place)
    return {
        "errors": "\n".join(texts),
        "before": before,
        "step": other.train_step_info.step,
        "own disk": own_disk(rank, newest.parent, x, y),
    }


def own_disk(rank: int, folder: Path, x: torch.Tensor, y: torch.Tensor) -> int:
    """The newest checkpoint is damaged for rank 1 only; returns the step at which this rank resumes."""
    trainer, position = start(rank)
    with CheckpointManager(folder) as manager:
        manager.resume(trainer, position)
        for _ in range(2):
            trainer.train_step(x, y)
            newest = manager.save(trainer, position)
    trainer.gather({})
    if rank:
        shared, folder = folder, Path(tempfile.mkdtemp(dir=folder))
        for path in shared.glob("step-*"):
            shutil.copy(path, folder)
        (folder / newest.name).write_bytes(newest.read_bytes()[:-1])
    trainer.gather({})
    other, place = start(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 0 warns of skipped checkpoints
        CheckpointManager(folder).resume(other, place)
    return other.train_step_info.step


def fit(rank: int, size: int) -> dict[str, Any]:
    """One rank has two more batches, and saves in mid-epoch when the other is at its end."""
    batches = list(DataLoader(data(64), batch_size=8))
    own = batches[:3] if rank else batches[3:]
    trainer = new_trainer(2)
    manager = CheckpointManager(shared_folder(trainer), keep_last=1, keep_best=("eval_loss", "min"))
    saving = ManagedCheckpoints(manager, every_n_batches=4)
    result = trainer.fit(own, part(rank, size, 16, 8), 2, checkpoints=saving, progress=False)
    again = new_trainer(2)
    more = again.fit(own, part(rank, size, 16, 8), 3, checkpoints=saving, resume=True, progress=False)
    steps = [entry.step for entry in manager.checkpoints]
    return {
        "status": result.status,
        "steps": steps,
        "epochs": len(more.history),
        "files": Path(more.files["last"]).name,
    }


def elastic(rank: int, size: int) -> dict[str, Any]:
    """Goes on, in any number of processes, and stops in the middle of the first epoch, and then of the second.

    ``UNTIL`` is the step of the end, and ``ELASTIC`` the folder of the checkpoints.
    """
    folder, until = Path(os.environ["ELASTIC"]), int(os.environ["UNTIL"])
    trainer = new_trainer(2)
    sampler = DistributedSampler(data(64), size, rank, seed=3)
    position = Position(DataLoader(sampler.dataset, batch_size=8 // size, sampler=sampler))
    losses = []
    with CheckpointManager(folder / "own", keep_last=1) as manager:
        manager.resume(trainer, position)
        for _ in position.epochs(3):
            for x, y in position.batches():
                loss = trainer.train_step(x, y)[0]
                losses.append(sum(trainer.gather({"loss": loss.item()})[at]["loss"] for at in range(size)) / size)
                if trainer.train_step_info.step == until:
                    break
            manager.save(trainer, position)
            if trainer.train_step_info.step == until:
                break
        left = [entry.step for entry in manager.checkpoints]
    fitted = new_trainer()
    sampler = DistributedSampler(data(64), size, rank, seed=3)
    loader = DataLoader(sampler.dataset, batch_size=8 // size, sampler=sampler)
    saving = ManagedCheckpoints(CheckpointManager(folder / "fit", keep_last=1), every_n_batches=1)
    stop = StopAt(until)
    result = fitted.fit(loader, epochs=3, checkpoints=saving, resume=True, progress=False, callbacks=[stop])
    rows = [row["loss"] for row in result.history]
    place = [position.epoch, position.batch]
    return {"losses": losses, "place": place, "left": left, "history": rows, **weights(trainer)} | {
        f"fitted {name}": value for name, value in weights(fitted).items()
    }


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, state: FitState, trainer: ORTTrainer) -> None:
        if trainer.train_step_info.step == self._step:
            state.stop("enough")
