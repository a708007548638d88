"""Callbacks of a fit: the base class, early stopping and checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import check_count, shown
from ..runs import CheckpointManager
from ..runs.checks import entry, number, optional, text, whole
from ..runs.trainer import Trainer
from .state import FitState


class Callback:
    """The base class of callbacks; its methods do nothing and are named as in PyTorch Lightning.

    Each method gets the state of the fit and the :class:`~ort_trainer.ORTTrainer`. They are called in the order below.
    The user's callbacks come first, in the order given, then the progress, then the checkpoints.

    Attributes:
        in_every_process: Whether every process calls it, or only rank 0, for callbacks that write or show something. A
            callback of rank 0 only must not perform joint operations such as saving a checkpoint.
    """

    in_every_process = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        moments = [name for name in vars(Callback) if name.startswith("on_")]
        unknown = [name for name in vars(cls) if name.startswith("on_") and name not in moments]
        if unknown:
            raise TypeError(f"{cls.__name__} has {unknown}, which are never called: the valid names are {moments}")

    def setup(self, state: FitState, trainer: Any) -> None:
        """Called first, even before a checkpoint is loaded: the place for checks."""

    def on_load_checkpoint(self, state: FitState, trainer: Any, checkpoint: Mapping[str, Any]) -> None:
        """Called after a checkpoint was loaded; ``checkpoint`` is its user dict."""

    def on_fit_start(self, state: FitState, trainer: Any) -> None:
        """Called when the fit begins."""

    def on_train_epoch_start(self, state: FitState, trainer: Any) -> None:
        """Called when an epoch begins, or is resumed in the middle (see ``state.batch``)."""

    def on_train_batch_start(self, state: FitState, trainer: Any) -> None:
        """Called before the training step of a batch."""

    def on_train_batch_end(self, state: FitState, trainer: Any) -> None:
        """Called after the training step of a batch."""

    def on_validation_start(self, state: FitState, trainer: Any) -> None:
        """Called before an evaluation: after the last batch of an epoch, or within it (``eval_every``)."""

    def on_validation_end(self, state: FitState, trainer: Any) -> None:
        """Called after the evaluation; ``state.metrics`` has its results, and more can be added."""

    def on_train_epoch_end(self, state: FitState, trainer: Any) -> None:
        """Called when an epoch is complete; ``state.history[-1]`` has its figures."""

    def on_row(self, state: FitState, trainer: Any) -> None:
        """Called when ``state.history[-1]`` is new: when an epoch is complete, or was evaluated within."""

    def on_save_checkpoint(self, state: FitState, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is saved; ``checkpoint`` is its user dict, and entries can be added."""

    def on_exception(self, state: FitState, trainer: Any, exception: BaseException) -> None:
        """Called when an exception was raised, including KeyboardInterrupt."""

    def on_fit_end(self, state: FitState, trainer: Any) -> None:
        """Called when the fit ends, in whatever way (see ``state.status``)."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the callback's state for checkpoints."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises a ``CheckpointError`` for a damaged state, before anything is restored."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""


def _check_name(who: str, name: str, names: set[str]) -> None:
    """Raises a ValueError if the history does not have the name of a monitored number."""
    if name not in names:
        raise ValueError(
            f"{who} monitors {name!r}, which is not in the history: it has {sorted(names)}. Names of evaluation "
            "results start with 'eval_' and need an eval_loader"
        )


class _Monitor(Callback):
    """Tracks the best value of a number in the history."""

    def __init__(self, monitor: str | None, mode: str, min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', but {shown(mode)} was given")
        if isinstance(min_delta, bool) or not isinstance(min_delta, (int, float)) or not 0 <= min_delta < math.inf:
            raise ValueError(f"min_delta must be a finite number, at least 0, but {shown(min_delta)} was given")
        self.monitor, self.mode, self.min_delta = monitor, mode, min_delta
        self.best: float | None = None
        self._name = ""

    def setup(self, state: FitState, trainer: Trainer) -> None:
        self._name = state.default_monitor if self.monitor is None else self.monitor
        if state.expected is not None:
            self._check(state.expected)

    def improved(self, state: FitState) -> bool:
        """Returns whether the last row of the history has the best value so far."""
        row = state.history[-1]
        self._check({name for name, value in row.items() if value is not None})
        sign = -1 if self.mode == "max" else 1
        value = row[self._name]
        # NaN is never better than another value.
        better = not math.isnan(value) if self.best is None else sign * value < sign * self.best - self.min_delta
        if better:
            self.best = value
        return better

    def _check(self, names: set[str]) -> None:
        _check_name(type(self).__name__, self._name, names)

    def state_dict(self) -> dict[str, Any]:
        return {"monitor": self._name, "best": self.best}

    def check_state(self, state: Mapping[str, Any]) -> None:
        where = f"the state of {type(self).__name__}"
        entry(state, "monitor", text, where)
        entry(state, "best", optional(number), where)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["monitor"] == self._name:  # the best value of another number is meaningless
            self.best = state["best"]


class EarlyStopping(_Monitor):
    """Stops when a number has not improved for some epochs or evaluations, or is not finite.

    Args:
        monitor: A name in the history; None for ``eval_loss``, or ``loss`` without an eval_loader.
        patience: The number of epochs, or evaluations, without improvement after which to stop.
        mode: ``min`` or ``max``: which values are better.
        min_delta: The minimum change that counts as an improvement.

    Raises:
        TypeError, ValueError: If an argument is invalid.
    """

    def __init__(
        self, monitor: str | None = None, patience: int = 3, mode: str = "min", min_delta: float = 0.0
    ) -> None:
        check_count("patience", patience)
        super().__init__(monitor, mode, min_delta)
        self.patience, self.waited = patience, 0

    def on_fit_start(self, state: FitState, trainer: Trainer) -> None:
        self._stop_if_due(state)  # a fit resumed where this callback had stopped it

    def on_row(self, state: FitState, trainer: Trainer) -> None:
        self.waited = 0 if self.improved(state) else self.waited + 1
        value = state.history[-1][self._name]
        if not math.isfinite(value):
            state.stop(f"{self._name} is {value}")
        self._stop_if_due(state)

    def _stop_if_due(self, state: FitState) -> None:
        if self.waited >= self.patience:
            what = "epochs" if len(state.history) == state.completed else "evaluations"
            state.stop(f"{self._name} has not improved for {self.waited} {what}")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "waited": self.waited}

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        entry(state, "waited", whole, "the state of EarlyStopping")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if state["monitor"] == self._name:
            self.waited = state["waited"]


class _Saving(Callback):
    """Saves checkpoints within epochs, and at the end if there are unsaved steps.

    Attributes:
        every_n_batches: The interval, in batches of an epoch, of checkpoints within epochs; None for no such ones.
    """

    def __init__(self, every_n_batches: int | None) -> None:
        check_count("every_n_batches", every_n_batches, optional=True)
        self.every_n_batches = every_n_batches
        self._saved = (0, 0, 0)

    def on_train_batch_end(self, state: FitState, trainer: Trainer) -> None:
        if self.every_n_batches is not None and state.batch % self.every_n_batches == 0:
            self._save_last(state, trainer)

    def on_fit_end(self, state: FitState, trainer: Trainer) -> None:
        if state.status == "failed":
            return
        due = bool(state.steps) and self._saved != _counts(state)
        if any(row["due"] for row in trainer.gather({"due": due})):
            self._save_last(state, trainer)

    def _save_last(self, state: FitState, trainer: Trainer, metrics: Mapping[str, Any] | None = None) -> None:
        state.files["last"] = str(self._write_last(state, trainer, metrics))
        self._saved = _counts(state)

    def _write_last(self, state: FitState, trainer: Trainer, metrics: Mapping[str, Any] | None) -> Path:
        """Writes a checkpoint, with the metrics of a row of the history; returns its path."""
        raise NotImplementedError


def _counts(state: FitState) -> tuple[int, int, int]:
    """Returns what tells the states that a checkpoint would hold."""
    return state.steps, len(state.history), state.completed


class Checkpoints(_Saving, _Monitor):
    """Saves ``last.ortckpt`` after each epoch or evaluation, and ``best.ortckpt`` when a number is at its best.

    Args:
        folder: An existing folder.
        monitor: The number that decides which is best: as for :class:`EarlyStopping`.
        mode: ``min`` or ``max``.
        every_n_batches: The interval, in batches of an epoch, at which to save ``last.ortckpt`` within epochs; None to
            save only after epochs.
        overwrite: Whether a fit that does not resume may replace another fit's checkpoints.

    Raises:
        NotADirectoryError: If the folder is a file.
        TypeError, ValueError: If an argument is invalid.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        monitor: str | None = None,
        mode: str = "min",
        every_n_batches: int | None = None,
        overwrite: bool = False,
    ) -> None:
        _Monitor.__init__(self, monitor, mode)
        _Saving.__init__(self, every_n_batches)
        self.folder, self.overwrite = Path(folder), overwrite
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"checkpoints must be a folder, but {str(self.folder)!r} is a file")
        if self.folder.suffix == ".ortckpt" and not self.folder.exists():
            raise ValueError(
                f"checkpoints must be a folder, not a file such as {str(self.folder)!r}: the files get names"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.last, self.best_path = self.folder / "last.ortckpt", self.folder / "best.ortckpt"

    def check_overwrite(self) -> None:
        """Raises a FileExistsError if there are checkpoints of another fit that must not be replaced."""
        existing = [str(path) for path in (self.last, self.best_path) if path.exists()]
        if existing and not self.overwrite:
            raise FileExistsError(
                f"{existing} exist already: resume from them (resume=True), choose another folder, or pass "
                "checkpoints=Checkpoints(folder, overwrite=True)"
            )

    def on_row(self, state: FitState, trainer: Trainer) -> None:
        if self.improved(state):
            state.files["best"] = str(_written(self.best_path, state, trainer))
        self._save_last(state, trainer)

    def _write_last(self, state: FitState, trainer: Trainer, metrics: Mapping[str, Any] | None) -> Path:
        return _written(self.last, state, trainer)


def _written(path: Path, state: FitState, trainer: Trainer) -> Path:
    """Saves a checkpoint, and returns its path."""
    trainer.save_checkpoint(path, state.checkpoint(), overwrite=True)  # all processes call it; one writes
    return path


class ManagedCheckpoints(_Saving):
    """Saves with a ``CheckpointManager`` after each epoch or evaluation, with its figures as metrics, and at the end.

    Args:
        manager: The manager; its ``keep_best`` names a number in the history.
        every_n_batches: The interval, in batches of an epoch, of checkpoints within epochs; None for no such ones.

    Raises:
        TypeError, ValueError: If an argument is invalid.
    """

    def __init__(self, manager: CheckpointManager, every_n_batches: int | None = None) -> None:
        if not isinstance(manager, CheckpointManager):
            raise TypeError(f"manager must be an ort_trainer.CheckpointManager, but {shown(manager)} was given")
        super().__init__(every_n_batches)
        self.manager = manager

    def setup(self, state: FitState, trainer: Trainer) -> None:
        if self.manager.keep_best is not None and state.expected is not None:
            _check_name("CheckpointManager(keep_best=...)", self.manager.keep_best[0], state.expected)

    def on_row(self, state: FitState, trainer: Trainer) -> None:
        self._save_last(state, trainer, {name: value for name, value in state.history[-1].items() if value is not None})

    def on_fit_end(self, state: FitState, trainer: Trainer) -> None:
        super().on_fit_end(state, trainer)
        if state.status == "failed":
            return
        self.manager.wait()
        best = self.manager.best
        if best is not None:
            state.files["best"] = str(best)

    def _write_last(self, state: FitState, trainer: Trainer, metrics: Mapping[str, Any] | None) -> Path:
        return self.manager.save(trainer, state.position, metrics, state.checkpoint())
