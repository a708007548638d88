"""The loop: epochs of training steps, evaluations, and resuming from a checkpoint."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.errors import CheckpointError, check_count, shown, was_given
from ..core.interrupts import uninterrupted
from ..runs import CheckpointManager, Position, StopSignals
from ..runs.checks import anything, check_place, entry, load_checked
from ..runs.position import length_of, own_place
from ..runs.trainer import Trainer
from .callbacks import Callback, Checkpoints, ManagedCheckpoints
from .loggers import Progress
from .metrics import Metrics
from .state import EPOCH_COLUMNS, FitState

Check = Callable[[Mapping[str, Any]], None]
Load = Callable[[Trainer, Check], dict[str, Any] | None]
_KEY = "fit"
_END = object()
_ONCE = "pass a list of batches or a DataLoader, not empty and iterable more than once"


def fit(
    trainer: Trainer,
    device: torch.device,
    train_loader: Any,
    eval_loader: Any,
    epochs: int | None,
    *,
    max_steps: int | None,
    eval_every: int | None,
    metrics: Any,
    labels: str | None,
    callbacks: Iterable[Callback],
    checkpoints: Any,
    resume: Any,
    progress: bool | Callback,
    stop_signals: Iterable[str] = (),
) -> FitState:
    """Trains; see ``ORTTrainer.fit``."""
    check_count("epochs", epochs, optional=True)
    check_count("max_steps", max_steps, optional=True)
    check_count("eval_every", eval_every, optional=True)
    if epochs is None and (max_steps is None or isinstance(train_loader, Iterator)):
        epochs = 1
    if eval_every is not None and eval_loader is None:
        raise ValueError(f"eval_every={eval_every} needs an eval_loader, but none was given")
    for name, loader in (("train_loader", train_loader), ("eval_loader", eval_loader)):
        if loader is not None or name == "train_loader":
            several = epochs != 1 if name == "train_loader" else epochs != 1 or eval_every is not None
            _check_loader(name, loader, several)
    measured = Metrics(metrics)
    if eval_loader is None and len(measured):
        raise ValueError("metrics need an eval_loader, but none was given")
    if labels is not None and not len(measured):
        raise ValueError(f"labels={labels!r} is only used by metrics, but no metrics were given")
    if not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks must be a list of callbacks, but {was_given(callbacks)}")
    callbacks = list(callbacks)
    if isinstance(checkpoints, CheckpointManager):
        checkpoints = ManagedCheckpoints(checkpoints)
    elif checkpoints is not None and not isinstance(checkpoints, (Checkpoints, ManagedCheckpoints)):
        checkpoints = Checkpoints(checkpoints)
    shows = [Progress()] if progress is True else [progress] if progress is not False else []
    every = [*callbacks, *shows, *([] if checkpoints is None else [checkpoints])]
    for callback in every:
        if not isinstance(callback, Callback):
            raise TypeError(f"a callback must be an ort_trainer.fit.Callback, but {was_given(callback)}")
    state = _new_state(epochs, max_steps, train_loader, eval_loader is not None, measured, callbacks)
    load = _to_resume(resume, checkpoints)
    if trainer.world_rank:
        every = [callback for callback in every if callback.in_every_process and callback not in shows]
    consensus = _Consensus(trainer, state, stop_signals)
    consensus.check_same(
        {
            "epochs": epochs,
            "max_steps": max_steps,
            "eval_every": eval_every,
            "eval_loader (whether there is one)": eval_loader is not None,
            "number of metrics": len(measured),
            "checkpoints (whether there are any)": checkpoints is not None,
            "every_n_batches of the checkpoints": getattr(checkpoints, "every_n_batches", None),
            "checkpoint to resume from (whether one is found)": load is not None,
        }
    )
    with consensus.interruptible():
        return _Fit(
            trainer, device, train_loader, eval_loader, eval_every, measured, labels, every, state, consensus
        ).run(load)


@dataclass
class _Fit:
    """One call of ``fit``.

    Attributes:
        position: The position in the data; callbacks see it in ``state``.
        prepared: Shapes of batches for which there is a graph.
        batches: The remaining batches of the epoch.
    """

    trainer: Trainer
    device: torch.device
    train_loader: Any
    eval_loader: Any
    eval_every: int | None
    metrics: Metrics
    labels: str | None
    callbacks: list[Callback]
    state: FitState
    consensus: _Consensus

    def __post_init__(self) -> None:
        self.prepared: set[tuple[Any, ...]] = set()
        self.batches: Iterator[Any] = iter(())
        self.position = self.state.position = Position(self.train_loader)
        self.state.checkpoint = self.checkpoint

    def run(self, load: Load | None) -> FitState:
        """Runs the remaining epochs, after loading a checkpoint if there is one."""
        state = self.state
        self.call("setup")
        if load is not None:
            self.load(load)
        self.call("on_fit_start")
        started = time.perf_counter()
        try:
            while not self.done():
                self.epoch()
            state.status = "completed" if state.is_complete else "stopped"
            if self.consensus.interrupted and state.status == "stopped":
                state.status = "interrupted"
                self.call("on_exception", KeyboardInterrupt())
        except BaseException as error:
            # With several processes, one that is interrupted in a joint operation can't end in step with the others.
            alone = isinstance(error, KeyboardInterrupt) and not self.consensus.several
            state.status = "interrupted" if alone else "failed"
            self.call("on_exception", error)
            if not alone:
                self.trainer.loop.strategy.failed(error)
                raise
        finally:
            self.consensus.end()
            state.seconds = time.perf_counter() - started
            state.outputs = None
            self.call("on_fit_end")
        return state

    def done(self) -> bool:
        """Whether the fit is done, in all processes."""
        self.consensus.share({})
        return self.state.done or self.consensus.interrupted

    def epoch(self) -> None:
        """Trains for an epoch, or the rest of one, in parts that end with an evaluation."""
        state, consensus = self.state, self.consensus
        has_begun = is_over = False
        while not is_over and not state.is_complete:
            with self.trainer.join(lambda: {_KEY: self.place(), **self.position.share()}):
                if not has_begun:
                    has_begun = True
                    self.position.begin_epoch()
                    self.call("on_train_epoch_start")
                    self.batches = self.position.load()
                is_over = self.part()
            shares = consensus.share({**state.share(), "is_over": is_over, "has_all": state.has_all_steps})
            if state.reason or consensus.interrupted:
                return
            is_over = all(share["is_over"] for share in shares)
            if is_over and not any(share["batch"] for share in shares):
                raise ValueError(f"train_loader yielded no batch in epoch {state.epoch}: {_ONCE}")
            if is_over or any(share["has_all"] for share in shares):
                self.trainer.optimizer_step()  # the last window may be incomplete
            has_steps = any(share["since"] for share in shares)
            if has_steps:
                state.metrics = {}
                if self.eval_loader is not None:
                    self.evaluate()
                    if consensus.interrupted:
                        return
                state.add_row(self.trainer, shares)
            if is_over:
                state.completed += 1
                self.position.end_epoch()
                self.call("on_train_epoch_end")
            if has_steps:
                self.call("on_row")
        if is_over:
            state.next_epoch()

    def part(self) -> bool:
        """Trains until the next evaluation is due; returns whether the epoch has no more batches in this process."""
        state, consensus = self.state, self.consensus
        state.begin_clock()
        try:
            while not (state.is_due(self.eval_every) or state.has_all_steps):
                batch = next(self.batches, _END)
                if batch is _END:
                    return True
                self.step(batch)
                if consensus.stopped():
                    self.batches = iter(())  # ends workers here, where their errors are expected
                    return False
            if state.batch == state.batches:  # the loader's iterator ends, and with it what it draws
                batch = next(self.batches, _END)
                self.batches = itertools.chain([batch], self.batches)  # if it has more than its length says
                return batch is _END
        except (RuntimeError, ConnectionError, EOFError) as error:
            if not consensus.has_taken_workers(error):
                raise
        return False

    def step(self, batch: Any) -> None:
        """Trains on a batch."""
        trainer, state = self.trainer, self.state
        batch = _moved(batch, self.device)
        self.call("on_train_batch_start")
        shapes = tuple(entry.shape for entry in _arrays(batch))
        if shapes not in self.prepared:  # an export, which takes long, belongs outside uninterrupted()
            trainer.prepare(_inputs(batch, trainer))
            self.prepared.add(shapes)
        _loss_place(trainer)
        if len(self.metrics):
            self.label_name()
        with uninterrupted():
            outputs = trainer.train_step(**batch) if isinstance(batch, Mapping) else trainer.train_step(batch)
            loss, _ = _split(trainer, outputs)
            state.count(loss, _samples(batch), outputs)
            self.position.count()
        self.call("on_train_batch_end")

    def evaluate(self) -> None:
        """Runs the evaluation."""
        trainer, state = self.trainer, self.state
        self.call("on_validation_start")
        self.metrics.reset()
        total, count = 0.0, 0
        for batch in self.eval_loader:
            if self.consensus.pressed:
                break
            batch = _moved(batch, self.device)
            size = _samples(batch)
            if not size:
                continue
            loss, outputs = _split(trainer, trainer.eval_step(_inputs(batch, trainer)))
            total, count = total + loss * size, count + size
            if len(self.metrics):
                if not outputs:
                    raise ValueError("metrics need an output besides the loss: describe it in model_desc['outputs']")
                self.metrics.update(outputs[0] if len(outputs) == 1 else outputs, self.label(batch), size)
        counts = [row["count"] for row in self.consensus.share({"count": count})]
        if self.consensus.interrupted:
            return
        if not any(counts):
            raise ValueError(f"eval_loader yielded no batch in epoch {state.epoch}: {_ONCE}")
        results = {"eval_loss": total / max(count, 1), **self.metrics.compute()}
        means = _mean(self.trainer.gather(results), counts)
        state.metrics = dict(means)
        self.call("on_validation_end")
        if self.consensus.several:
            additions = {name: float(value) for name, value in state.metrics.items() if value != means.get(name)}
            state.metrics = {**state.metrics, **_mean(self.trainer.gather(additions), [1] * len(counts))}

    def label_name(self) -> str:
        """Returns the name of the input that metrics compare outputs with."""
        names = self.trainer.model_desc.input_names
        if self.labels is not None and self.labels not in names:
            raise ValueError(f"labels={self.labels!r} is not an input: the model description has {names}")
        usual = [name for name in ("labels", "label") if name in names]
        return self.labels or (usual or names[-1:])[0]

    def label(self, batch: Any) -> Any:
        """Returns the labels that metrics compare outputs with."""
        return self.trainer.loop.graphs.bind((batch,), {})[self.label_name()]

    def call(self, moment: str, *more: Any) -> None:
        """Calls a method of all callbacks."""
        for callback in self.callbacks:
            getattr(callback, moment)(self.state, self.trainer, *more)

    def checkpoint(self) -> dict[str, Any]:
        """Returns the user dict for a checkpoint of the current state."""
        places = [row[_KEY] for row in self.trainer.gather({_KEY: self.place()})]
        user_dict: dict[str, Any] = {
            _KEY: {
                **places[0],
                "state": self.state.state_dict(self.trainer) | places[0]["state"],
                "callbacks": {name: kept for name, callback in self.named() if (kept := callback.state_dict())},
                "others": places[1:],
            }
        }
        self.call("on_save_checkpoint", user_dict)
        return user_dict

    def place(self) -> dict[str, Any]:
        """Returns the position of this process in its data."""
        return {"state": self.state.place(), **self.position.state_dict()}

    def load(self, load: Load) -> None:
        """Restores the trainer, callbacks and random state, if there is a checkpoint."""
        user_dict = load(self.trainer, self.check)
        if user_dict is None:
            return
        kept = user_dict[_KEY]
        self.take_place(kept)
        for name, callback in self.named():
            if name in kept["callbacks"]:
                callback.load_state_dict(kept["callbacks"][name])
        self.call("on_load_checkpoint", user_dict)

    def check(self, user_dict: Mapping[str, Any]) -> None:
        """Checks a checkpoint before anything is restored.

        Raises:
            CheckpointError: If it was not saved by a fit, or is damaged.
            ValueError: If it has more epochs than this fit, or the loader does not match.
        """
        kept = user_dict.get(_KEY)
        if not isinstance(kept, Mapping):
            raise CheckpointError(
                "the checkpoint was not saved by fit(), so it has no position to resume from: to start with its "
                "weights, call trainer.load_checkpoint(path), then fit() without resume"
            )
        others, callbacks = kept.get("others", []), entry(kept, "callbacks", anything, _KEY)
        if not isinstance(others, list) or not isinstance(callbacks, Mapping):
            raise CheckpointError(f"the other processes and the callbacks of {_KEY!r} must be a list and a dict")
        entry(kept, "state", FitState.check_state, _KEY)
        for key in ("history", "used"):
            entry(kept["state"], key, anything, f"{_KEY}['state']")
        self.state.check_epochs(kept["state"])
        for at, place in enumerate([kept, *others]):
            entry(place, "state", FitState.check_state, f"the place {at} of {_KEY!r}")
            position = _position(kept, place)
            check_place(position, f"the place {at} of {_KEY!r}", None)
            if not position.get("ended") and position["batch"] != place["state"]["batch"]:
                raise CheckpointError(f"the place {at} of {_KEY!r} has two numbers of batches in an epoch not ended")
        if all(
            place.get("ended") and not place["state"]["batch"] and not place.get("batch") for place in (kept, *others)
        ):
            raise CheckpointError(f"the epoch of {_KEY!r} has ended without a batch")
        self.position.check(self.own_place([kept, *others]))
        for name, callback in self.named():
            if name in callbacks:
                callback.check_state(callbacks[name])

    def own_place(self, entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Returns the position of this process from those of a checkpoint, that of rank 0 first."""
        places = [_position(entries[0], entry) for entry in entries]
        return own_place(places, self.trainer.world_rank, self.trainer.world_size, self.train_loader)

    def take_place(self, kept: Mapping[str, Any]) -> None:
        """Restores the position of this process; an additional process starts with its own random states."""
        entries, rank, size = [kept, *kept.get("others", [])], self.trainer.world_rank, self.trainer.world_size
        place = self.own_place(entries)
        counted = dict(entries[min(rank, len(entries) - 1)]["state"])
        if len(entries) != size:  # what the epoch has so far counts once
            sums = {name: sum(entry["state"][name] for entry in entries) for name in ("loss_sum", "loss_samples")}
            counted.update(sums if rank == 0 else dict.fromkeys(sums, 0), batch=place["batch"])
        self.state.load_state_dict({**kept["state"], **counted})
        self.position.load_state_dict(place)

    def named(self) -> Iterator[tuple[str, Callback]]:
        """Yields the callbacks with unique names."""
        count: Counter[str] = Counter()
        for callback in self.callbacks:
            kind = type(callback).__name__
            count[kind] += 1
            yield f"{kind}_{count[kind]}", callback


def _position(kept: Mapping[str, Any], place: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a process's position from a checkpoint, completed for early versions, which stored only part of it."""
    state, epoch = place["state"], kept["state"].get("completed", len(kept["state"]["history"])) + 1
    return {"epoch": epoch, "batch": state["batch"], "batches": state["batches"], **place}


def _check_loader(name: str, loader: Any, several: bool) -> None:
    """Raises an error for what yields no batches, or only once although it is to do so several times."""
    is_batch = isinstance(loader, (Mapping, torch.Tensor)) or (
        isinstance(loader, tuple) and all(isinstance(part, torch.Tensor) for part in loader)
    )
    is_dataset = isinstance(loader, torch.utils.data.Dataset) and not isinstance(loader, Iterable)
    if is_batch or isinstance(loader, (str, bytes)) or not isinstance(loader, Iterable):
        hint = ": for tensors, DataLoader(TensorDataset(x, y), batch_size=32) does" if is_batch else ""
        hint = ": wrap it, DataLoader(dataset, batch_size=32, shuffle=True)" if is_dataset else hint
        raise TypeError(
            f"{name} must yield batches, as a DataLoader or a list does, but {shown(loader)} was given{hint}"
        )
    if isinstance(loader, Iterator) and several:
        raise TypeError(f"{name} is an iterator, usable for one epoch only, but there are several: {_ONCE}")


def _new_state(
    epochs: int | None,
    max_steps: int | None,
    train_loader: Any,
    evaluates: bool,
    metrics: Metrics,
    callbacks: list[Callback],
) -> FitState:
    """Returns the initial state of a fit, with the history's columns if they are known in advance."""
    metric_names = metrics.names
    adds = any(type(callback).on_validation_end is not Callback.on_validation_end for callback in callbacks)
    expected = None
    if not evaluates:
        expected = set(EPOCH_COLUMNS)
    elif metric_names is not None and not adds:
        expected = {*EPOCH_COLUMNS, "eval_loss", *(f"eval_{name}" for name in metric_names)}
    return FitState(epochs, length_of(train_loader), expected, "eval_loss" if evaluates else "loss", max_steps)


def _to_resume(resume: Any, checkpoints: Checkpoints | ManagedCheckpoints | None) -> Load | None:
    """Returns a function that loads the checkpoint to resume from, or None to start a new fit."""
    manager = checkpoints.manager if isinstance(checkpoints, ManagedCheckpoints) else None
    if isinstance(resume, (str, os.PathLike)):
        if manager is not None:
            return lambda trainer, check: manager.resume(trainer, path=resume, check=check)
        return lambda trainer, check: load_checked(trainer, resume, check)
    if not isinstance(resume, bool):
        raise TypeError(f"resume must be True, False or the path of a checkpoint, but {shown(resume)} was given")
    if checkpoints is None:
        if resume:
            raise ValueError("resume=True resumes from the last checkpoint, but checkpoints was not given")
        return None
    if isinstance(checkpoints, Checkpoints):
        last = checkpoints.last
        if resume and last.exists():
            return lambda trainer, check: load_checked(trainer, last, check)
        checkpoints.check_overwrite()
        return None
    if resume:
        latest = checkpoints.manager
        return lambda trainer, check: latest.resume(trainer, check=check)
    checkpoints.manager.check_overwrite()
    return None


def _inputs(batch: Any, trainer: Trainer) -> Any:
    """Returns a batch without the weight of the micro-batch."""
    if isinstance(batch, Mapping) and trainer.loop.options.batch.gradient_reduction == "weighted":
        return {name: value for name, value in batch.items() if name != "gradient_weight"}
    return batch


def _loss_place(trainer: Trainer) -> int:
    """Returns the index of the loss among the outputs of a step."""
    names, loss = trainer.train_step_info.fetches, trainer.model_desc.loss.name
    names = names or trainer.model_desc.output_names
    if loss not in names:
        raise ValueError(f"train_step_info.fetches lacks the loss, {loss!r}, which fit() needs: add it")
    return names.index(loss)


def _split(trainer: Trainer, outputs: Any) -> tuple[float, list[Any]]:
    """Splits the outputs of a step into the loss and the others."""
    outputs, place = outputs if isinstance(outputs, list) else [outputs], _loss_place(trainer)
    return float(outputs[place]), outputs[:place] + outputs[place + 1 :]


class _Consensus:
    """What the processes of a fit exchange to reach the same decisions; works for a single process, too.

    Args:
        trainer: The trainer.
        state: The state of the fit.
        signals: Names of the signals that end the fit.

    Attributes:
        several: Whether there are several processes.
        interrupted: Whether any process had received a signal at the last :meth:`share`.
    """

    def __init__(self, trainer: Trainer, state: FitState, signals: Iterable[str]) -> None:
        self._trainer, self._state, self._strategy = trainer, state, trainer.loop.strategy
        self.several = trainer.world_size > 1
        self.interrupted = False
        self._stop = StopSignals(signals)
        if self._takes_ctrl_c():
            self._stop = StopSignals([*self._stop.signals, "SIGINT"])

    @property
    def pressed(self) -> bool:
        """Whether this process received a signal to stop."""
        return bool(self._stop)

    def check_same(self, settings: Mapping[str, Any]) -> None:
        """Compares settings that must be equal in all processes.

        Raises:
            ValueError: If a setting differs; it is raised in all processes.
        """
        rows = self._trainer.gather(settings)
        for name, value in rows[0].items():
            different = {rank: row[name] for rank, row in enumerate(rows) if row[name] != value}
            if different:
                values = ", ".join(f"{other} in rank {rank}" for rank, other in different.items())
                raise ValueError(
                    f"fit() was called with another {name} in rank {', '.join(map(str, different))}: it is {value} in "
                    f"rank 0, but {values}; pass the same arguments in all processes"
                )

    def share(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the values of all processes, and records whether any asks to stop."""
        state = self._state
        rows = self._trainer.gather({**values, "reason": state.reason, "interrupted": self.pressed})
        state.reason = next((row["reason"] for row in rows if row["reason"]), "")
        self.interrupted = any(row["interrupted"] for row in rows)
        return rows

    def stopped(self) -> bool:
        """Whether training ends here; with several processes all learn it when they meet, and end at the same step."""
        asked = bool(self._state.reason) or self.pressed
        if not self.several:
            return asked
        self._strategy.stop_asked = asked
        return self._strategy.stop_heard

    def has_taken_workers(self, error: Exception) -> bool:
        """Whether a signal to stop, sent to the whole process group, also ended workers of the loader."""
        while_sending = isinstance(error, (ConnectionError, EOFError))  # before the loader itself noticed
        return self.pressed and (while_sending or "DataLoader worker" in str(error))

    def interruptible(self) -> StopSignals:
        """Returns a context that turns the signals that end the fit into requests, reported by :meth:`stopped`."""
        return self._stop

    def _takes_ctrl_c(self) -> bool:
        """Whether Ctrl-C is only a request, because other processes would wait for one that ends at once."""
        in_main = threading.current_thread() is threading.main_thread()
        return self.several and in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def end(self) -> None:
        """Clears the request to stop."""
        self._strategy.stop_asked = False


def _mean(rows: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
    """Returns the weighted mean of the numbers of all processes, by name; equal numbers are returned unchanged.

    Raises:
        ValueError: If the processes have different names.
    """
    for rank, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ValueError(
                f"rank {rank} has the numbers {sorted(row)}, but rank 0 has {sorted(rows[0])}: metrics and callbacks "
                "must return the same names in all processes"
            )
    total = sum(weights)
    means = {}
    for name in rows[0]:
        counted = [(row[name], weight) for row, weight in zip(rows, weights, strict=True) if weight]
        equal = all(other == counted[0][0] for other, _ in counted)
        means[name] = counted[0][0] if equal else sum(other * weight for other, weight in counted) / total
    return means


def _moved(value: Any, device: torch.device) -> Any:
    """Returns a batch with its tensors on a device."""
    if isinstance(value, Mapping):
        return {key: _moved(entry, device) for key, entry in value.items()}
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if type(value) in (list, tuple):
        return type(value)(_moved(entry, device) for entry in value)
    return value


def _arrays(batch: Any) -> Iterator[Any]:
    """Yields the tensors and arrays in a batch."""
    if hasattr(batch, "shape"):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for entry in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _arrays(entry)


def _samples(batch: Any) -> int:
    """Returns the number of samples: the first dimension of the first tensor that has one."""
    return next((int(entry.shape[0]) for entry in _arrays(batch) if entry.shape), 1)
