"""Callbacks that log the figures of a fit to a CSV file or TensorBoard."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.atomic import atomic_path, check_target
from .callbacks import Callback, check_interval
from .state import EPOCH_COLUMNS, FitState

if TYPE_CHECKING:
    from ..trainer import ORTTrainer

__all__ = ["CSVLogger", "TensorBoardLogger"]


class CSVLogger(Callback):
    """Writes a row for each epoch, and optionally rows for batches, which have a number in the column ``batch``.

    Replaces an existing file; a resumed fit keeps its rows up to the point where it resumes.

    Args:
        path: The file, in an existing folder.
        every_n_batches: The interval, in batches of an epoch, of the rows for batches; None for no such rows.

    Raises:
        TypeError, ValueError: If ``every_n_batches`` is not an int of at least 1.
    """

    in_every_process = False

    def __init__(self, path: str | os.PathLike[str], every_n_batches: int | None = None) -> None:
        check_interval("every_n_batches", every_n_batches, optional=True)
        self.path, self.every_n_batches = Path(path), every_n_batches
        self._columns: list[str] = []

    def setup(self, state: FitState, trainer: ORTTrainer) -> None:
        check_target(self.path)

    def on_fit_start(self, state: FitState, trainer: ORTTrainer) -> None:
        known = self._read() if state.resumed and self.path.exists() else []
        step, epochs = trainer.train_step_info.step, len(state.history)
        # An epoch's row has the step of its last batch, so the step alone would keep the row of an epoch whose
        # evaluation is repeated.
        kept = [row for row in known if int(row["step"]) <= step and (row["batch"] or int(row["epoch"]) <= epochs)]
        self._columns = ["epoch", "batch", *EPOCH_COLUMNS[1:]]
        self._columns += [name for row in kept[-1:] for name in row if name not in self._columns]
        self._write(kept)

    def on_train_batch_end(self, state: FitState, trainer: ORTTrainer) -> None:
        if self.every_n_batches is not None and state.batch % self.every_n_batches == 0:
            self._add({**state.record(trainer), "batch": state.batch})

    def on_train_epoch_end(self, state: FitState, trainer: ORTTrainer) -> None:
        self._add(state.history[-1])

    def _add(self, row: dict[str, Any]) -> None:
        new = [name for name in row if name not in self._columns]
        if new:
            self._columns += new
            self._write([*self._read(), row])
            return
        with self.path.open("a", newline="") as opened:
            csv.DictWriter(opened, self._columns).writerow(row)

    def _read(self) -> list[dict[str, Any]]:
        with self.path.open(newline="") as opened:
            return list(csv.DictReader(opened))

    def _write(self, rows: list[dict[str, Any]]) -> None:
        with atomic_path(self.path) as temporary, temporary.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, self._columns)
            writer.writeheader()
            writer.writerows(rows)


class TensorBoardLogger(Callback):
    """Writes the figures of batches (under ``train/``) and of epochs (under ``epoch/``) for TensorBoard.

    Args:
        folder: The log folder, which is created if needed.
        every_n_batches: The interval, in batches of an epoch, of the figures of batches.

    Raises:
        TypeError, ValueError: If ``every_n_batches`` is not an int of at least 1.
    """

    in_every_process = False

    def __init__(self, folder: str | os.PathLike[str], every_n_batches: int = 1) -> None:
        check_interval("every_n_batches", every_n_batches)
        self.folder, self.every_n_batches = folder, every_n_batches
        self._writer: Any = None

    def setup(self, state: FitState, trainer: ORTTrainer) -> None:
        try:
            from torch.utils import tensorboard  # noqa: F401
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("TensorBoardLogger needs tensorboard: pip install tensorboard") from error

    def on_fit_start(self, state: FitState, trainer: ORTTrainer) -> None:
        from torch.utils import tensorboard

        writer: Any = tensorboard.SummaryWriter
        # Hides what an interrupted fit logged after its last checkpoint.
        purged = trainer.train_step_info.step + 1 if state.resumed else None
        self._writer = writer(os.fspath(self.folder), purge_step=purged)

    def on_train_batch_end(self, state: FitState, trainer: ORTTrainer) -> None:
        if state.batch % self.every_n_batches == 0:
            self._add("train", state.record(trainer))

    def on_train_epoch_end(self, state: FitState, trainer: ORTTrainer) -> None:
        self._add("epoch", state.history[-1])

    def on_fit_end(self, state: FitState, trainer: ORTTrainer) -> None:
        self._writer.close()

    def _add(self, group: str, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if value is not None and name not in ("step", "update"):
                self._writer.add_scalar(f"{group}/{name}", value, row["step"])
