"""The position of a loop in its data: epoch, batch and random state, so that a resumed run continues there."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from ..core import epochs
from ..core.errors import CheckpointError, shown
from ..train.state import copied
from .checks import check_place

_END = object()
# For messages about a loader that differs from the checkpoint's.
_WAY_OUT = "or continue without the position in the data: call resume() without one, and start a new epoch"


class Position:
    """The position of a training loop in its data, which checkpoints include.

    Yields the remaining epochs and batches. A checkpoint has the random states of PyTorch, NumPy and Python, and of a
    DataLoader's and its sampler's own generators, both now and at the start of the epoch. A resumed loop restores the
    state of the epoch's start, then loads and skips the completed batches. A loader with ``state_dict`` and
    ``load_state_dict``, such as torchdata's ``StatefulDataLoader``, restores its position itself instead.

    Args:
        loader: An iterable over the batches of an epoch: a DataLoader, a list. None to keep only the random states.

    Attributes:
        loader: As given.
        epoch: The current or next epoch, from 1.
        batch: The number of completed batches of this epoch.

    Example:
        >>> position = Position(loader)
        >>> manager.resume(trainer, position)
        >>> for epoch in position.epochs(10):
        ...     for x, y in position.batches():
        ...         trainer.train_step(x, y)
        ...         if position.batch % 100 == 0:
        ...             manager.save(trainer, position)
        ...     manager.save(trainer, position)
    """

    def __init__(self, loader: Any = None) -> None:
        self.loader, self.epoch, self.batch = loader, 1, 0
        # The random state to continue with, if it is not the current one.
        self._random: Mapping[str, Any] | None = None
        self._epoch_random: Mapping[str, Any] = {}
        # Whether a batch is being loaded, so the current random state is unknown. A state dict taken then has none, and
        # a resumed loop continues with the state after the skipped batches.
        self._loading = False
        self._begun = self._ended = False
        # The number of restored states; running loops must notice when it changes.
        self._restored = 0
        # The number of batches in the epoch that batches() has just completed.
        self._last: int | None = None
        # For a loader with its own state: the state to load before its next batch, the state at the start of the epoch,
        # and whether the loader was iterated; before that it has no state.
        self._pending: Any = None
        self._epoch_pending: Any = None
        self._used = False

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the numbers of the remaining epochs.

        Args:
            count: The total number of epochs, including completed ones.
        """
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"count must be an int, the total number of epochs, but {shown(count)} was given")
        if isinstance(self.loader, Iterator) and count > 1:
            raise TypeError(
                f"the loader is an iterator, which can be used for one epoch only, but there are {count}: pass a list "
                "of batches or a DataLoader"
            )
        while self.epoch <= count:
            now, restored = self.epoch, self._restored
            yield now
            if self.epoch == now and self._restored == restored:  # the loop left batches() with a break
                self.end_epoch()

    def batches(self) -> Iterator[Any]:
        """Yields the remaining batches of the epoch. A batch counts as completed once yielded, so save after its step.

        After restoring a checkpoint, leave the loop with a break: :meth:`epochs` continues at the restored position.

        Raises:
            ValueError: If the loader has fewer batches than were completed.
            RuntimeError: If another position was restored while the loop continues with the old batches.
        """
        for batch in self.load():
            self.count()
            yield batch
        done = self.batch
        self.end_epoch()
        self._last = done

    def begin_epoch(self) -> None:
        """Restores the random state at the start of the epoch; :meth:`load` calls this if it was not called before."""
        if self._begun or self._ended:
            return
        if not self.batch:
            self._epoch_pending = self._state_of_loader()
            self._random = self._epoch_random = _capture(self.loader)
        else:
            if self._random is None and not self._loading:  # a loop that left its batches and now continues
                self._random = _capture(self.loader)
            if self._pending is None and self._epoch_random:  # an additional process has none
                restore(self._epoch_random, self.loader)
        self._begun = self._loading = True
        self._last = None

    def load(self) -> Iterator[Any]:
        """Yields the remaining batches, for loops that call :meth:`count` and :meth:`end_epoch` themselves.

        Raises:
            ValueError: If the loader has fewer batches than were completed.
        """
        loader, done, loader_state, restored = self.loader, self.batch, self._pending, self._restored
        if self._ended:
            if self._random is not None:
                restore(self._random, loader)
            return
        self.begin_epoch()
        self._begun, self._used = False, True
        set_epoch(loader, self.epoch - 1)
        epochs.begin()
        rest = self._begin_with(loader_state) if loader_state is not None else iter(loader)
        for number in range(done if loader_state is None else 0):
            if next(rest, _END) is _END:
                raise ValueError(f"the loader has {number} batches, but the checkpoint was saved after {done}")
        if done and self._random is not None:  # the loop may have drawn numbers between batches
            restore(self._random, loader, with_loader=loader_state is not None)
        for batch in rest:
            yield batch
            if self._restored != restored:
                raise RuntimeError(
                    "a checkpoint was restored while these batches were being iterated: leave the loop with a break "
                    "after resume(), and call epochs() and batches() of the position again"
                )
            self._loading = True
        self._loading, self._ended, self._random, self._pending = False, True, _capture(loader), None

    def _begin_with(self, state: Any) -> Iterator[Any]:
        """Loads a loader's own state, and returns an iterator over its remaining batches."""
        loader = self.loader
        # A copy, because tensors in a file may be unaligned, and PyTorch's generators crash on those.
        loader.load_state_dict(copied(state))
        if not self.batch:
            if isinstance(loader, DataLoader):
                iter(loader)  # consumes the state, which is of the end of an epoch, and draws random numbers
            restore(self._epoch_random, loader)
        return iter(loader)

    def count(self) -> None:
        """Counts a completed batch."""
        self.batch += 1
        self._random = self._pending = None
        self._loading = False

    def end_epoch(self) -> None:
        """Moves to the next epoch."""
        self._used = self._used and self._ended  # a loader left in mid-epoch has no state between epochs
        self._last = None
        self.epoch, self.batch = self.epoch + 1, 0
        self._random = None
        self._loading = self._begun = self._ended = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint; with several processes, each has its own."""
        now = None if self._loading or self._random is not None else _capture(self.loader)
        length = length_of(self.loader)
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "batches": None if length is not None and self.batch > length else length,  # it says less than it yields
            "order": _order_of(self.loader),
            "ended": self._ended,
            "random": now if self._random is None else self._random,
            "epoch_random": self._epoch_random,
            "loader": self._state_of_loader(),
        }

    def share(self) -> dict[str, Any]:
        """Returns this process's entry in the checkpoints of others; pass this method to ``trainer.join``.

        A process without batches left reports the end of its epoch, not the start of the next, because the others are
        still in that epoch.
        """
        state = self.state_dict()
        if self._last is not None:
            state |= {"epoch": self.epoch - 1, "batch": self._last, "ended": True}
        return {"position": state}

    def _state_of_loader(self) -> Any:
        """Returns the loader's own state for a checkpoint; None if it has none at this moment."""
        if self._pending is not None or not self._used or not _has_state(self.loader):
            return self._pending
        if self._loading:  # the loader is between two batches
            return None if self.batch else self._epoch_pending
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned.

        Restores the random states at once between epochs; within an epoch, when its batches are loaded.

        Raises:
            ValueError: If the loader does not match the one that the state was saved with.
        """
        self.check(state)
        self._restored += 1
        self.epoch, self.batch, self._ended = state["epoch"], state["batch"], state.get("ended", False)
        self._random, self._epoch_random = state["random"], state["epoch_random"]
        self._loading = self._random is None and bool(self.batch)
        self._pending = state.get("loader") if _has_state(self.loader) else None
        self._begun = False
        if self._random is not None and (not self.batch or self._ended):
            restore(self._random, self.loader)
            self._random = self._random if self._ended else None

    def check(self, state: Mapping[str, Any]) -> None:
        """Checks that :meth:`load_state_dict` can restore a state.

        Raises:
            CheckpointError: If the state is damaged.
            ValueError: If the loader does not match the one that the state was saved with.
        """
        check_place(state, "the position in the data", list(_generators(self.loader)))
        now, then = length_of(self.loader), state["batches"]
        yields_more = then is None and now is not None and state["batch"] > now
        if state["batch"] and now != then and not yields_more:
            raise ValueError(
                f"the checkpoint was saved in the middle of an epoch of {then} batches, but the loader has {now}: "
                f"resume with the same data and batch size, {_WAY_OUT}"
            )
        for kept in (state["random"], state["epoch_random"]):
            if kept:
                _check_loader(kept, self.loader)


def own_place(places: Sequence[Mapping[str, Any]], rank: int, size: int, loader: Any = None) -> Mapping[str, Any]:
    """Selects the position of this process from those that the saving processes stored.

    Args:
        places: The result of :meth:`Position.state_dict` in each saving process, by rank.
        rank: The rank of this process.
        size: The number of processes.
        loader: Its loader. In the middle of an epoch, another number of processes goes on after as many samples of the
            order that all processes share.

    Returns:
        Its position; for an additional process, that of rank 0 without random states.

    Raises:
        ValueError: If a different number of processes saved them in the middle of an epoch, of loaders that do not say
            so.
        CheckpointError: If there are none.
    """
    if not places:
        raise CheckpointError(
            "the checkpoint has no position in the data, because it was not saved by a CheckpointManager: load it with "
            "trainer.load_checkpoint(path)"
        )
    if len(places) == size:
        return places[rank]
    place = places[rank] if rank < len(places) else {**places[0], "random": None, "epoch_random": {}}
    if any(entry["batch"] for entry in places):
        place = {**place, "batch": _batches_after(places, size, loader), "batches": length_of(loader)}
    return {**place, "loader": None}


def _batches_after(places: Sequence[Mapping[str, Any]], size: int, loader: Any) -> int:
    """Returns after how many batches a loader has passed the samples that other processes have completed.

    Raises:
        ValueError: If it can't be known, or is not a whole number.
    """
    (then, *others), now = [entry.get("order") for entry in places], _order_of(loader)
    batches, why = {entry["batch"] for entry in places}, ""
    length = length_of(loader)
    if then is None or now is None or any(other != then for other in others) or len(batches) > 1:
        why = (
            "only loaders with a DistributedSampler and equal batches, or in one process without shuffling, say which "
            "samples are left"
        )
    elif any(then[name] != now[name] for name in ("of", "seed")):
        why = f"their samples had the order {then}, and these have {now}"
    elif length is not None and all(entry.get("ended") or entry["batch"] == entry["batches"] for entry in places):
        return length
    elif (samples := batches.pop() * then["together"]) % now["together"]:
        why = f"they completed {samples} samples, which are no multiple of the {now['together']} of a batch of all here"
    else:
        return int(samples // now["together"])
    raise ValueError(
        f"the checkpoint was saved in the middle of an epoch by {len(places)} processes, each with its own part of the "
        f"data, but there are {size}, and {why}: start {len(places)}, or resume from a checkpoint of the end of an "
        "epoch"
    )


def _order_of(loader: Any) -> dict[str, Any] | None:
    """Returns which samples the batches of all processes have in common; None if it is unknown.

    ``of`` and ``seed`` describe an order that is the same in any number of processes. All of them together take the
    next ``together`` samples of it with each batch.
    """
    batch_sampler = loader.batch_sampler if isinstance(loader, DataLoader) else None
    if type(batch_sampler) is not BatchSampler:
        return None
    sampler: Any = batch_sampler.sampler
    if type(sampler) is DistributedSampler:
        seed, together = sampler.seed if sampler.shuffle else None, batch_sampler.batch_size * sampler.num_replicas
        dataset: Any = sampler.dataset
        return {"of": len(dataset), "seed": seed, "together": together}
    if type(sampler) is SequentialSampler:
        return {"of": len(sampler), "seed": None, "together": batch_sampler.batch_size}
    return None


def set_epoch(loader: Any, number: int) -> None:
    """Calls ``set_epoch`` of a loader, such as accelerate's, or otherwise of its samplers."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    owners = (loader,) if hasattr(loader, "set_epoch") else {id(sampler): sampler for sampler in samplers}.values()
    for owner in owners:
        tell = getattr(owner, "set_epoch", None)
        if tell is not None:
            tell(number)


def _has_state(loader: Any) -> bool:
    # accelerate's loaders always have the methods, but a state only if use_stateful_dataloader is set.
    methods = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return methods and getattr(loader, "use_stateful_dataloader", True)


def length_of(loader: Any) -> int | None:
    """Returns the number of batches in an epoch; None if the loader has no length."""
    try:
        return len(loader)
    except TypeError:  # an iterator, or a DataLoader of an iterable dataset
        return None


def _capture(loader: Any) -> dict[str, Any]:
    """Returns the state of torch's, NumPy's and Python's generators, and of the loader's own."""
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
        "loader": [generator.get_state() for generator in _generators(loader)],
    }


def restore(state: Mapping[str, Any], loader: Any, with_loader: bool = True) -> None:
    """Restores what :func:`_capture` returned; accepts lists in place of its tuples, as read from a checkpoint.

    Args:
        state: The state.
        loader: The loader that it was captured with.
        with_loader: Whether to restore the loader's own generators too.

    Raises:
        ValueError: If the loader has a different number of generators.
    """
    if with_loader:
        _check_loader(state, loader)
    torch.set_rng_state(state["torch"].clone())  # PyTorch crashes on unaligned memory, as in a mapped file
    np.random.set_state(state["numpy"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    for generator, value in zip(_generators(loader) if with_loader else (), state["loader"], strict=False):
        generator.set_state(value.clone())


def _check_loader(state: Mapping[str, Any], loader: Any) -> None:
    """Checks that a loader has as many generators as the one that a state was captured with.

    Raises:
        ValueError: If the numbers differ.
    """
    count = len(list(_generators(loader)))
    if count != len(state["loader"]):
        raise ValueError(
            f"the loader has {count} generators of its own, but the checkpoint was saved with {len(state['loader'])}: "
            f"create the loader as before, {_WAY_OUT}"
        )


def _generators(loader: Any) -> Iterator[torch.Generator]:
    """Yields the generators of a loader and its samplers."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    generators = {id(generator): generator for owner in owners if (generator := getattr(owner, "generator", None))}
    yield from (generator for generator in generators.values() if isinstance(generator, torch.Generator))
