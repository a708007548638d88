"""Where a loop stands in its data, so that it goes on there: epoch, batch, and what random numbers come next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import CheckpointError, shown
from ..training.read_state import copied
from .random_state import WAY_OUT, capture, check_loader, restore

__all__ = ["Position", "own_place"]

_END = object()


class Position:
    """The place of a training loop in its data, which checkpoints keep (docs/checkpoints.md).

    It gives the epochs and the batches that are left. A checkpoint has the random states of PyTorch, NumPy and Python,
    and of the generators that a DataLoader or its sampler was given, now and at the start of the epoch. A loop that
    resumes begins its epoch in that state again, and loads and skips the batches that are done. A loader that has
    ``state_dict`` and ``load_state_dict``, as torchdata's ``StatefulDataLoader``, is asked for its place instead.

    Args:
        loader: Gives the batches of an epoch each time it is gone through: a DataLoader, a list. None where only the
            random states are to be kept.

    Attributes:
        loader: As given.
        epoch: The epoch that runs, or comes next, from 1.
        batch: How many of its batches are done.

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
        # The random state to go on with, where it is not that of now.
        self._random: Mapping[str, Any] | None = None
        self._epoch_random: Mapping[str, Any] = {}
        # Whether a batch is being loaded, so that it has drawn nobody knows what. If there is no state to go on with
        # then, who goes on takes the one that the batches before have left.
        self._loading = False
        self._begun = self._ended = False
        # How often a state was restored, which loops that run then must notice.
        self._restored = 0
        # How many batches the epoch had that batches() has just ended.
        self._last: int | None = None
        # Of a loader with a state of its own: what it will be given before its next batch, what it was at the start of
        # the epoch, and whether it was gone through, without which it has nothing to say.
        self._pending: Any = None
        self._epoch_pending: Any = None
        self._used = False

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the numbers of the epochs that are left.

        Args:
            count: How many there are in all, those that are done included.
        """
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"count must be an int, the number of epochs in all, but {shown(count)} was given")
        if isinstance(self.loader, Iterator) and count > 1:
            raise TypeError(
                f"the loader is an iterator, which gives its batches once, but there are {count} epochs: give a list "
                "of batches or a DataLoader, which can be gone through again"
            )
        while self.epoch <= count:
            now, restored = self.epoch, self._restored
            yield now
            if self.epoch == now and self._restored == restored:  # the loop left its batches by a break
                self.end_epoch()

    def batches(self) -> Iterator[Any]:
        """Yields the batches of the epoch that are left; each is done when the loop gets it, so save after its step.

        A loop that goes back to a checkpoint leaves its batches by a break: :meth:`epochs` goes on where that stood.

        Raises:
            ValueError: If the loader has fewer batches than are done.
            RuntimeError: If another place was restored, and the loop asks for the next batch of the old one.
        """
        for batch in self.load():
            self.count()
            yield batch
        done = self.batch
        self.end_epoch()
        self._last = done

    def begin_epoch(self) -> None:
        """Goes to the random state in which the epoch begins; :meth:`load` does it, where it was not done before."""
        if self._begun or self._ended:
            return
        if not self.batch:
            self._epoch_pending = self._state_of_loader()
            self._random = self._epoch_random = capture(self.loader)
        else:
            if self._random is None and not self._loading:  # a loop that has left its batches, and comes back
                self._random = capture(self.loader)
            if self._pending is None:
                restore(self._epoch_random, self.loader)
        self._begun = self._loading = True
        self._last = None

    def load(self) -> Iterator[Any]:
        """Yields the batches that are left, for loops that say by :meth:`count` and :meth:`end_epoch` what is done.

        Raises:
            ValueError: If the loader has fewer batches than are done.
        """
        loader, done, given, restored = self.loader, self.batch, self._pending, self._restored
        if self._ended:
            if self._random is not None:
                restore(self._random, loader)
            return
        self.begin_epoch()
        self._begun, self._used = False, True
        set_epoch(loader, self.epoch - 1)
        rest = self._begin_with(given) if given is not None else iter(loader)
        for number in range(done if given is None else 0):
            if next(rest, _END) is _END:
                raise ValueError(f"the loader has {number} batches, but the checkpoint was saved after {done}")
        if done and self._random is not None:  # what was drawn between the batches
            restore(self._random, loader, own=given is not None)
        for batch in rest:
            yield batch
            if self._restored != restored:
                raise RuntimeError(
                    "a checkpoint was restored in the middle of these batches, which are those of before: leave them "
                    "by a break behind resume(), and ask the position for its epochs and batches again"
                )
            self._loading = True
        self._loading, self._ended, self._random, self._pending = False, True, capture(loader), None

    def _begin_with(self, state: Any) -> Iterator[Any]:
        """Returns what the loader has left behind a state of its own."""
        loader = self.loader
        # A copy, as a tensor in a file has any address, and PyTorch's generators crash on odd ones.
        loader.load_state_dict(copied(state))
        if not self.batch:
            if isinstance(loader, torch.utils.data.DataLoader):
                iter(loader)  # takes the state, of the end of an epoch, and draws for it
            restore(self._epoch_random, loader)
        return iter(loader)

    def count(self) -> None:
        """Counts a batch that is done."""
        self.batch += 1
        self._random = self._pending = None
        self._loading = False

    def end_epoch(self) -> None:
        """Goes on to the next epoch."""
        self._used = self._used and self._ended  # one that was left has no state between epochs
        self._last = None
        self.epoch, self.batch = self.epoch + 1, 0
        self._random = None
        self._loading = self._begun = self._ended = False

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps; of several processes, each has its own."""
        now = None if self._loading or self._random is not None else capture(self.loader)
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "batches": _length(self.loader),
            "ended": self._ended,
            "random": now if self._random is None else self._random,
            "epoch_random": self._epoch_random,
            "loader": self._state_of_loader(),
        }

    def share(self) -> dict[str, Any]:
        """Returns what a process brings to the checkpoints of others, as the argument of ``trainer.join``.

        One that has no batches left is at the end of its epoch, not behind it: it meets the others there.
        """
        state = self.state_dict()
        if self._last is not None:
            state |= {"epoch": self.epoch - 1, "batch": self._last, "ended": True}
        return {"position": state}

    def _state_of_loader(self) -> Any:
        if self._pending is not None or not self._used or not _has_state(self.loader):
            return self._pending
        if self._loading:  # it is somewhere in between
            return None if self.batch else self._epoch_pending
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned.

        Between epochs the random states are put back at once, in the middle of one when its batches are asked for.

        Raises:
            ValueError: If the loader is another one than the state was saved with.
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
        """Checks whether :meth:`load_state_dict` would restore a state.

        Raises:
            ValueError: If the loader is another one than the state was saved with.
        """
        now, then = _length(self.loader), state["batches"]
        if state["batch"] and now != then:
            raise ValueError(
                f"the checkpoint was saved in the middle of an epoch of {then} batches, but the loader has {now}: "
                f"resume with the same data and batch size, {WAY_OUT}"
            )
        for kept in (state["random"], state["epoch_random"]):
            if kept:
                check_loader(kept, self.loader)


def own_place(places: Sequence[Mapping[str, Any]], rank: int, size: int) -> Mapping[str, Any]:
    """Returns the place of a process among those of the processes that have saved a checkpoint.

    Args:
        places: What :meth:`Position.state_dict` has returned in each of them, by rank.
        rank: The rank of this process.
        size: How many processes there are.

    Returns:
        Its place; for a process that was not there, that of rank 0 without random states.

    Raises:
        ValueError: If another number of processes has saved them in the middle of an epoch.
        CheckpointError: If there are none.
    """
    if not places:
        raise CheckpointError(
            "the checkpoint does not say where its loop stood in the data, as no CheckpointManager has saved it: load "
            "it with trainer.load_checkpoint(path)"
        )
    if len(places) != size and any(place["batch"] for place in places):
        raise ValueError(
            f"the checkpoint was saved in the middle of an epoch by {len(places)} processes, each of which has its "
            f"own part of the data, but there are {size}: start as many, or go on from a checkpoint of the end of "
            "an epoch"
        )
    return places[rank] if rank < len(places) else {**places[0], "random": None, "epoch_random": {}, "loader": None}


def set_epoch(loader: Any, number: int) -> None:
    """Tells a loader which epoch begins: itself, as one of accelerate's, or its samplers."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    owners = (loader,) if hasattr(loader, "set_epoch") else {id(sampler): sampler for sampler in samplers}.values()
    for owner in owners:
        tell = getattr(owner, "set_epoch", None)
        if tell is not None:
            tell(number)


def _has_state(loader: Any) -> bool:
    # accelerate's loaders have the methods always, and a state only if that was asked for.
    methods = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return methods and getattr(loader, "use_stateful_dataloader", True)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # an iterator, or a DataLoader of an iterable dataset
        return None
