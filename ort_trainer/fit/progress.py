"""Shows the progress of a fit: a tqdm bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .callbacks import Callback
from .state import FitState, shown_number

if TYPE_CHECKING:
    from ..trainer import ORTTrainer

__all__ = ["Progress"]


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

    def on_fit_start(self, state: FitState, trainer: ORTTrainer) -> None:
        if state.resumed:
            self._write(f"resumed after {len(state.history)} epochs and {state.batch} batches")

    def on_train_epoch_start(self, state: FitState, trainer: ORTTrainer) -> None:
        self._shown = time.perf_counter()
        bar = _tqdm() if sys.stderr.isatty() else None
        if bar is not None:
            layout = "{desc} {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt}{postfix}"
            title = f"epoch {state.epoch}/{state.epochs}"
            self._bar = bar(total=state.batches, initial=state.batch, desc=title, bar_format=layout, dynamic_ncols=True)

    def on_train_batch_end(self, state: FitState, trainer: ORTTrainer) -> None:
        now = time.perf_counter()
        if self._bar is not None:
            # Reading the norm may compute it, so do not read it at every step.
            if now - self._shown >= 0.2 or state.batch == state.batches:
                self._shown = now
                self._bar.set_postfix_str(_figures(state, trainer), refresh=False)
            self._bar.update()
        elif now - self._shown >= self.seconds:
            self._shown = now
            place = f"batch {state.batch}/{state.batches or '?'}"
            self._write(f"epoch {state.epoch}/{state.epochs}  {place}  {_figures(state, trainer)}")

    def on_train_epoch_end(self, state: FitState, trainer: ORTTrainer) -> None:
        self._close()
        row = state.history[-1]
        numbers = "  ".join(f"{name} {shown_number(row[name])}" for name in row if name in ("loss", *state.metrics))
        self._write(f"epoch {state.epoch}/{state.epochs}  done  {numbers}  {_speed(state, row)}")

    def on_fit_end(self, state: FitState, trainer: ORTTrainer) -> None:
        self._close()
        self._write(repr(state).splitlines()[0])

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _write(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _tqdm() -> Any:
    """Returns tqdm's bar, or None if it is not installed."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return None
    return tqdm


def _figures(state: FitState, trainer: ORTTrainer) -> str:
    found = state.record(trainer)
    names = {"loss": "loss", "rate": "learning_rate", "norm": "grad_norm"}
    return "  ".join([*(f"{short} {shown_number(found[name])}" for short, name in names.items()), _speed(state)])


def _speed(state: FitState, row: Mapping[str, Any] | None = None) -> str:
    """Returns the speed (of all processes, for a row of the history) and the time left."""
    speed, left = state.samples_per_second if row is None else row["samples_per_second"], state.seconds_left
    text = "" if speed is None else f"{speed:.0f} samples/s"
    if left is None:
        return text
    minutes, seconds = divmod(round(left), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{text}  {hours}:{minutes:02}:{seconds:02} left"
