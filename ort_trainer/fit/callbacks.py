"""What is called at the moments of a fit: the base class, early stopping and checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import shown
from ..runs import CheckpointManager
from .state import FitState

if TYPE_CHECKING:
    from ..trainer import ORTTrainer

__all__ = ["Callback", "Checkpoints", "EarlyStopping", "ManagedCheckpoints", "check_interval"]


class Callback:
    """Does nothing at any moment; the moments have the names of PyTorch Lightning.

    Each gets the state of the fit and the trainer. They come in the order in which they are below; callbacks are called
    in the order in which they were given, then the progress, then the checkpoints.

    Attributes:
        in_every_process: Whether each of several processes calls it, or only that of rank 0, as for what writes or
            shows something. Such a callback may not do what processes do together, such as saving a checkpoint.
    """

    in_every_process = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        moments = [name for name in vars(Callback) if name.startswith("on_")]
        unknown = [name for name in vars(cls) if name.startswith("on_") and name not in moments]
        if unknown:
            raise TypeError(f"{cls.__name__} has {unknown}, which would never be called: the moments are {moments}")

    def setup(self, state: FitState, trainer: ORTTrainer) -> None:
        """Before anything else, a checkpoint to resume from included: the place for checks."""

    def on_load_checkpoint(self, state: FitState, trainer: ORTTrainer, checkpoint: Mapping[str, Any]) -> None:
        """A checkpoint was loaded; ``checkpoint`` is its user dict."""

    def on_fit_start(self, state: FitState, trainer: ORTTrainer) -> None:
        """The fit begins."""

    def on_train_epoch_start(self, state: FitState, trainer: ORTTrainer) -> None:
        """An epoch begins, or goes on in the middle (``state.batch``)."""

    def on_train_batch_start(self, state: FitState, trainer: ORTTrainer) -> None:
        """A batch is there."""

    def on_train_batch_end(self, state: FitState, trainer: ORTTrainer) -> None:
        """A batch was trained on."""

    def on_validation_start(self, state: FitState, trainer: ORTTrainer) -> None:
        """All batches of the epoch were trained on; an evaluation begins."""

    def on_validation_end(self, state: FitState, trainer: ORTTrainer) -> None:
        """The evaluation is done; ``state.metrics`` has its numbers, and may be given more."""

    def on_train_epoch_end(self, state: FitState, trainer: ORTTrainer) -> None:
        """The epoch is complete; ``state.history[-1]`` has its figures."""

    def on_save_checkpoint(self, state: FitState, trainer: ORTTrainer, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is about to be saved; ``checkpoint`` is its user dict, and may be given more."""

    def on_exception(self, state: FitState, trainer: ORTTrainer, exception: BaseException) -> None:
        """Something was raised, a KeyboardInterrupt perhaps."""

    def on_fit_end(self, state: FitState, trainer: ORTTrainer) -> None:
        """The fit ends, however it does (``state.status``)."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what checkpoints keep of this callback."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""


def check_interval(name: str, value: Any, optional: bool = False) -> None:
    """Checks a count that a user gave.

    Raises:
        TypeError, ValueError: If it is no int of at least 1 (or None, if it is optional).
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, but {shown(value)} ({type(value).__name__}) was given")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, but {value} was given")


def _check_name(who: str, name: str, names: set[str]) -> None:
    if name not in names:
        raise ValueError(
            f"{who} monitors {name!r}, which the epochs do not give: they have {sorted(names)}. Names of an evaluation "
            "begin with 'eval_', and need an eval_loader"
        )


class _Monitor(Callback):
    """Watches a number of the history for its best value."""

    def __init__(self, monitor: str | None, mode: str, min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', but {shown(mode)} was given")
        if isinstance(min_delta, bool) or not isinstance(min_delta, (int, float)) or not 0 <= min_delta < math.inf:
            raise ValueError(f"min_delta must be a finite number, at least 0, but {shown(min_delta)} was given")
        self.monitor, self.mode, self.min_delta = monitor, mode, min_delta
        self.best: float | None = None
        self._name = ""

    def setup(self, state: FitState, trainer: ORTTrainer) -> None:
        self._name = state.default_monitor if self.monitor is None else self.monitor
        if state.expected is not None:
            self._check(state.expected)

    def improved(self, state: FitState) -> bool:
        """Reads the last row of the history, and says whether it has the best value so far."""
        row = state.history[-1]
        self._check({name for name, value in row.items() if value is not None})
        sign = -1 if self.mode == "max" else 1
        value = row[self._name]
        # Not a number is never better than what there is.
        better = not math.isnan(value) if self.best is None else sign * value < sign * self.best - self.min_delta
        if better:
            self.best = value
        return better

    def _check(self, names: set[str]) -> None:
        _check_name(type(self).__name__, self._name, names)

    def state_dict(self) -> dict[str, Any]:
        return {"monitor": self._name, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["monitor"] == self._name:  # the best of another number says nothing
            self.best = state["best"]


class EarlyStopping(_Monitor):
    """Stops when a number has not improved for some epochs, or is not finite.

    Args:
        monitor: A name of the history; None for ``eval_loss``, or ``loss`` without an eval_loader.
        patience: After how many epochs without an improvement.
        mode: ``min`` or ``max``: which values are better.
        min_delta: By how much a value must be better.

    Raises:
        TypeError, ValueError: If an argument is none that can be.
    """

    def __init__(
        self, monitor: str | None = None, patience: int = 3, mode: str = "min", min_delta: float = 0.0
    ) -> None:
        check_interval("patience", patience)
        super().__init__(monitor, mode, min_delta)
        self.patience, self.waited = patience, 0

    def on_fit_start(self, state: FitState, trainer: ORTTrainer) -> None:
        self._stop_if_due(state)  # resumed where it was stopped

    def on_train_epoch_end(self, state: FitState, trainer: ORTTrainer) -> None:
        self.waited = 0 if self.improved(state) else self.waited + 1
        value = state.history[-1][self._name]
        if not math.isfinite(value):
            state.stop(f"{self._name} is {value}")
        self._stop_if_due(state)

    def _stop_if_due(self, state: FitState) -> None:
        if self.waited >= self.patience:
            state.stop(f"{self._name} has not improved for {self.waited} epochs")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if state["monitor"] == self._name:
            self.waited = state["waited"]


class _Saving(Callback):
    """Saves inside epochs, and at the end what was not saved yet.

    Attributes:
        every_n_batches: Save inside epochs too, each time so many of their batches are done; None for not.
    """

    def __init__(self, every_n_batches: int | None) -> None:
        check_interval("every_n_batches", every_n_batches, optional=True)
        self.every_n_batches = every_n_batches
        self._saved = (0, 0)

    def on_train_batch_end(self, state: FitState, trainer: ORTTrainer) -> None:
        if self.every_n_batches is not None and state.batch % self.every_n_batches == 0:
            self._save_last(state, trainer)

    def on_fit_end(self, state: FitState, trainer: ORTTrainer) -> None:
        if state.status == "failed":
            return
        due = bool(state.steps) and self._saved != (state.steps, len(state.history))
        if any(row["due"] for row in trainer.gather({"due": due})):
            self._save_last(state, trainer)

    def _save_last(self, state: FitState, trainer: ORTTrainer, metrics: Mapping[str, Any] | None = None) -> None:
        state.files["last"] = str(self._write_last(state, trainer, metrics))
        self._saved = (state.steps, len(state.history))

    def _write_last(self, state: FitState, trainer: ORTTrainer, metrics: Mapping[str, Any] | None) -> Path:
        """Writes a checkpoint, with the metrics of an epoch that is complete; returns its path."""
        raise NotImplementedError


class Checkpoints(_Saving, _Monitor):
    """Saves ``last.ortckpt`` after each epoch and at the end, and ``best.ortckpt`` when a number is at its best.

    Args:
        folder: A folder that exists.
        monitor: What decides which is the best: as for :class:`EarlyStopping`.
        mode: ``min`` or ``max``.
        every_n_batches: Save the last one inside epochs too, each time so many of its batches are done.
        overwrite: Whether a fit that does not resume may replace the checkpoints of another.

    Raises:
        FileNotFoundError: If the folder does not exist.
        TypeError, ValueError: If an argument is none that can be.
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
        if not self.folder.is_dir():
            raise FileNotFoundError(f"the folder {str(self.folder)!r} for checkpoints does not exist: make it first")
        self.last, self.best_path = self.folder / "last.ortckpt", self.folder / "best.ortckpt"

    def check_overwrite(self) -> None:
        """Raises a FileExistsError if checkpoints of another fit are there and may not be replaced."""
        found = [str(path) for path in (self.last, self.best_path) if path.exists()]
        if found and not self.overwrite:
            raise FileExistsError(
                f"{found} exist already: go on with them (resume=True), choose another folder, or pass "
                "checkpoints=Checkpoints(folder, overwrite=True)"
            )

    def on_train_epoch_end(self, state: FitState, trainer: ORTTrainer) -> None:
        if self.improved(state):
            state.files["best"] = str(_written(self.best_path, state, trainer))
        self._save_last(state, trainer)

    def _write_last(self, state: FitState, trainer: ORTTrainer, metrics: Mapping[str, Any] | None) -> Path:
        return _written(self.last, state, trainer)


def _written(path: Path, state: FitState, trainer: ORTTrainer) -> Path:
    trainer.save_checkpoint(path, state.checkpoint(), overwrite=True)  # all processes, of which one writes
    return path


class ManagedCheckpoints(_Saving):
    """Saves with a ``CheckpointManager`` after each epoch, whose figures are the metrics, and at the end.

    Args:
        manager: Says where, and what is kept; ``keep_best`` names a number of the history.
        every_n_batches: Save inside epochs too, each time so many of its batches are done.

    Raises:
        TypeError, ValueError: If an argument is none that can be.
    """

    def __init__(self, manager: CheckpointManager, every_n_batches: int | None = None) -> None:
        if not isinstance(manager, CheckpointManager):
            raise TypeError(f"manager must be an ort_trainer.CheckpointManager, but {shown(manager)} was given")
        super().__init__(every_n_batches)
        self.manager = manager

    def setup(self, state: FitState, trainer: ORTTrainer) -> None:
        if self.manager.keep_best is not None and state.expected is not None:
            _check_name("CheckpointManager(keep_best=...)", self.manager.keep_best[0], state.expected)

    def on_train_epoch_end(self, state: FitState, trainer: ORTTrainer) -> None:
        self._save_last(state, trainer, {name: value for name, value in state.history[-1].items() if value is not None})

    def on_fit_end(self, state: FitState, trainer: ORTTrainer) -> None:
        super().on_fit_end(state, trainer)
        if state.status == "failed":
            return
        self.manager.wait()
        best = self.manager.best
        if best is not None:
            state.files["best"] = str(best)

    def _write_last(self, state: FitState, trainer: ORTTrainer, metrics: Mapping[str, Any] | None) -> Path:
        return self.manager.save(trainer, state.position, metrics, state.checkpoint())
