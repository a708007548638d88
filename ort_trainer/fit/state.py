"""The state, history and summary of a fit."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.errors import CheckpointError, shown
from ..runs import Position
from ..runs.checks import entry, number, optional, whole
from ..runs.trainer import Trainer

EPOCH_COLUMNS = ("epoch", "step", "update", "loss", "learning_rate", "grad_norm", "samples_per_second")


class FitState:
    """The state of a fit, which callbacks get and ``fit`` returns.

    Args:
        epochs: As given to ``fit``; None for as many as ``max_steps`` takes.
        max_steps: As given to ``fit``.
        batches: The number of batches in an epoch; None if the loader has no length.
        expected: The names that each row of the history will have; None if unknown in advance.
        default_monitor: The number to monitor by default.

    Attributes:
        epochs, max_steps, batches, expected, default_monitor: As given.
        status: ``running``, ``completed``, ``stopped``, ``interrupted`` or ``failed``.
        reason: Why it was stopped.
        epoch: The current epoch, from 1.
        batch: The number of batches of this epoch trained on so far.
        loss: The loss of the last batch.
        outputs: The outputs of its step, including the loss.
        metrics: The results of the last evaluation; a callback's ``on_validation_end`` may add its own numbers.
        history: A row, a dict, for each completed epoch, and with ``eval_every`` for each evaluation: the epoch's
            number, steps and updates so far, the mean loss since the last row, learning rate and gradient norm of the
            last update, samples per second, and the results of the evaluation.
        completed: The number of completed epochs.
        steps: The number of steps in this call.
        resumed: Whether it resumed from a checkpoint.
        seconds: The duration of this call, set at its end.
        position: The position in the data, for ``CheckpointManager.save(trainer, state.position)``.
        checkpoint: Returns the user dict for a checkpoint, for ``trainer.save_checkpoint(path, state.checkpoint())``.
        files: The paths of the checkpoints written: ``last`` and ``best``.
    """

    def __init__(
        self,
        epochs: int | None,
        batches: int | None,
        expected: set[str] | None,
        default_monitor: str,
        max_steps: int | None = None,
    ) -> None:
        self.epochs, self.max_steps, self.batches = epochs, max_steps, batches
        self.expected, self.default_monitor = expected, default_monitor
        self.status, self.reason = "running", ""
        self.epoch, self.batch, self.steps, self.completed = 1, 0, 0, 0
        # Steps of all epochs up to the last row of the history, the most of any process, and those of this one since.
        self._recorded, self._since = 0, 0
        self.loss: float | None = None
        self.outputs: Any = None
        self.metrics: dict[str, float] = {}
        self.history: list[dict[str, Any]] = []
        self.resumed = False
        self.seconds = 0.0
        self.files: dict[str, str] = {}
        self._loss_sum, self._loss_samples = 0.0, 0
        self._clock, self._timed = 0.0, (0, 0, 0.0)
        self._used: tuple[float | None, ...] = (None, None)
        self.position: Position | None = None
        self.checkpoint: Callable[[], dict[str, Any]] = dict

    def stop(self, reason: str) -> None:
        """Ends the fit after the current batch, or after the epoch if it is at its end."""
        self.reason = reason

    @property
    def done(self) -> bool:
        """Whether the fit was stopped or has done what it was to do."""
        return bool(self.reason) or self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether all epochs or steps are done, and evaluated."""
        in_steps = self.max_steps is not None and self._recorded >= self.max_steps
        return in_steps or (self.epochs is not None and self.completed >= self.epochs)

    @property
    def has_all_steps(self) -> bool:
        """Whether this process has done ``max_steps``."""
        return self.max_steps is not None and self.trained >= self.max_steps

    @property
    def trained(self) -> int:
        """The number of steps so far, including those before a checkpoint."""
        return self._recorded + self._since

    def is_due(self, every: int | None) -> bool:
        """Returns whether so many steps were done since the last row of the history."""
        return every is not None and self._since >= every

    @property
    def steps_left(self) -> int | None:
        """The number of batches that remain, as far as lengths are known."""
        in_steps = None if self.max_steps is None else self.max_steps - self.trained
        if self.batches is None or self.epochs is None:
            return in_steps
        in_epochs = max(0, self.batches * (self.epochs - self.epoch + 1) - self.batch)
        return in_epochs if in_steps is None else min(in_epochs, in_steps)

    @property
    def samples_per_second(self) -> float | None:
        """The speed of this process in this epoch, without the first step (which exports) once there is a second."""
        _, samples, seconds = self._timed
        return samples / seconds if seconds else None

    @property
    def seconds_left(self) -> float | None:
        """The expected duration of the remaining batches, without evaluations; None if unknown."""
        batches, _, seconds = self._timed
        left = self.steps_left
        return None if left is None or not batches else left * seconds / batches

    def begin_clock(self) -> None:
        """Starts timing an epoch, or what follows an evaluation."""
        self._clock, self._timed = time.perf_counter(), (0, 0, 0.0)

    def count(self, loss: float, samples: int, outputs: Any) -> None:
        """Counts a batch after its training step."""
        now = time.perf_counter()
        batches, counted, seconds = (0, 0, 0.0) if self.steps == 1 else self._timed
        self._timed = batches + 1, counted + samples, seconds + now - self._clock
        self._clock = now
        self.batch, self.steps, self._since = self.batch + 1, self.steps + 1, self._since + 1
        self.loss, self.outputs = loss, outputs
        if samples:  # the mean loss of an empty batch is NaN
            self._loss_sum, self._loss_samples = self._loss_sum + loss * samples, self._loss_samples + samples

    def record(self, trainer: Trainer) -> dict[str, Any]:
        """Returns the current figures, with the loss of the last batch."""
        info = trainer.train_step_info
        used: tuple[float | None, ...] = (info.learning_rate, info.grad_norm)
        if info.learning_rate is None:  # no update since a checkpoint was loaded
            used = self._used
        values = (self.epoch, info.step, info.optimization_step, self.loss, *used)
        return dict(zip(EPOCH_COLUMNS, (*values, self.samples_per_second), strict=True))

    def share(self) -> dict[str, Any]:
        """Returns this process's contribution to the figures of a row."""
        return {**self.place(), "speed": self.samples_per_second}

    def add_row(self, trainer: Trainer, shares: Sequence[Mapping[str, Any]]) -> None:
        """Adds the steps since the last row to the history.

        Args:
            trainer: The trainer.
            shares: The results of :meth:`share` of all processes.
        """
        samples = sum(share["loss_samples"] for share in shares)
        loss = sum(share["loss_sum"] for share in shares) / samples if samples else math.nan
        speeds = [share["speed"] for share in shares if share["speed"] is not None]
        joint = {"loss": loss, "samples_per_second": sum(speeds) if speeds else None}
        self.history.append({**self.record(trainer), **joint, **self.metrics})
        self._loss_sum, self._loss_samples = 0.0, 0
        self._recorded, self._since = self._recorded + max(share["since"] for share in shares), 0

    def next_epoch(self) -> None:
        """Moves to the epoch after the completed ones."""
        self.epoch, self.batch = self.completed + 1, 0

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        now = self.record(trainer)
        used = [now["learning_rate"], now["grad_norm"]]
        counts = {"completed": self.completed, "recorded": self._recorded}
        return {**self.place(), **counts, "history": self.history, "used": used}

    def place(self) -> dict[str, Any]:
        """Returns the part of the state that differs between processes."""
        return {
            "batch": self.batch if self.epoch > self.completed else 0,
            "batches": self.batches,
            "since": self._since,
            "loss_sum": self._loss_sum,
            "loss_samples": self._loss_samples,
        }

    @staticmethod
    def check_state(state: Any, where: str) -> None:
        """Checks what :meth:`state_dict` and :meth:`place` returned.

        Raises:
            CheckpointError: If it is damaged.
        """
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{where} must be a dict, but it is {shown(state)}")
        for key, check in _CHECKS.items():
            if key in state or key not in _LATER:
                entry(state, key, check, where)

    def check_epochs(self, state: Mapping[str, Any]) -> int:
        """Returns how many epochs a state has completed.

        Raises:
            ValueError: If they are more than ``fit`` was called with.
        """
        completed: int = state.get("completed", len(state["history"]))  # early versions had no rows but those of epochs
        if self.epochs is not None and completed > self.epochs:
            raise ValueError(f"the checkpoint has {completed} completed epochs, but epochs is only {self.epochs}")
        return completed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        history, completed = list(state["history"]), self.check_epochs(state)
        self.history, self.completed, self.resumed = history, completed, True
        self._recorded = state.get("recorded", history[-1]["step"] if history else 0)
        self._since = state.get("since", state["batch"])
        self.next_epoch()
        self.batch = state["batch"]
        self._loss_sum, self._loss_samples = state["loss_sum"], state["loss_samples"]
        self._used = tuple(state["used"])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plots the losses and metrics of the history into an image file; the file extension selects the format.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
            ValueError: If the history is empty.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("plot() needs matplotlib: pip install matplotlib") from error
        if not self.history:
            raise ValueError("there is nothing to plot: no epoch was completed")
        across = "epoch" if len({row["epoch"] for row in self.history}) == len(self.history) else "step"
        metrics = [name for name in self.history[-1] if name not in (*EPOCH_COLUMNS, "eval_loss")]
        figure = Figure(figsize=(5 * (1 + len(metrics)), 4), layout="constrained")
        axes = figure.subplots(1, 1 + len(metrics), squeeze=False)[0]
        for axis, names in zip(axes, [["loss", "eval_loss"], *([name] for name in metrics)], strict=True):
            for name in names:
                points = [(row[across], row[name]) for row in self.history if name in row]
                if points:
                    axis.plot(*zip(*points, strict=True), marker=".", label=name)
            axis.set_xlabel(across)
            axis.legend()
        figure.savefig(path)

    def __repr__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        done = f"{self.completed} of {self.epochs} epochs"
        if self.max_steps is not None:
            done = f"{self.trained} of {self.max_steps} steps"
        lines = [f"{self.status}{why}: {done}, {self.seconds:.1f} s"]
        if self.history:
            names = list(dict.fromkeys(name for row in self.history for name in row))
            rows = [names, *([shown_number(row.get(name)) for name in names] for row in self.history)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += ["  ".join(c.rjust(width) for c, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, *(f"{name}: {path}" for name, path in self.files.items())])


def _check_history(rows: Any, where: str) -> None:
    """Checks the counts in a history; callbacks may add values of any kind, which are only shown."""
    if not isinstance(rows, list):
        raise CheckpointError(f"{where} must be a list, but it is {shown(rows)}")
    for at, row in enumerate(rows):
        for key in ("epoch", "step"):
            entry(row, key, whole, f"{where}[{at}]")


def _check_used(values: Any, where: str) -> None:
    if not isinstance(values, list) or len(values) != 2:
        raise CheckpointError(f"{where} must be two numbers, but it is {shown(values)}")
    for value in values:
        optional(number)(value, where)


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(("batch", "loss_samples", "since", "completed", "recorded"), whole),
    "batches": optional(whole),
    "loss_sum": number,
    "history": _check_history,
    "used": _check_used,
}
# Early versions did not write them, and other processes' places have only part of the state.
_LATER = ("since", "completed", "recorded", "history", "used")


def shown_number(value: Any) -> str:
    """Formats a number for a table or line."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
