"""How the processes that train one model cooperate: the seam between the backward pass and the weight update.

Nothing else in the package knows about ranks. ``SingleProcess`` is the strategy of a single process; ``distributed/``
has the others.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch

from ..core.errors import DistributedError
from ..optim.parts import Named, Parts
from .window import Share

__all__ = ["Meeting", "SingleProcess", "Strategy", "check_done", "together"]

Result = TypeVar("Result")
_weight = attrgetter("weight")


class Meeting(NamedTuple):
    """What the processes agreed on before a joint operation.

    Attributes:
        kind: The operation: ``update`` with the gradients of windows, ``step`` with those in ``p.grad``, ``pass`` (a
            backward pass of the user's own loop), ``state`` or ``model`` (collect the state with or without the
            optimizer), ``save`` or ``load`` (report whether it succeeded), or ``gather``.
        shares: The contribution of each process, by rank.
        rates: The learning rates.
        present: Parameters that have gradients in any process.
        changed: Buffers that training changes in any process.
        step: The highest number of ``train_step`` calls in any process.
        doing: The lowest rank that does not merely follow.
    """

    kind: str
    shares: Sequence[Share]
    rates: Sequence[float] = ()
    present: Collection[str] = ()
    changed: Collection[str] = ()
    step: int = 0
    doing: int = 0

    @property
    def weight(self) -> float:
        """The total weight of all micro-batches."""
        total: float = sum(map(_weight, self.shares))
        return total

    @property
    def leader(self) -> int:
        """The lowest rank with a contribution; 0 if there is none."""
        return next((rank for rank, share in enumerate(self.shares) if share.weight), 0)


class Strategy(ABC):
    """How the processes that train one model work together.

    :meth:`lay_out`, :meth:`started` and :meth:`failed` concern only this process. All processes call the other methods
    together, after a :meth:`meet` that agreed on the operation.

    Attributes:
        world_size: The number of processes.
        world_rank: The rank of this process, from 0.
        zero_stage: 1 if each process keeps a part of the optimizer's state; else 0.
        joining: Whether this process is in a context of :meth:`join`.
        stop_asked: Whether this process wants all to stop; the others learn it at the next meeting.
        stop_heard: Whether any process asked to stop at the last meeting.
    """

    world_size: int
    world_rank: int
    zero_stage: int = 0
    joining: bool = False
    stop_asked: bool = False
    stop_heard: bool = False

    @abstractmethod
    def begin(self, tensors: Named, traits: Mapping[str, Any], seed: int) -> int:
        """Checks that all processes train the same model, and copies the weights of rank 0 to all.

        Args:
            tensors: Parameters and buffers; they are overwritten in place.
            traits: Settings that must be equal in all processes: JSON values by their names in messages.
            seed: Seed of training's random numbers.

        Returns:
            The seed of this process.

        Raises:
            DistributedError: If settings differ; it is raised in all processes.
        """

    @abstractmethod
    def lay_out(self, trainable: Named) -> tuple[dict[str, torch.Tensor], Parts]:
        """Returns the required gradient memory by parameter name, if any, and the parts that this process updates."""

    @abstractmethod
    def started(self, dtypes: Mapping[str, str]) -> None:
        """Records the dtypes of the first batch; the next :meth:`meet` for an update compares them.

        Args:
            dtypes: Dtypes by input name.
        """

    @abstractmethod
    def meet(
        self,
        kind: str,
        share: Share,
        rates: Sequence[float] = (),
        present: Collection[str] = (),
        changed: Collection[str] = (),
        step: int = 0,
    ) -> Meeting:
        """Waits for the other processes and agrees with them on the next operation.

        Args:
            kind: As in :class:`Meeting`. A process that has no data left passes ``follow`` to do what the others do.
            share: The contribution of this process.
            rates: The learning rates, which must be equal; a process that follows takes those of the others.
            present: Parameters that have gradients here.
            changed: Buffers that training changes here.
            step: The ``train_step`` calls so far.

        Raises:
            DistributedError: If another process does not arrive in time, or requests another operation, or has other
                rates, another loss scale or, for ``step``, gradients of other parameters.
        """

    @abstractmethod
    def reduce(self, meeting: Meeting, gradients: Named) -> tuple[Named, Share]:
        """Combines the gradients of all windows.

        Args:
            meeting: From :meth:`meet`.
            gradients: The gradients of this process, multiplied by the loss scale, in the memory from :meth:`lay_out`;
                they may be overwritten.

        Returns:
            The gradients for the parts that this process updates, and the share that they represent.
        """

    @abstractmethod
    def average(self, meeting: Meeting, gradients: Named) -> dict[str, torch.Tensor]:
        """Returns the mean of new gradients over the processes; may overwrite the gradients."""

    @abstractmethod
    def spread(self, meeting: Meeting, parameters: Named, buffers: Named) -> None:
        """Copies results of a pass or update to the processes that lack them.

        Args:
            meeting: The meeting of the pass or update.
            parameters: The parameters whose parts this process updated; empty if there was no update.
            buffers: All buffers; those that training changes get the leader's values.
        """

    @abstractmethod
    def total(self, meeting: Meeting, gradients: Named, keep: bool = True) -> dict[str, torch.Tensor]:
        """Returns the sum of the gradients of all windows so far; the windows continue.

        Args:
            meeting: From :meth:`meet`; the sum has its total weight, in the leader's unit.
            gradients: The gradients of this process, as for :meth:`reduce`.
            keep: Whether this process needs the result; if not, it is empty.
        """

    @abstractmethod
    def whole(self, parts: Named, keep: bool = True) -> dict[str, torch.Tensor]:
        """Assembles tensors from the parts of all processes, in the shapes of the parameters.

        Args:
            parts: By parameter name.
            keep: Whether this process needs the result; if not, it is empty.
        """

    @abstractmethod
    def gather(self, data: bytes) -> list[bytes]:
        """Returns the data of all processes, by rank."""

    @abstractmethod
    def join(self, follow: Callable[[], Any]) -> AbstractContextManager[None]:
        """Returns a context that, at its end, follows the other processes until all of them have reached it.

        Args:
            follow: Follows once: meets, and takes part without a contribution.
        """

    @abstractmethod
    def failed(self, error: BaseException) -> None:
        """Records that a step of this process raised, so that the others can report why they waited in vain."""


class SingleProcess(Strategy):
    """The strategy of a single process, which has nothing to exchange."""

    world_size, world_rank = 1, 0

    def begin(self, tensors: Named, traits: Mapping[str, Any], seed: int) -> int:
        """Returns the seed."""
        return seed

    def lay_out(self, trainable: Named) -> tuple[dict[str, torch.Tensor], Parts]:
        """Requires no particular memory."""
        return {}, Parts()

    def started(self, dtypes: Mapping[str, str]) -> None:
        """Does nothing."""

    def meet(
        self,
        kind: str,
        share: Share,
        rates: Sequence[float] = (),
        present: Collection[str] = (),
        changed: Collection[str] = (),
        step: int = 0,
    ) -> Meeting:
        """Returns the caller's own values."""
        return Meeting(kind, (share,), rates, present, changed, step)

    def reduce(self, meeting: Meeting, gradients: Named) -> tuple[Named, Share]:
        """Returns the gradients."""
        return gradients, meeting.shares[0]

    def average(self, meeting: Meeting, gradients: Named) -> dict[str, torch.Tensor]:
        """Returns the gradients."""
        return dict(gradients)

    def spread(self, meeting: Meeting, parameters: Named, buffers: Named) -> None:
        """Does nothing."""

    def total(self, meeting: Meeting, gradients: Named, keep: bool = True) -> dict[str, torch.Tensor]:
        """Returns the gradients."""
        return dict(gradients)

    def whole(self, parts: Named, keep: bool = True) -> dict[str, torch.Tensor]:
        """Returns the parts."""
        return dict(parts)

    def gather(self, data: bytes) -> list[bytes]:
        """Returns the data."""
        return [data]

    def join(self, follow: Callable[[], Any]) -> AbstractContextManager[None]:
        """Returns a context that does nothing."""
        return contextlib.nullcontext()

    def failed(self, error: BaseException) -> None:
        """Does nothing."""


def together(strategy: Strategy, kind: str, action: Callable[[], Result]) -> Result:
    """Runs an action in all processes, and waits until it is done everywhere.

    Args:
        strategy: How the processes work together; all of them call this at the same point.
        kind: The kind of action, as in ``Meeting``.
        action: The action; in processes that have nothing to do it just returns.

    Returns:
        The result of the action here.

    Raises:
        Exception: Whatever the action raised here.
        DistributedError: If it raised in other processes only.
    """
    if strategy.world_size == 1:
        return action()
    try:
        result = action()
    except Exception as error:
        check_done(strategy, strategy.meet(kind, Share(0.0)), f"{type(error).__name__}: {error}")
        raise
    check_done(strategy, strategy.meet(kind, Share(0.0)))
    return result


def check_done(strategy: Strategy, meeting: Meeting, failure: str = "") -> None:
    """Checks that an action succeeded in all processes.

    Args:
        strategy: How the processes work together.
        meeting: The meeting after which all of them call this.
        failure: The error of this process, which the caller raises; empty if it succeeded.

    Raises:
        DistributedError: If this process succeeded, but another failed.
    """
    texts = [text.decode().strip() for text in strategy.gather(f" {failure}".encode())]
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    if failures and not failure:
        raise DistributedError(f"{meeting.kind!r} failed in another process: {'; '.join(failures)}")
