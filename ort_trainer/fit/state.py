"""The state, history and summary of a fit."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..runs import Position
from ..runs.trainer import Trainer

__all__ = ["EPOCH_COLUMNS", "FitState", "shown_number"]

EPOCH_COLUMNS = ("epoch", "step", "update", "loss", "learning_rate", "grad_norm", "samples_per_second")


class FitState:
    """The state of a fit, which callbacks get and ``fit`` returns.

    Args:
        epochs: As given to ``fit``.
        batches: The number of batches in an epoch; None if the loader has no length.
        expected: The names that each row of the history will have; None if unknown in advance.
        default_monitor: The number to monitor by default.

    Attributes:
        epochs, batches, expected, default_monitor: As given.
        status: ``running``, ``completed``, ``stopped``, ``interrupted`` or ``failed``.
        reason: Why it was stopped.
        epoch: The current epoch, from 1.
        batch: The number of batches of this epoch trained on so far.
        loss: The loss of the last batch.
        outputs: The outputs of its step, including the loss.
        metrics: The results of the last evaluation; a callback's ``on_validation_end`` may add its own numbers.
        history: A dict for each completed epoch: its number, steps and updates so far, the mean loss, learning rate and
            gradient norm of the last update, samples per second, and the results of the evaluation.
        steps: The number of steps in this call.
        resumed: Whether it resumed from a checkpoint.
        seconds: The duration of this call, set at its end.
        position: The position in the data, for ``CheckpointManager.save(trainer, state.position)``.
        checkpoint: Returns the user dict for a checkpoint, for ``trainer.save_checkpoint(path, state.checkpoint())``.
        files: The paths of the checkpoints written: ``last`` and ``best``.
    """

    def __init__(self, epochs: int, batches: int | None, expected: set[str] | None, default_monitor: str) -> None:
        self.epochs, self.batches = epochs, batches
        self.expected, self.default_monitor = expected, default_monitor
        self.status, self.reason = "running", ""
        self.epoch, self.batch, self.steps = 1, 0, 0
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
        """Whether the fit was stopped or all epochs are complete."""
        return bool(self.reason) or len(self.history) >= self.epochs

    @property
    def samples_per_second(self) -> float | None:
        """The speed of this process in this epoch, without the first step (which exports) once there is a second."""
        _, samples, seconds = self._timed
        return samples / seconds if seconds else None

    @property
    def seconds_left(self) -> float | None:
        """The expected duration of the remaining batches, without evaluations; None if unknown."""
        batches, _, seconds = self._timed
        if not batches or self.batches is None:
            return None
        return max(0, self.batches * (self.epochs - self.epoch + 1) - self.batch) * seconds / batches

    def begin_clock(self) -> None:
        """Starts timing an epoch."""
        self._clock, self._timed = time.perf_counter(), (0, 0, 0.0)

    def count(self, loss: float, samples: int, outputs: Any) -> None:
        """Counts a batch after its training step."""
        now = time.perf_counter()
        batches, counted, seconds = (0, 0, 0.0) if self.steps == 1 else self._timed
        self._timed = batches + 1, counted + samples, seconds + now - self._clock
        self._clock = now
        self.batch, self.steps = self.batch + 1, self.steps + 1
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
        """Returns this process's contribution to the figures of an epoch."""
        return {**self.place(), "speed": self.samples_per_second}

    def end_epoch(self, trainer: Trainer, shares: Sequence[Mapping[str, Any]]) -> None:
        """Adds the epoch to the history.

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

    def next_epoch(self) -> None:
        """Moves to the epoch after those in the history."""
        self.epoch, self.batch = len(self.history) + 1, 0

    def state_dict(self, trainer: Trainer) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        now = self.record(trainer)
        return {**self.place(), "history": self.history, "used": [now["learning_rate"], now["grad_norm"]]}

    def place(self) -> dict[str, Any]:
        """Returns the part of the state that differs between processes."""
        return {
            "batch": self.batch if self.epoch > len(self.history) else 0,
            "batches": self.batches,
            "loss_sum": self._loss_sum,
            "loss_samples": self._loss_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned.

        Raises:
            ValueError: If it has more epochs than ``fit`` was called with.
        """
        if len(state["history"]) > self.epochs:
            raise ValueError(
                f"the checkpoint has {len(state['history'])} completed epochs, but epochs is only {self.epochs}"
            )
        self.history, self.resumed = list(state["history"]), True
        self.next_epoch()
        self.batch = state["batch"]
        self._loss_sum, self._loss_samples = state["loss_sum"], state["loss_samples"]
        self._used = tuple(state["used"])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plots the losses and metrics of the epochs into an image file; the file extension selects the format.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
            ValueError: If no epoch was completed.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("plot() needs matplotlib: pip install matplotlib") from error
        if not self.history:
            raise ValueError("there is nothing to plot: no epoch was completed")
        metrics = [name for name in self.history[-1] if name not in (*EPOCH_COLUMNS, "eval_loss")]
        figure = Figure(figsize=(5 * (1 + len(metrics)), 4), layout="constrained")
        axes = figure.subplots(1, 1 + len(metrics), squeeze=False)[0]
        for axis, names in zip(axes, [["loss", "eval_loss"], *([name] for name in metrics)], strict=True):
            for name in names:
                points = [(row["epoch"], row[name]) for row in self.history if name in row]
                if points:
                    axis.plot(*zip(*points, strict=True), marker=".", label=name)
            axis.set_xlabel("epoch")
            axis.legend()
        figure.savefig(path)

    def __repr__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        lines = [f"{self.status}{why}: {len(self.history)} of {self.epochs} epochs, {self.seconds:.1f} s"]
        if self.history:
            names = list(dict.fromkeys(name for row in self.history for name in row))
            rows = [names, *([shown_number(row.get(name)) for name in names] for row in self.history)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += ["  ".join(c.rjust(width) for c, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([*lines, *(f"{name}: {path}" for name, path in self.files.items())])


def shown_number(value: Any) -> str:
    """Formats a number for a table or line."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
