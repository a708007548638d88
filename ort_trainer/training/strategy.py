"""Where several processes meet that train one model: the seam between the backward pass and the weight update.

Nothing else in the package knows about ranks. ``SingleProcess`` is what one process does; ``distributed/`` has the
others.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ..optim.parts import Named, Parts
from .window import Share

__all__ = ["Meeting", "SingleProcess", "Strategy"]


@dataclass(frozen=True)
class Meeting:
    """What the processes have agreed on before they do something together.

    Attributes:
        kind: What they do: ``update`` with the gradients of windows, ``step`` with those in ``p.grad``, ``pass`` (a
            backward pass of a loop of the user's own), or ``state``.
        shares: What each process brings, by rank.
        agree: Whether all have gradients of the same parameters, and change the same buffers.
    """

    kind: str
    shares: Sequence[Share]
    agree: bool = True

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

    Of the methods, :meth:`lay_out` and :meth:`failed` concern this process alone. The others are called by all at the
    same place, after a :meth:`meet` that has said which.

    Attributes:
        world_size: Number of processes.
        world_rank: The number of this one, from 0.
        zero_stage: 1 if each process keeps a part of the optimizer's state; else 0.
    """

    world_size: int
    world_rank: int
    zero_stage: int = 0

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
    def meet(
        self,
        kind: str,
        share: Share,
        rates: Sequence[float] = (),
        present: Collection[str] = (),
        changed: Collection[str] = (),
    ) -> Meeting:
        """Waits for the others and learns what they bring.

        Args:
            kind: As in :class:`Meeting`. A process that has no data left says ``follow`` and learns what the others do.
            share: What this process brings.
            rates: The learning rates, which must be equal.
            present: Parameters that have gradients here.
            changed: Buffers that training changes here.

        Raises:
            DistributedError: If another process does not come in time, or does something else.
        """

    @abstractmethod
    def reduce(self, meeting: Meeting, gradients: Named) -> tuple[dict[str, torch.Tensor], Share]:
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
    def whole(self, parts: Named, like: Named) -> dict[str, torch.Tensor]:
        """Returns tensors of which each process has its parts.

        Args:
            parts: By parameter name.
            like: Tensors of their shapes.
        """

    @abstractmethod
    def random_states(self, state: torch.Tensor) -> list[torch.Tensor]:
        """Returns the states of the random generators of all processes, by rank."""

    @abstractmethod
    def join(self, follow: Callable[[], None]) -> AbstractContextManager[Any]:
        """Returns a context at whose end a process that has no data left does what the others do, until all are there.

        Args:
            follow: Does that once: meets, and takes part with nothing to bring.
        """

    @abstractmethod
    def wait(self) -> None:
        """Waits until all processes are here."""

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

    def meet(
        self,
        kind: str,
        share: Share,
        rates: Sequence[float] = (),
        present: Collection[str] = (),
        changed: Collection[str] = (),
    ) -> Meeting:
        """Meets nobody."""
        return Meeting(kind, (share,))

    def reduce(self, meeting: Meeting, gradients: Named) -> tuple[dict[str, torch.Tensor], Share]:
        """Returns the gradients."""
        return dict(gradients), meeting.shares[0]

    def average(self, meeting: Meeting, gradients: Named) -> dict[str, torch.Tensor]:
        """Returns the gradients."""
        return dict(gradients)

    def spread(self, meeting: Meeting, parameters: Named, buffers: Named) -> None:
        """Has nobody to give anything."""

    def whole(self, parts: Named, like: Named) -> dict[str, torch.Tensor]:
        """Returns the parts."""
        return dict(parts)

    def random_states(self, state: torch.Tensor) -> list[torch.Tensor]:
        """Returns the one."""
        return [state]

    def join(self, follow: Callable[[], None]) -> AbstractContextManager[Any]:
        """Returns a context that does nothing."""
        return contextlib.nullcontext()

    def wait(self) -> None:
        """Has nobody to wait for."""

    def failed(self, error: BaseException) -> None:
        """Has nobody to tell."""
