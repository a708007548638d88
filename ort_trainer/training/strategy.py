"""Where several processes meet that train one model: the seam between the backward pass and the weight update.

Nothing else in the package knows about ranks. ``SingleProcess`` is what one process does; ``distributed/`` has the
others.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from ..optim.parts import Named, Parts
from .window import Share

__all__ = ["Meeting", "SingleProcess", "Strategy", "noted"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Meeting:
    """What the processes have agreed on before they do something together.

    Attributes:
        kind: What they do: ``update`` with the gradients of windows, ``step`` with those in ``p.grad``, ``pass`` (a
            backward pass of a loop of the user's own), ``state`` or ``model`` (which is collected, with the optimizer
            or without), ``save`` or ``load`` (which is done, or has failed), or ``gather``.
        shares: What each process brings, by rank.
        rates: The learning rates.
        present: Parameters that have gradients in any process.
        changed: Buffers that training changes in any process.
        step: The ``train_step`` calls so far, of the process with most.
        doing: The lowest rank that does not only follow.
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
        """What all micro-batches count."""
        return sum(share.weight for share in self.shares)

    @property
    def leader(self) -> int:
        """The lowest rank that brings something; 0 where none does."""
        return next((rank for rank, share in enumerate(self.shares) if share.weight), 0)


class Strategy(ABC):
    """How the processes that train one model work together.

    Of the methods, :meth:`lay_out`, :meth:`started` and :meth:`failed` concern this process alone. The others are
    called by all at the same place, after a :meth:`meet` that has said which.

    Attributes:
        world_size: Number of processes.
        world_rank: The number of this one, from 0.
        zero_stage: 1 if each process keeps a part of the optimizer's state; else 0.
        joining: Whether this process is in a context of :meth:`join`.
        stop_asked: Whether this process wants all to stop; the others learn it when they meet.
        stop_heard: Whether any process wanted that when they last met.
    """

    world_size: int
    world_rank: int
    zero_stage: int = 0
    joining: bool = False
    stop_asked: bool = False
    stop_heard: bool = False

    @abstractmethod
    def begin(self, tensors: Named, traits: Mapping[str, Any], seed: int) -> int:
        """Makes sure that all processes train the same, and gives all the weights of rank 0.

        Args:
            tensors: Parameters and buffers; they are overwritten, in place.
            traits: What must be equal in all processes, by what messages call it: JSON values.
            seed: Of the random numbers of training.

        Returns:
            The seed of this process.

        Raises:
            DistributedError: If something is not equal, in all processes.
        """

    @abstractmethod
    def lay_out(self, trainable: Named) -> tuple[dict[str, torch.Tensor], Parts]:
        """Returns where gradients are to lie by parameter name, if not anywhere, and what this process updates."""

    @abstractmethod
    def started(self, dtypes: Mapping[str, str]) -> None:
        """Is told of the batch that training begins with, which the next :meth:`meet` for an update compares.

        Args:
            dtypes: By input name.
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
        """Waits for the others and learns what they bring.

        Args:
            kind: As in :class:`Meeting`. A process that has no data left says ``follow`` and learns what the others do.
            share: What this process brings.
            rates: The learning rates, which must be equal; one that follows takes those of the others.
            present: Parameters that have gradients here.
            changed: Buffers that training changes here.
            step: The ``train_step`` calls so far.

        Raises:
            DistributedError: If another process does not come in time, or does something else, or with other rates,
                loss scale or, of kind ``step``, other parameters.
        """

    @abstractmethod
    def reduce(self, meeting: Meeting, gradients: Named) -> tuple[Named, Share]:
        """Puts the gradients of all windows together.

        Args:
            meeting: From :meth:`meet`.
            gradients: Those of this process, multiplied by the loss scale, where :meth:`lay_out` has them; they may be
                overwritten.

        Returns:
            What this process updates its parts with, and what the sum in it counts.
        """

    @abstractmethod
    def average(self, meeting: Meeting, gradients: Named) -> dict[str, torch.Tensor]:
        """Returns the mean of new gradients over the processes; it may be written into them."""

    @abstractmethod
    def spread(self, meeting: Meeting, parameters: Named, buffers: Named) -> None:
        """Gives all processes what only some have after a pass or an update.

        Args:
            meeting: That of the pass or update.
            parameters: Those that were updated, each process its parts; empty where none was.
            buffers: All buffers; those that training changes get the leader's values.
        """

    @abstractmethod
    def total(self, meeting: Meeting, gradients: Named, keep: bool = True) -> dict[str, torch.Tensor]:
        """Returns the sum of the gradients of all windows so far, which go on.

        Args:
            meeting: From :meth:`meet`; the sum counts its weight, in the leader's unit.
            gradients: Those of this process, as for :meth:`reduce`.
            keep: Whether this process needs the result; if not, it is empty.
        """

    @abstractmethod
    def whole(self, parts: Named, keep: bool = True) -> dict[str, torch.Tensor]:
        """Returns tensors of which each process has its parts, in the shapes of the parameters.

        Args:
            parts: By parameter name.
            keep: Whether this process needs the result; if not, it is empty.
        """

    @abstractmethod
    def gather(self, data: bytes) -> list[bytes]:
        """Returns the bytes of all processes, by rank."""

    @abstractmethod
    def join(self, follow: Callable[[], Any]) -> AbstractContextManager[None]:
        """Returns a context at whose end a process that has no data left does what the others do, until all are there.

        Args:
            follow: Does that once: meets, and takes part with nothing to bring.
        """

    @abstractmethod
    def failed(self, error: BaseException) -> None:
        """Is told that a step of this process has raised, so that the others can say why they wait in vain."""


class SingleProcess(Strategy):
    """One process: everything is what it is."""

    world_size, world_rank = 1, 0

    def begin(self, tensors: Named, traits: Mapping[str, Any], seed: int) -> int:
        """Returns the seed."""
        return seed

    def lay_out(self, trainable: Named) -> tuple[dict[str, torch.Tensor], Parts]:
        """Leaves it open where gradients lie."""
        return {}, Parts()

    def started(self, dtypes: Mapping[str, str]) -> None:
        """Has nobody to compare it with."""

    def meet(
        self,
        kind: str,
        share: Share,
        rates: Sequence[float] = (),
        present: Collection[str] = (),
        changed: Collection[str] = (),
        step: int = 0,
    ) -> Meeting:
        """Meets nobody."""
        return Meeting(kind, (share,), rates, present, changed, step)

    def reduce(self, meeting: Meeting, gradients: Named) -> tuple[Named, Share]:
        """Returns the gradients."""
        return gradients, meeting.shares[0]

    def average(self, meeting: Meeting, gradients: Named) -> dict[str, torch.Tensor]:
        """Returns the gradients."""
        return dict(gradients)

    def spread(self, meeting: Meeting, parameters: Named, buffers: Named) -> None:
        """Has nobody to give anything."""

    def total(self, meeting: Meeting, gradients: Named, keep: bool = True) -> dict[str, torch.Tensor]:
        """Returns the gradients."""
        return dict(gradients)

    def whole(self, parts: Named, keep: bool = True) -> dict[str, torch.Tensor]:
        """Returns the parts."""
        return dict(parts)

    def gather(self, data: bytes) -> list[bytes]:
        """Returns the bytes."""
        return [data]

    def join(self, follow: Callable[[], Any]) -> AbstractContextManager[None]:
        """Returns a context that does nothing."""
        return contextlib.nullcontext()

    def failed(self, error: BaseException) -> None:
        """Has nobody to tell."""


class _Loop(Protocol):
    @property
    def strategy(self) -> Strategy: ...


SomeLoop = TypeVar("SomeLoop", bound=_Loop)


Step = Callable[Concatenate[SomeLoop, Arguments], Result]


def noted(step: Step[SomeLoop, Arguments, Result]) -> Step[SomeLoop, Arguments, Result]:
    """Returns a step of a loop that tells the other processes when it raises."""

    @functools.wraps(step)
    def tell(loop: SomeLoop, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return step(loop, *args, **kwargs)
        except BaseException as error:
            loop.strategy.failed(error)
            raise

    return tell
