"""Manages the checkpoints of a run in one directory: saves, removes and resumes from them."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ..core.atomic import atomic_path, remove_abandoned
from ..core.errors import CheckpointError, DistributedError, shown, warn
from ..core.sealed import read_header, verify
from ..state import read_parts, save_checkpoint_file
from ..state.state import State
from ..state.state_dict import to_state_dict
from ..train import state as training_state
from ..train.state import copied
from . import checks
from .position import Position, own_place, restore
from .trainer import Trainer

_PATTERN = "step-*.ortckpt"
_POSITION = "position"
_RUN = "run"  # the part of a file that SavedCheckpoint is read from


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of a directory.

    Attributes:
        path: The file.
        step: The trainer's step count when it was saved.
        number: Its position in the order of saving in the directory, from 1.
        metrics: The metrics passed to :meth:`CheckpointManager.save`.
        between_epochs: Whether any number of processes can resume it. Always True if a single process saved it, which
            keeps no more than ``keep_last``.
    """

    path: Path
    step: int
    number: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    between_epochs: bool = True


class CheckpointManager:
    """Saves the checkpoints of a run in a directory, keeps the latest and the best, and resumes from them.

    See checkpoints.md in the documentation. The files are the trainer's checkpoints, ``step-00001200.ortckpt``. A
    small text file ``latest`` contains the name of the newest one. Files are written atomically: a killed process never
    leaves a partial checkpoint. Files with other names and damaged files are left alone.

    Args:
        directory: The directory, which is created if needed. The processes of one run share it.
        keep_last: The number of newest checkpoints to keep; None for all. With several processes the newest one of the
            end of an epoch is kept, too.
        keep_best: The name of a metric, and ``min`` or ``max``: the checkpoint with the best value is kept too.
        async_save: Whether :meth:`save` only copies the state, and a thread writes it while training continues. The
            copy needs as much memory as the state.
        overwrite: Whether a run that does not :meth:`resume` may replace existing checkpoints.

    Attributes:
        directory: The absolute path, which stays valid when the process changes its working directory.
        keep_last, keep_best, async_save, overwrite: As given.

    Raises:
        TypeError, ValueError: If an argument is invalid.
        NotADirectoryError: If the directory is a file.

    Example:
        >>> with CheckpointManager("run", keep_last=2, keep_best=("eval_loss", "min")) as manager:
        ...     position = Position(loader)
        ...     manager.resume(trainer, position)
        ...     for epoch in position.epochs(10):
        ...         for x, y in position.batches():
        ...             trainer.train_step(x, y)
        ...         manager.save(trainer, position, {"eval_loss": evaluate()})
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep_last: int | None = 3,
        keep_best: tuple[str, str] | None = None,
        async_save: bool = False,
        overwrite: bool = False,
    ) -> None:
        if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int)):
            raise TypeError(f"keep_last must be an int, or None to keep all, but {shown(keep_last)} was given")
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, or None to keep all, but {keep_last} was given")
        for name, value in (("async_save", async_save), ("overwrite", overwrite)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, but {shown(value)} was given")
        self.keep_last, self.keep_best = keep_last, None if keep_best is None else _checked_best(keep_best)
        self.async_save, self.overwrite = async_save, overwrite
        self.directory = Path(directory).absolute()
        if self.directory.exists() and not self.directory.is_dir():
            raise NotADirectoryError(f"the checkpoint directory {str(self.directory)!r} is a file: choose another one")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._ours = overwrite  # whether the existing checkpoints belong to this run
        self._cache: dict[Path, tuple[tuple[int, int, int], SavedCheckpoint | None]] = {}
        self._background = _Background()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        error = self._background.wait()
        if error is None:
            return
        if value is None:
            raise error
        warn(f"a checkpoint was not saved: {type(error).__name__}: {error}")  # must not hide the block's own exception

    @property
    def checkpoints(self) -> list[SavedCheckpoint]:
        """The existing checkpoints, oldest first; only their headers are read.

        A checkpoint that is still being written is missing here, and in :attr:`latest` and :attr:`best`, until
        :meth:`wait`.
        """
        described = [self._look_at(path) for path in self.directory.glob(_PATTERN)]
        return sorted((entry for entry in described if entry is not None), key=lambda entry: (entry.number, entry.step))

    @property
    def latest(self) -> Path | None:
        """The path of the newest checkpoint; None if there is none."""
        checkpoints = self.checkpoints
        return checkpoints[-1].path if checkpoints else None

    @property
    def best(self) -> Path | None:
        """The path of the checkpoint with the best value of ``keep_best``'s metric; None if no checkpoint has it."""
        best = _best_of(self.checkpoints, self.keep_best)
        return None if best is None else best.path

    def save(
        self,
        trainer: Trainer,
        position: Position | None = None,
        metrics: Mapping[str, Any] | None = None,
        user_dict: Mapping[str, Any] | None = None,
    ) -> Path:
        """Saves a checkpoint, and removes outdated ones. With several processes all call it, and one writes.

        Args:
            trainer: The trainer.
            position: The loop's position in its data; without it, only the random states are saved with the trainer.
            metrics: Numbers by name, which :attr:`checkpoints` shows. A checkpoint without metrics is never the best.
            user_dict: As for ``ORTTrainer.save_checkpoint``.

        Returns:
            The path; with ``async_save`` the file exists after :meth:`wait`, the next call, or :meth:`close`.

        Raises:
            FileExistsError: If there are checkpoints of another run.
            OSError: If the file can't be written; earlier checkpoints remain. With ``async_save``, the next call of
                any method, or :meth:`close`, raises the error.
            TypeError, ValueError: If an argument is invalid.
            DistributedError: If it failed in another process.
        """
        failure = self._background.wait()
        user: Mapping[str, Any] = {} if user_dict is None else user_dict
        numbers: dict[str, float] = {}
        place: dict[str, Any] = {}
        try:  # _agree() below raises errors of this process in all processes, so that none waits in vain
            _check_position(position)
            place = (position or Position()).state_dict()
            numbers = self._checked_metrics(metrics)
        except (RuntimeError, TypeError, ValueError) as error:
            failure = failure or error
        rows = _agree(trainer, failure, {_POSITION: place, "ours": self._ours})
        # A process without data left does not know what the others have saved.
        self._ours = any(row.get("ours") for row in rows)
        self.check_overwrite()
        self._ours = True
        places = [row.get(_POSITION) for row in rows]
        if None in places:
            raise ValueError(
                f"rank {places.index(None)} is at the end of trainer.join() without a position in its data: call "
                "trainer.join(position.share) there"
            )
        if self.async_save:
            user, places = copied(user), copied(places)

        def write(state: State) -> None:
            state_dict = to_state_dict(state, copy=self.async_save)
            save = partial(self._write, self._path(trainer), state_dict, user, numbers, places)
            save() if not self.async_save else self._background.start(save)

        training_state.save(trainer.loop, True, write)
        return self._path(trainer)

    def resume(
        self,
        trainer: Trainer,
        position: Position | None = None,
        path: str | os.PathLike[str] | None = None,
        check: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> dict[str, Any] | None:
        """Restores the newest intact checkpoint; skips damaged ones with a warning that gives the reason.

        Call it before the first :meth:`save`, even if there may be no checkpoint yet.

        Args:
            trainer: The trainer; it need not have started.
            position: The position in the data to restore; without it, only the trainer and the random states of
                PyTorch, NumPy and Python are restored.
            path: A particular checkpoint to restore instead, such as :attr:`best`.
            check: Gets the user's dict before anything is restored; a ``CheckpointError`` that it raises refuses the
                file.

        Returns:
            The user's dict; None if there is no checkpoint.

        Raises:
            CheckpointError: If all checkpoints are damaged, or the one at ``path`` is.
            FileNotFoundError: If ``path`` does not exist.
            RuntimeError, ValueError: If the trainer or loader does not match the checkpoint.
            TypeError: If ``position`` is not a :class:`Position`.
            DistributedError: If it failed in another process.
        """
        failure = self._background.wait()
        try:
            _check_position(position)
        except TypeError as error:
            failure = failure or error
        if trainer.world_rank == 0:
            remove_abandoned(self.directory, _PATTERN)
            remove_abandoned(self.directory, "latest")
        candidates = [entry.name for entry in self._candidates()] if path is None else [os.fspath(path)]
        names = _agree(trainer, failure, {"names": candidates})[0]["names"]
        reasons = []
        for name in names:
            file = self.directory / name if path is None else Path(name)
            try:
                user = self._load(trainer, position, file, check)
            except (CheckpointError, FileNotFoundError) as error:  # another process may have just removed it
                if path is not None:
                    raise
                reasons.append(str(error))
                with contextlib.suppress(OSError):
                    self._cache[file] = (_version(file), None)
                if trainer.world_rank == 0:
                    warn(f"skipping the checkpoint {str(file)!r}: {error}")
                continue
            self._ours = True
            return user
        if names:
            raise CheckpointError(
                f"none of the {len(names)} checkpoints in {str(self.directory)!r} can be used: {'; '.join(reasons)}. "
                "To start over, move them away or choose another directory"
            )
        self._ours = True
        return None

    def wait(self) -> None:
        """Waits for the file that is being written.

        Raises:
            OSError, TypeError: If writing failed.
        """
        error = self._background.wait()
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits for the file that is being written; the end of a ``with`` block does so too.

        Raises:
            OSError, TypeError: If writing failed.
        """
        self.wait()

    def check_overwrite(self) -> None:
        """Checks that this run may save in the directory.

        Raises:
            FileExistsError: If there are checkpoints of another run, and ``overwrite`` is False.
        """
        if self._ours:
            return
        existing = [entry.path for entry in self.checkpoints]
        existing = existing or sorted(path for path in self.directory.glob(_PATTERN) if _is_foreign(path))
        if existing:
            raise FileExistsError(
                f"{str(self.directory)!r} has checkpoints of another run, such as {existing[-1].name!r}: continue it "
                "with resume(), choose another directory, or pass CheckpointManager(..., overwrite=True)"
            )

    def _path(self, trainer: Trainer) -> Path:
        return self.directory / f"step-{trainer.train_step_info.step:08d}.ortckpt"

    def _checked_metrics(self, metrics: Mapping[str, Any] | None) -> dict[str, float]:
        if metrics is None:
            return {}
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics must be a dict of numbers by name, but {shown(metrics)} was given")
        numbers = {}
        for name, value in metrics.items():
            try:
                numbers[str(name)] = float(value)
            except (TypeError, ValueError) as error:
                raise TypeError(f"the metric {name!r} must be a number, but {shown(value)} was given") from error
        if self.keep_best is not None and self.keep_best[0] not in numbers:
            raise ValueError(
                f"keep_best compares {self.keep_best[0]!r}, but the metrics are {sorted(numbers)}: include it, or pass "
                "no metrics for a checkpoint that should not be compared"
            )
        return numbers

    def _candidates(self) -> list[Path]:
        """Returns all files in order of preference: unreadable ones (to be reported), the newest, foreign ones."""
        readable = [entry.path for entry in reversed(self.checkpoints)]
        others = {*self.directory.glob(_PATTERN)} - {*readable}
        foreign = {path for path in others if _is_foreign(path)}
        damaged = {path for path in others - foreign if path.is_file()}
        return sorted(damaged, reverse=True) + readable + sorted(foreign, reverse=True)

    def _look_at(self, path: Path) -> SavedCheckpoint | None:
        """Returns a file's description, cached; None if it is damaged or was not saved by a manager."""
        try:
            now = _version(path)
            cached = self._cache.get(path)
            if cached is None or cached[0] != now:
                self._cache[path] = cached = (now, _described(path))
            return cached[1]
        except OSError:  # the file was removed meanwhile, or can't be read
            return None

    def _write(
        self, path: Path, state: dict[str, Any], user: Mapping[str, Any], metrics: dict[str, float], places: list[Any]
    ) -> None:
        """Writes a checkpoint, points ``latest`` to it, and removes outdated checkpoints."""
        before = self.checkpoints
        if before and before[-1].path == path and not metrics:
            metrics = dict(before[-1].metrics)  # the same step saved again, perhaps at the end of a run
        number = before[-1].number + 1 if before else 1
        between = len(places) == 1 or not any(place["batch"] for place in places)
        run = {
            "number": number,
            "step": state["train_step_info"]["step"],
            "metrics": metrics,
            "between_epochs": between,
        }
        parts = {_RUN: run, _POSITION: {"places": places}}
        like = before[-1].path if before else None  # so that private checkpoints stay private
        save_checkpoint_file(path, state, user, overwrite=True, parts=parts, like=like)
        checkpoints = self.checkpoints
        with atomic_path(self.directory / "latest") as temporary:
            temporary.write_text(checkpoints[-1].path.name + "\n", encoding="utf-8")
        kept: list[SavedCheckpoint | None] = [*checkpoints[-(self.keep_last or len(checkpoints)) :]]
        kept.append(_best_of(checkpoints, self.keep_best))
        kept += [entry for entry in checkpoints if entry.between_epochs][-1:]
        for entry in checkpoints:
            if entry not in kept:
                try:
                    entry.path.unlink(missing_ok=True)
                except OSError as error:
                    warn(
                        f"the outdated checkpoint {str(entry.path)!r} can't be removed ({error.strerror}): the new one "
                        "is saved; remove it, or let this user do so"
                    )

    def _load(
        self,
        trainer: Trainer,
        position: Position | None,
        path: Path,
        check: Callable[[Mapping[str, Any]], object] | None,
    ) -> dict[str, Any]:
        """Restores a checkpoint and the position in the data; fails in all processes if it fails in one."""
        if trainer.world_size > 1:
            _check_in_all(trainer, path)
        place: Mapping[str, Any] = {}
        failure: Exception | None = None
        try:
            place = _place(path, trainer, position)
            if check is not None:
                check(*read_parts(path, "user"))
        except (CheckpointError, ValueError, OSError) as error:
            failure = error
        _agree(trainer, failure, {})
        user = trainer.load_checkpoint(path)
        if position is not None:
            position.load_state_dict(place)
        elif place.get("random"):
            restore(place["random"], None, with_loader=False)
        return user


def _check_position(position: Any) -> None:
    if position is not None and not isinstance(position, Position):
        raise TypeError(
            f"position must be an ort_trainer.Position, such as Position(loader), but {shown(position)} was given: "
            "values of your own are saved as user_dict={...}"
        )


def _checked_best(value: Any) -> tuple[str, str]:
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(isinstance(part, str) for part in value):
        raise TypeError(f"keep_best must be the name of a metric and 'min' or 'max', but {shown(value)} was given")
    if value[1] not in ("min", "max"):
        raise ValueError(f"the second part of keep_best must be 'min' or 'max', but {shown(value[1])} was given")
    return value[0], value[1]


def _place(path: Path, trainer: Trainer, position: Position | None) -> Mapping[str, Any]:
    """Returns the saved position of this process; empty if it was not saved and no position is to be restored."""
    (kept,) = read_parts(path, _POSITION)
    places, rank = kept.get("places", []), trainer.world_rank
    if not isinstance(places, list):
        raise CheckpointError(f"{str(path)!r} is damaged: the positions in the data must be a list")
    try:
        for at, place in enumerate(places):
            checks.check_place(place, f"places[{at}]", None)
        if position is None:
            return places[rank] if rank < len(places) else {}
        place = own_place(places, rank, trainer.world_size, position.loader)
        position.check(place)
        return place
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged: invalid position in the data: {error!r}") from error


def _best_of(checkpoints: Sequence[SavedCheckpoint], keep_best: tuple[str, str] | None) -> SavedCheckpoint | None:
    """Returns the first checkpoint with the best value of a metric; ignores checkpoints where it is missing or NaN."""
    if keep_best is None:
        return None
    name, mode = keep_best
    sign = -1 if mode == "max" else 1
    comparable = [entry for entry in checkpoints if not math.isnan(entry.metrics.get(name, math.nan))]
    return min(comparable, key=lambda entry: sign * entry.metrics[name], default=None)


def _version(path: Path) -> tuple[int, int, int]:
    """Returns a key that changes when a file is replaced; times alone are too coarse on some file systems."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _is_foreign(path: Path) -> bool:
    """Returns whether a file is a checkpoint that was not saved by a manager."""
    try:
        return read_parts(path, _RUN) == [{}]
    except (CheckpointError, OSError):
        return False


def _described(path: Path) -> SavedCheckpoint | None:
    """Returns a file's description; None if it is damaged or was not saved by a manager."""
    try:
        (run,) = read_parts(path, _RUN)
        if not run:
            return None
        metrics = {str(name): checks.number(value, str(name)) for name, value in run["metrics"].items()}
        between_epochs = run.get("between_epochs", True) is True  # early versions did not write it
        step, count = (checks.entry(run, key, checks.whole, "run") for key in ("step", "number"))
        return SavedCheckpoint(path, step, count, metrics, between_epochs)
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _agree(trainer: Trainer, failure: Exception | None, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the values of all processes; raises in all of them if one has a failure."""
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    rows = [dict(values)] if trainer.world_size == 1 else trainer.gather({**values, "failure": text})
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {row['failure']}" for rank, row in enumerate(rows) if row.get("failure")]
    if failed:
        raise DistributedError(f"a checkpoint operation failed in another process: {'; '.join(failed)}")
    return rows


def _check_in_all(trainer: Trainer, path: Path) -> None:
    """Raises in all processes if the file is damaged in one of them; each may have its own disk."""
    damage, name = "", repr(str(path))
    try:
        with path.open("rb") as file:
            verify(file, read_header(file, name), name)
    except (CheckpointError, OSError) as error:
        damage = str(error)
    rows = trainer.gather({"damaged": damage})
    damaged = [f"rank {rank}: {row['damaged']}" for rank, row in enumerate(rows) if row["damaged"]]
    if damaged:
        raise CheckpointError("; ".join(damaged))


class _Background:
    """Runs functions in a thread, one at a time, and keeps the error of the last one until :meth:`wait`.

    Python waits for the thread before it exits. An error that was not retrieved by then is printed to stderr.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._errors: list[Exception] = []
        weakref.finalize(self, _report, self._errors)

    def start(self, action: Callable[[], None]) -> None:
        """Runs a function in a thread; call :meth:`wait` for the previous one first."""
        errors = self._errors

        def run() -> None:
            try:
                action()
            except Exception as error:
                errors.append(error)

        self._thread = threading.Thread(target=run, name="ort_trainer checkpoint", daemon=False)
        self._thread.start()

    def wait(self) -> Exception | None:
        """Waits for the function, and returns the exception that it raised; a second call returns None."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._errors.pop() if self._errors else None


def _report(errors: list[Exception]) -> None:
    """Prints the errors that nobody retrieved before the manager is gone."""
    for error in errors:
        print(f"ort_trainer: a checkpoint was not saved: {type(error).__name__}: {error}", file=sys.stderr)
