"""The cases that the processes of test_fit.py run."""

from __future__ import annotations

import io
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim, read_user_dict
from ort_trainer.fit import Callback, Checkpoints, CSVLogger, EarlyStopping, FitState

Batches = list[tuple[torch.Tensor, torch.Tensor]]


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 4))


def new_trainer(steps: int = 1, dropout: float = 0.0) -> ORTTrainer:
    options = ORTTrainerOptions({"batch": {"gradient_accumulation_steps": steps}})
    return ORTTrainer(model(dropout), "auto", optim.AdamConfig(lr=0.01), nn.CrossEntropyLoss(), options)


def data(count: int, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randint(0, 4, (count,), generator=generator))


def part(rank: int, size: int, count: int, batch: int, seed: int = 1, shuffle: bool = False) -> DataLoader[Any]:
    """Returns this rank's part of the data; the batches of all ranks together have a fixed size."""
    found = data(count, seed)
    if size == 1:
        return DataLoader(found, batch_size=batch)
    sampler = DistributedSampler(found, size, rank, shuffle=shuffle, drop_last=False)
    return DataLoader(found, batch_size=batch // size, sampler=sampler)


def accuracy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(-1) == labels).float().mean()


class Counted:
    """Has the interface of torchmetrics, and ignores other processes."""

    def reset(self) -> None:
        self.right, self.seen = 0, 0

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.right += int((outputs.argmax(-1) == labels).sum())
        self.seen += len(labels)

    def compute(self) -> float:
        return self.right / self.seen


class Places(Callback):
    """Records the batches after which its methods were called, and acts after one of them."""

    def __init__(self, at: tuple[int, int] = (0, 0), do: Callable[[FitState], object] | None = None) -> None:
        self.at, self.do = at, do

    def on_train_batch_end(self, state: FitState, trainer: ORTTrainer) -> None:
        if (state.epoch, state.batch) == self.at and self.do is not None:
            self.do(state)


def figures(result: FitState) -> dict[str, Any]:
    names = [name for name in result.history[0] if name != "samples_per_second"] if result.history else []
    return {f"history.{name}": np.array([row[name] for row in result.history], dtype=float) for name in names}


def weights(trainer: ORTTrainer) -> dict[str, Any]:
    state = trainer.state_dict(pytorch_format=True)
    return {f"weight.{name}": value.numpy() for name, value in state.items()}


def outcome(trainer: ORTTrainer, result: FitState) -> dict[str, Any]:
    ends = {"status": result.status, "reason": result.reason, "steps": result.steps, "batch": result.batch}
    return {**ends, **figures(result), **weights(trainer)}


def shared_folder(trainer: ORTTrainer) -> Path:
    """Returns a folder shared by all ranks."""
    own = tempfile.mkdtemp() if trainer.world_rank == 0 else ""
    return Path(trainer.gather({"path": own})[0]["path"])


def even(rank: int, size: int) -> dict[str, Any]:
    """Four batches per epoch, in windows of three: the last window is incomplete."""
    trainer = new_trainer(3)
    folder = shared_folder(trainer)
    shown = io.StringIO()
    log = CSVLogger(folder / "log.csv", every_n_batches=2)
    with redirect_stderr(shown):
        result = trainer.fit(
            part(rank, size, 96, 24),
            part(rank, size, 36, 12, seed=2),
            3,
            metrics={"mean": accuracy, "counted": Counted()},
            callbacks=[log],
            checkpoints=folder,
        )
    files = {"lines": len((folder / "log.csv").read_text().splitlines()), "last": (folder / "last.ortckpt").exists()}
    return {
        **outcome(trainer, result),
        **files,
        "shown": shown.getvalue(),
        "rates": bool(result.history[-1]["samples_per_second"]),
    }


def uneven(rank: int, size: int) -> dict[str, Any]:
    """One rank has seven batches, the other four; windows of three, so the shorter one ends in an incomplete window."""
    batches = list(DataLoader(data(88), batch_size=8))
    own = batches[:7] if rank else batches[7:]
    trainer = new_trainer(3)
    folder = shared_folder(trainer)
    # After five batches, when the other rank is at its end; the checkpoint has that rank's position.
    keep = Places((1, 6), lambda state: shutil.copy(folder / "last.ortckpt", folder / "middle.ortckpt"))
    found = trainer.fit(
        own,
        own[:1] if rank else [],
        2,
        callbacks=[keep],
        checkpoints=Checkpoints(folder, every_n_batches=5),
        progress=False,
    )
    again = new_trainer(3)
    resumed = again.fit(own, own[:1] if rank else [], 2, resume=folder / "middle.ortckpt", progress=False)
    more = {f"resumed.{name}": value for name, value in weights(again).items()}
    return {**outcome(trainer, found), "update": found.history[-1]["update"], "left": resumed.steps, **more}


def within(rank: int, size: int) -> dict[str, Any]:
    """Evaluates every three steps, also while one rank has no batches left, and ends after eleven."""
    batches = list(DataLoader(data(88), batch_size=8))
    own = batches[:7] if rank else batches[7:]
    trainer = new_trainer(2)
    result = trainer.fit(own, own[:2], max_steps=11, eval_every=3, progress=False)
    return outcome(trainer, result)


def stop(rank: int, size: int) -> dict[str, Any]:
    """Only the last rank asks to stop, in the middle of an epoch of 8 batches in windows of 2."""
    trainer = new_trainer(2)
    asks = Places((2, 3), lambda state: state.stop("enough") if rank == size - 1 else None)
    result = trainer.fit(part(rank, size, 96, 12), epochs=3, callbacks=[asks], progress=False)
    return outcome(trainer, result)


class Drift(Callback):
    """Adds a number that differs between ranks, and stops at the end of an epoch on one rank only."""

    def on_validation_end(self, state: FitState, trainer: ORTTrainer) -> None:
        state.metrics["eval_drift"] = float(state.epoch + trainer.world_rank)

    def on_train_epoch_end(self, state: FitState, trainer: ORTTrainer) -> None:
        if trainer.world_rank == 1 and state.epoch == 4:
            state.stop("late")


def monitored(rank: int, size: int) -> dict[str, Any]:
    """Early stopping monitors a number to which the ranks contribute different values."""
    trainer = new_trainer()
    loader = part(rank, size, 48, 24)
    early = EarlyStopping("eval_drift", patience=9)
    result = trainer.fit(loader, loader, 6, callbacks=[Drift(), early], progress=False)
    return {**outcome(trainer, result), "best": early.best}


def interrupt(rank: int, size: int) -> dict[str, Any]:
    """Ctrl-C on one rank, then SIGTERM on another; each time all resume where they were."""

    def press(state: FitState) -> None:
        if rank == size - 1:
            signal.raise_signal(signal.SIGINT)

    def terminate(state: FitState) -> None:
        if rank == 0:
            signal.raise_signal(signal.SIGTERM)

    def start() -> tuple[ORTTrainer, DataLoader[Any]]:
        trainer = new_trainer(2, dropout=0.3)
        torch.manual_seed(5 + rank)  # each rank has its own order
        return trainer, DataLoader(data(40), batch_size=5, shuffle=True)

    whole, loader = start()
    folder = shared_folder(whole)
    expected = whole.fit(loader, loader, 3, progress=False)
    trainer, loader = start()
    callbacks = [Places((2, 3), press)]
    broken = trainer.fit(loader, loader, 3, callbacks=callbacks, checkpoints=folder, progress=False)
    trainer, loader = start()
    callbacks = [Places((3, 1), terminate)]
    signals = ["SIGTERM"] if rank == 0 else []
    ended = trainer.fit(
        loader, loader, 3, callbacks=callbacks, checkpoints=folder, resume=True, stop_signals=signals, progress=False
    )
    again, loader = start()
    torch.manual_seed(99)
    resumed = again.fit(loader, loader, 3, checkpoints=folder, resume=True, progress=False)
    found = weights(again)
    return {
        "status": broken.status,
        "batch": broken.batch,
        "status of the second": ended.status,
        "batch of the second": ended.batch,
        "resumed": resumed.resumed,
        "same": all(np.array_equal(value, found[name]) for name, value in weights(whole).items()),
        "loss": [row["loss"] for row in resumed.history] == [row["loss"] for row in expected.history],
        "handler": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    }


def different(rank: int, size: int) -> dict[str, Any]:
    """Different arguments and a checkpoint of another number of processes are errors in all ranks; then fit works."""
    trainer = new_trainer()
    loader = part(rank, size, 48, 24)
    folder = shared_folder(trainer)
    once = Places((1, 1), lambda state: state.stop("enough"))
    broken = trainer.fit(loader, epochs=2, callbacks=[once], checkpoints=folder, progress=False)
    kept = read_user_dict(folder / "last.ortckpt")
    places = [kept["fit"], *kept["fit"].pop("others"), kept["fit"]]
    # As of loaders that don't say which samples are left.
    places = [{**place, "order": None} for place in places]
    trainer.save_checkpoint(folder / "three.ortckpt", {"fit": {**places[0], "others": places[1:]}})
    errors = ["" if broken.batch == 2 else "not stopped"]
    for arguments in (
        {"epochs": 1 + rank},
        {"eval_loader": loader if rank else None},
        {"epochs": 2, "resume": folder / "three.ortckpt"},
    ):
        try:
            trainer.fit(loader, progress=False, **arguments)
        except ValueError as error:
            errors.append(str(error))
    result = trainer.fit(loader, progress=False)
    return {"errors": "\n".join(errors), "status": result.status}
