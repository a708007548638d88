"""The loop: epochs of training steps, evaluations, and going on where a checkpoint was saved."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CheckpointError, shown
from ..interrupts import uninterrupted
from .batches import moved, samples, set_epoch
from .callbacks import Callback, Checkpoints, check_interval
from .metrics import Metrics
from .progress import Progress
from .random_state import capture, restore
from .state import EPOCH_COLUMNS, FitState
from .together import Together, mean

if TYPE_CHECKING:
    from ..trainer import ORTTrainer

__all__ = ["fit"]

_KEY = "fit"
_END = object()
_ONCE = "give a list of batches or a DataLoader, which is not empty and can be gone through again"


def fit(
    trainer: ORTTrainer,
    device: torch.device,
    train_loader: Any,
    eval_loader: Any,
    epochs: int,
    *,
    metrics: Any,
    labels: str | None,
    callbacks: Iterable[Callback],
    checkpoints: Any,
    resume: Any,
    progress: bool | Callback,
) -> FitState:
    """Trains; see ``ORTTrainer.fit``."""
    check_interval("epochs", epochs)
    for name, loader in (("train_loader", train_loader), ("eval_loader", eval_loader)):
        if loader is not None or name == "train_loader":
            _check_loader(name, loader, epochs)
    measured = Metrics(metrics)
    if eval_loader is None and len(measured):
        raise ValueError("metrics are computed on an eval_loader, but none was given")
    if labels is not None and not len(measured):
        raise ValueError(f"labels={labels!r} says what metrics compare with, but no metrics were given")
    callbacks = list(callbacks)
    if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
        checkpoints = Checkpoints(checkpoints)
    shows = [Progress()] if progress is True else [progress] if progress is not False else []
    every = [*callbacks, *shows, *([] if checkpoints is None else [checkpoints])]
    for callback in every:
        if not isinstance(callback, Callback):
            raise TypeError(f"a callback must be an ort_trainer.fit.Callback, but {shown(callback)} was given")
    state = _new_state(epochs, train_loader, eval_loader is not None, measured, callbacks)
    path = _path_to_resume(resume, checkpoints)
    if trainer.world_rank:
        every = [callback for callback in every if callback.in_every_process and callback not in shows]
    together = Together(trainer, state)
    together.check_same(
        {
            "epochs": epochs,
            "eval_loader (whether there is one)": eval_loader is not None,
            "number of metrics": len(measured),
            "checkpoints (whether there are any)": checkpoints is not None,
            "every_n_batches of the checkpoints": getattr(checkpoints, "every_n_batches", None),
            "checkpoint to go on from (whether one is found)": path is not None,
        }
    )
    return _Fit(trainer, device, train_loader, eval_loader, measured, labels, every, state, together).run(path)


class _Fit:
    """One call of ``fit``.

    Attributes:
        frozen: The random state to go on with, where it is not that of now.
        loading: Whether a batch is being loaded, so that it has drawn nobody knows what. If nothing is frozen then, who
            goes on takes the state that the batches before have left.
        epoch_random: The random state at the start of the epoch.
    """

    def __init__(
        self,
        trainer: ORTTrainer,
        device: torch.device,
        train_loader: Any,
        eval_loader: Any,
        metrics: Metrics,
        labels: str | None,
        callbacks: list[Callback],
        state: FitState,
        together: Together,
    ) -> None:
        self.trainer, self.device, self.state, self.together = trainer, device, state, together
        self.train_loader, self.eval_loader = train_loader, eval_loader
        self.metrics, self.labels, self.callbacks = metrics, labels, callbacks
        self.frozen: Mapping[str, Any] | None = None
        self.epoch_random: Mapping[str, Any] = {}
        self.loading = False
        state.checkpoint = self.checkpoint

    def run(self, path: str | os.PathLike[str] | None) -> FitState:
        """Runs all that is left, from a checkpoint if there is a path."""
        state = self.state
        self.call("setup")
        if path is not None:
            self.load(path)
        self.call("on_fit_start")
        started = time.perf_counter()
        try:
            with self.together.interruptible():
                while not self.done():
                    self.epoch()
            state.status = "completed" if len(state.history) >= state.epochs else "stopped"
            if self.together.interrupted and state.status == "stopped":
                state.status = "interrupted"
                self.call("on_exception", KeyboardInterrupt())
        except BaseException as error:
            # Of several processes, one that is torn out of what they do together can't end well with the others.
            alone = isinstance(error, KeyboardInterrupt) and not self.together.several
            state.status = "interrupted" if alone else "failed"
            self.call("on_exception", error)
            if not alone:
                self.trainer.loop.strategy.failed(error)
                raise
        finally:
            self.together.end()
            state.seconds = time.perf_counter() - started
            state.outputs = None
            self.call("on_fit_end")
        return state

    def done(self) -> bool:
        """Whether nothing is left to do, in any process."""
        self.together.share({})
        return self.state.done or self.together.interrupted

    def epoch(self) -> None:
        """Trains for an epoch, or what is left of it, and evaluates."""
        state, together = self.state, self.together
        with self.trainer.join(lambda: {_KEY: self.place()}):
            for batch in self.batches():
                self.step(batch)
                if together.stopped():
                    break
        shares = together.share(state.share())
        if state.reason or together.interrupted:
            return
        if not any(share["batch"] for share in shares):
            raise ValueError(f"train_loader gave no batch in epoch {state.epoch}: {_ONCE}")
        self.trainer.optimizer_step()  # of the last window, which may be a partial one
        state.metrics = {}
        if self.eval_loader is not None:
            self.evaluate()
            if together.interrupted:
                return
        state.end_epoch(self.trainer, shares)
        self.frozen = None
        self.call("on_train_epoch_end")
        state.next_epoch()

    def batches(self) -> Iterator[Any]:
        """Yields the batches of the epoch that were not trained on; the order and what is drawn are as they were."""
        state, loader, done = self.state, self.train_loader, self.state.batch
        if done:
            restore(self.epoch_random, loader)
        else:
            self.frozen = self.epoch_random = capture(loader)
        self.loading = True
        self.call("on_train_epoch_start")
        set_epoch(loader, state.epoch - 1)
        rest = iter(loader)
        for number in range(done):
            if next(rest, _END) is _END:
                raise ValueError(f"train_loader has {number} batches, but the checkpoint was saved after {done}")
        if done and self.frozen is not None:
            restore(self.frozen, loader, own=False)  # what was drawn between the batches
        state.begin_clock()
        for batch in rest:
            yield batch
            self.loading = True
        self.loading, self.frozen = False, capture(loader)

    def step(self, batch: Any) -> None:
        """Trains on a batch."""
        trainer, state = self.trainer, self.state
        batch = moved(batch, self.device)
        self.call("on_train_batch_start")
        trainer.prepare(_inputs(batch, trainer))  # an export takes long and can be interrupted; a step is counted
        _loss_place(trainer)
        if len(self.metrics):
            self.label_name()
        with uninterrupted():
            outputs = trainer.train_step(**batch) if isinstance(batch, Mapping) else trainer.train_step(batch)
            loss, _ = _split(trainer, outputs)
            state.count(loss, samples(batch), outputs)
            self.frozen, self.loading = None, False
        self.call("on_train_batch_end")

    def evaluate(self) -> None:
        """Runs the evaluation."""
        trainer, state = self.trainer, self.state
        self.call("on_validation_start")
        self.metrics.reset()
        total, count = 0.0, 0
        for given in self.eval_loader:
            if self.together.pressed:
                break
            batch = moved(given, self.device)
            loss, outputs = _split(trainer, trainer.eval_step(_inputs(batch, trainer)))
            size = samples(batch)
            total, count = total + loss * size, count + size
            if len(self.metrics):
                if not outputs:
                    raise ValueError("metrics need an output besides the loss: describe it in model_desc['outputs']")
                self.metrics.update(outputs[0] if len(outputs) == 1 else outputs, self.label(batch), size)
        counts = [row["count"] for row in self.together.share({"count": count})]
        if self.together.interrupted:
            return
        if not any(counts):
            raise ValueError(f"eval_loader gave no batch in epoch {state.epoch}: {_ONCE}")
        found = {"eval_loss": total / max(count, 1), **self.metrics.compute()}
        known = mean(self.trainer.gather(found), counts)
        state.metrics = dict(known)
        self.call("on_validation_end")
        if self.together.several:
            own = {name: float(value) for name, value in state.metrics.items() if value != known.get(name)}
            state.metrics = {**state.metrics, **mean(self.trainer.gather(own), [1] * len(counts))}

    def label_name(self) -> str:
        """Returns the name of the input that metrics compare outputs with."""
        names = self.trainer.model_desc.input_names
        if self.labels is not None and self.labels not in names:
            raise ValueError(f"labels={self.labels!r} is no input: the model description has {names}")
        usual = [name for name in ("labels", "label") if name in names]
        return self.labels or (usual or names[-1:])[0]

    def label(self, batch: Any) -> Any:
        """Returns what metrics compare outputs with."""
        return self.trainer.loop.graphs.bind((batch,), {})[self.label_name()]

    def call(self, moment: str, *more: Any) -> None:
        """Tells all callbacks."""
        for callback in self.callbacks:
            getattr(callback, moment)(self.state, self.trainer, *more)

    def checkpoint(self) -> dict[str, Any]:
        """Returns the user dict of a checkpoint of now."""
        places = [row[_KEY] for row in self.trainer.gather({_KEY: self.place()})]
        found: dict[str, Any] = {
            _KEY: {
                **places[0],
                "state": self.state.state_dict(self.trainer) | places[0]["state"],
                "callbacks": {name: kept for name, callback in self.named() if (kept := callback.state_dict())},
                "others": places[1:],
            }
        }
        self.call("on_save_checkpoint", found)
        return found

    def place(self) -> dict[str, Any]:
        """Returns where this process stands in its data."""
        now = None if self.loading else capture(self.train_loader)
        return {
            "state": self.state.place(),
            "random": now if self.frozen is None else self.frozen,
            "epoch_random": self.epoch_random,
        }

    def load(self, path: str | os.PathLike[str]) -> None:
        """Restores trainer, callbacks and random state."""
        found = self.trainer.load_checkpoint(path)
        kept = found.get(_KEY)
        if not isinstance(kept, Mapping):
            raise CheckpointError(
                f"{os.fspath(path)!r} was not saved by fit(), so it does not say where to go on: to begin with its "
                "weights, call trainer.load_checkpoint(path), then fit() without resume"
            )
        self.take_place(kept)
        for name, callback in self.named():
            if name in kept["callbacks"]:
                callback.load_state_dict(kept["callbacks"][name])
        self.call("on_load_checkpoint", found)

    def take_place(self, kept: Mapping[str, Any]) -> None:
        """Goes to where this process stood in its data; one that was not there begins where its script has it."""
        places, size = [kept, *kept.get("others", [])], self.trainer.world_size
        if len(places) != size and any(place["state"]["batch"] for place in places):
            raise ValueError(
                f"the checkpoint was saved in the middle of an epoch by {len(places)} processes, each of which has its "
                f"own part of the data, but there are {size}: start as many, or go on from a checkpoint of the end of "
                "an epoch"
            )
        place = dict(zip(range(size), places, strict=False)).get(self.trainer.world_rank)
        self.state.load_state_dict(kept["state"] if place is None else {**kept["state"], **place["state"]})
        if place is None:
            return
        self.epoch_random = place["epoch_random"]
        if self.state.batch:
            self.frozen = place["random"]
        else:
            restore(place["random"], self.train_loader)

    def named(self) -> Iterator[tuple[str, Callback]]:
        """Yields the callbacks, each with a name of its own."""
        count: Counter[str] = Counter()
        for callback in self.callbacks:
            kind = type(callback).__name__
            count[kind] += 1
            yield f"{kind}_{count[kind]}", callback


def _check_loader(name: str, loader: Any, epochs: int) -> None:
    if isinstance(loader, (str, bytes, Mapping, torch.Tensor)) or not isinstance(loader, Iterable):
        raise TypeError(f"{name} must give batches, as a DataLoader or a list does, but {shown(loader)} was given")
    if isinstance(loader, Iterator) and epochs > 1:
        raise TypeError(f"{name} is an iterator, which gives its batches once, but epochs is {epochs}: {_ONCE}")


def _new_state(
    epochs: int, train_loader: Any, evaluates: bool, metrics: Metrics, callbacks: list[Callback]
) -> FitState:
    try:
        batches = len(train_loader)
    except TypeError:  # an iterator, or a DataLoader of an iterable dataset
        batches = None
    own = metrics.names
    adds = any(type(callback).on_validation_end is not Callback.on_validation_end for callback in callbacks)
    expected = None
    if not evaluates:
        expected = set(EPOCH_COLUMNS)
    elif own is not None and not adds:
        expected = {*EPOCH_COLUMNS, "eval_loss", *(f"eval_{name}" for name in own)}
    return FitState(epochs, batches, expected, "eval_loss" if evaluates else "loss")


def _path_to_resume(resume: Any, checkpoints: Checkpoints | None) -> str | os.PathLike[str] | None:
    """Returns the checkpoint to go on from, or None to begin."""
    if isinstance(resume, (str, os.PathLike)):
        return resume
    if not isinstance(resume, bool):
        raise TypeError(f"resume must be True, False or the path of a checkpoint, but {shown(resume)} was given")
    if checkpoints is None:
        if resume:
            raise ValueError("resume=True goes on from the last checkpoint, but no folder for checkpoints was given")
        return None
    if resume and checkpoints.last.exists():
        return checkpoints.last
    checkpoints.check_overwrite()
    return None


def _inputs(batch: Any, trainer: ORTTrainer) -> Any:
    """Returns a batch without what the window takes for itself."""
    if isinstance(batch, Mapping) and trainer.options.batch.gradient_reduction == "weighted":
        return {name: value for name, value in batch.items() if name != "gradient_weight"}
    return batch


def _loss_place(trainer: ORTTrainer) -> int:
    """Returns where the loss is among the outputs of a step."""
    names, loss = trainer.train_step_info.fetches, trainer.model_desc.loss.name
    names = names or trainer.model_desc.output_names
    if loss not in names:
        raise ValueError(f"train_step_info.fetches leaves out the loss, {loss!r}, which fit() needs: put it in")
    return names.index(loss)


def _split(trainer: ORTTrainer, outputs: Any) -> tuple[float, list[Any]]:
    """Returns the loss among the outputs of a step, and the others."""
    found, place = outputs if isinstance(outputs, list) else [outputs], _loss_place(trainer)
    return float(found[place]), found[:place] + found[place + 1 :]
