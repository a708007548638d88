"""Callbacks that show the figures of a fit: progress on the terminal, a CSV file, TensorBoard."""

from __future__ import annotations

import csv
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.atomic import atomic_path, check_target
from ..core.errors import check_count
from ..core.streams import redraws
from ..runs.trainer import Trainer
from .callbacks import Callback
from .state import EPOCH_COLUMNS, FitState, shown_number


class CSVLogger(Callback):
    """Writes the rows of the history, and optionally rows for batches, which have a number in the column ``batch``.

    Replaces an existing file; a resumed fit keeps its rows up to the point where it resumes.

    Args:
        path: The file, in an existing folder.
        every_n_batches: The interval, in batches of an epoch, of the rows for batches; None for no such rows.

    Raises:
        TypeError, ValueError: If ``every_n_batches`` is not an int of at least 1.
    """

    in_every_process = False

    def __init__(self, path: str | os.PathLike[str], every_n_batches: int | None = None) -> None:
        check_count("every_n_batches", every_n_batches, optional=True)
        self.path, self.every_n_batches = Path(path), every_n_batches
        self._columns: list[str] = []

    def setup(self, state: FitState, trainer: Trainer) -> None:
        check_target(self.path)

    def on_fit_start(self, state: FitState, trainer: Trainer) -> None:
        rows = self._read() if state.resumed and self.path.exists() else []
        step, last = trainer.train_step_info.step, state.history[-1]["step"] if state.history else -1
        # The row of an evaluation that is repeated has the step of its last batch.
        kept = [row for row in rows if int(row["step"]) <= (step if row["batch"] else last)]
        self._columns = ["epoch", "batch", *EPOCH_COLUMNS[1:]]
        self._columns += [name for row in kept[-1:] for name in row if name not in self._columns]
        self._write(kept)

    def on_train_batch_end(self, state: FitState, trainer: Trainer) -> None:
        if self.every_n_batches is not None and state.batch % self.every_n_batches == 0:
            self._add({**state.record(trainer), "batch": state.batch})

    def on_row(self, state: FitState, trainer: Trainer) -> None:
        self._add(state.history[-1])

    def _add(self, row: dict[str, Any]) -> None:
        new = [name for name in row if name not in self._columns]
        if new:
            self._columns += new
            self._write([*self._read(), row])
            return
        with self.path.open("a", newline="", encoding="utf-8") as opened:
            csv.DictWriter(opened, self._columns).writerow(row)

    def _read(self) -> list[dict[str, Any]]:
        with self.path.open(newline="", encoding="utf-8") as opened:
            return list(csv.DictReader(opened))

    def _write(self, rows: list[dict[str, Any]]) -> None:
        with atomic_path(self.path) as temporary, temporary.open("w", newline="", encoding="utf-8") as opened:
            writer = csv.DictWriter(opened, self._columns)
            writer.writeheader()
            writer.writerows(rows)


class TensorBoardLogger(Callback):
    """Writes the figures of batches (under ``train/``) and of the history (under ``epoch/``) for TensorBoard.

    Args:
        folder: The log folder, which is created if needed.
        every_n_batches: The interval, in batches of an epoch, of the figures of batches.

    Raises:
        TypeError, ValueError: If ``every_n_batches`` is not an int of at least 1.
    """

    in_every_process = False

    def __init__(self, folder: str | os.PathLike[str], every_n_batches: int = 1) -> None:
        check_count("every_n_batches", every_n_batches)
        self.folder, self.every_n_batches = folder, every_n_batches
        self._writer: Any = None

    def setup(self, state: FitState, trainer: Trainer) -> None:
        try:
            from torch.utils import tensorboard  # noqa: F401
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("TensorBoardLogger needs tensorboard: pip install tensorboard") from error

    def on_fit_start(self, state: FitState, trainer: Trainer) -> None:
        from torch.utils import tensorboard

        writer: Any = tensorboard.SummaryWriter
        # Hides what an interrupted fit logged after its last checkpoint.
        purged = trainer.train_step_info.step + 1 if state.resumed else None
        self._writer = writer(os.fspath(self.folder), purge_step=purged)

    def on_train_batch_end(self, state: FitState, trainer: Trainer) -> None:
        if state.batch % self.every_n_batches == 0:
            self._add("train", state.record(trainer))

    def on_row(self, state: FitState, trainer: Trainer) -> None:
        self._add("epoch", state.history[-1])

    def on_fit_end(self, state: FitState, trainer: Trainer) -> None:
        self._writer.close()

    def _add(self, group: str, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if value is not None and name not in ("step", "update"):
                self._writer.add_scalar(f"{group}/{name}", value, row["step"])


class Progress(Callback):
    """Writes progress to stderr; the time left covers all epochs, without evaluations.

    Args:
        seconds: The interval of plain lines within an epoch.
    """

    in_every_process = False

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self._bar: Any = None
        self._shown = 0.0

    def on_fit_start(self, state: FitState, trainer: Trainer) -> None:
        if state.resumed:
            self._write(f"resumed after {state.trained} steps")

    def on_train_epoch_start(self, state: FitState, trainer: Trainer) -> None:
        self._shown = time.perf_counter()
        bar = _tqdm() if redraws(sys.stderr) else None
        if bar is not None:
            layout = "{desc} {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt}{postfix}"
            total, left = state.batches, state.steps_left
            if left is not None and (total is None or state.batch + left < total):
                total = state.batch + left
            title = _epoch(state) if state.max_steps is None else "training"
            self._bar = bar(total=total, initial=state.batch, desc=title, bar_format=layout, dynamic_ncols=True)

    def on_train_batch_end(self, state: FitState, trainer: Trainer) -> None:
        now = time.perf_counter()
        if self._bar is not None:
            # Reading the norm may compute it, so do not read it at every step.
            if now - self._shown >= 0.2 or state.batch == state.batches:
                self._shown = now
                self._bar.set_postfix_str(_figures(state, trainer), refresh=False)
            self._bar.update()
        elif now - self._shown >= self.seconds:
            self._shown = now
            self._write(f"{_place(state)}  {_figures(state, trainer)}")

    def on_row(self, state: FitState, trainer: Trainer) -> None:
        row = state.history[-1]
        numbers = "  ".join(f"{name} {shown_number(row[name])}" for name in row if name in ("loss", *state.metrics))
        is_over = state.completed == state.epoch
        if is_over or state.has_all_steps:
            self._close()
        place = f"{_epoch(state)}  done" if is_over else _place(state)
        self._write(f"{place}  {numbers}  {_speed(state, row)}")

    def on_fit_end(self, state: FitState, trainer: Trainer) -> None:
        self._close()
        if state.status != "completed":  # which the last epoch's line says
            self._write(f"{state.status}: {state.reason}" if state.reason else f"{state.status}, {_place(state)}")

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _write(self, line: str) -> None:
        if self._bar is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.write(line, file=sys.stderr)  # above the bar


def _epoch(state: FitState) -> str:
    several = "" if state.epochs is None else f"/{state.epochs}"
    return f"epoch {state.epoch}{several}"


def _place(state: FitState) -> str:
    """Returns the step of those to do, or the epoch and its batch."""
    if state.max_steps is not None:
        return f"step {state.trained}/{state.max_steps}"
    return f"{_epoch(state)}  batch {state.batch}/{state.batches or '?'}"


def _tqdm() -> Any:
    """Returns tqdm's bar, in a notebook that of a widget, or None if it is not installed."""
    try:
        from tqdm.auto import tqdm
    except ModuleNotFoundError:
        return None
    return tqdm


def _figures(state: FitState, trainer: Trainer) -> str:
    """Returns loss, learning rate, gradient norm and speed as text."""
    figures = state.record(trainer)
    names = {"loss": "loss", "rate": "learning_rate", "norm": "grad_norm"}
    return "  ".join([*(f"{short} {shown_number(figures[name])}" for short, name in names.items()), _speed(state)])


def _speed(state: FitState, row: Mapping[str, Any] | None = None) -> str:
    """Returns the speed (of all processes, for a row of the history) and the time left."""
    speed, left = state.samples_per_second if row is None else row["samples_per_second"], state.seconds_left
    text = "" if speed is None else f"{speed:.0f} samples/s"
    if left is None:
        return text
    minutes, seconds = divmod(round(left), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{text}  {hours}:{minutes:02}:{seconds:02} left"
