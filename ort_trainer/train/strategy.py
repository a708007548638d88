"""How gradients become those of an update: over the micro-batches of a window, and over the processes.

A :class:`Strategy` is the seam between the backward pass and the weight update; nothing else in the package knows about
ranks. ``Strategy`` itself is that of a single process; ``distributed/`` has the others.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch

from ..core.errors import DistributedError, shown
from ..optim.parts import Named, Parts

Result = TypeVar("Result")
_weight = attrgetter("weight")


class Share(NamedTuple):
    """The contribution of a process to an update.

    Attributes:
        weight: The total weight of its micro-batches; 0 if it has none.
        unit: The weight to which its gradients are relative.
        scale: The loss scale by which its gradients are multiplied.
    """

    weight: float
    unit: float = 1.0
    scale: float = 1.0


class AccumulationWindow:
    """Counts the micro-batches of a window and computes the factors and divisors of their gradients::

        gradients = sum over i of factor_i * gradient_i,    factor_i = scale_0 * weight_i / unit
        update uses gradients / divisor,                    divisor = scale_0 * (sum over i of weight_i) / unit

    The unit is ``weight_0``, and with a loss scaler ``weight_0 * size``. For the reduction ``sum``, the divisor is
    ``scale_0`` and the unit 1; except for ``weighted``, all weights are 1.

    Args:
        size: Micro-batches per weight update.
        reduction: What the update uses: the ``mean`` or the ``sum`` of the gradients, or their mean ``weighted`` by a
            number given with every micro-batch.
        scaled: Whether there is a loss scaler, so gradients may overflow. The loss is then divided by the size before
            the backward pass, as in loops with PyTorch's scaler, so the same gradients overflow.

    Attributes:
        micro_batches: The number of micro-batches so far.
        reduction: As given.
        given_size: The size as given; an assigned size overrides it.
    """

    def __init__(self, size: int, reduction: str = "mean", scaled: bool = False) -> None:
        self.reduction = reduction
        self._divides_losses = scaled and reduction != "sum"
        self.micro_batches = 0
        self._size = self.given_size = size
        self._assigned = False
        self._weight = 0.0
        self._unit = 1.0
        self._scale = 1.0

    @property
    def size(self) -> int:
        """Micro-batches per weight update; can be assigned between two windows."""
        return self._size

    @size.setter
    def size(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(
                f"gradient_accumulation_steps must be an int, but {shown(value)} ({type(value).__name__}) was given"
            )
        if value < 1:
            raise ValueError(f"gradient_accumulation_steps must be at least 1, but {value} was given")
        if self.micro_batches and value != self._size:
            raise RuntimeError(
                f"gradient_accumulation_steps can't become {value} after {self.micro_batches} of {self._size} "
                "micro-batches of a window: assign it between two windows, right after an update"
            )
        self._size = int(value)
        self._assigned = True

    def checked_weight(self, weight: Any) -> float:
        """Returns the weight of a micro-batch as a float; 1 unless the reduction is ``weighted``.

        Raises:
            TypeError: If it is missing, or not a number.
            ValueError: If it is not positive and finite.
        """
        if self.reduction != "weighted":
            return 1.0
        if weight is None:
            raise TypeError(
                "batch.gradient_reduction 'weighted' needs the weight of every micro-batch: "
                "train_step(..., gradient_weight=n), for instance the number of labels that are not ignored"
            )
        if hasattr(weight, "item") and getattr(weight, "ndim", None) == 0:
            weight = weight.item()
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
            raise TypeError(
                f"gradient_weight must be a number, but {shown(weight)} ({type(weight).__name__}) was given"
            )
        if not 0.0 < float(weight) < math.inf:
            raise ValueError(
                f"gradient_weight must be positive and finite, but {shown(weight)} was given: skip micro-batches "
                "of weight 0, whose mean loss is undefined"
            )
        return float(weight)

    def factor(self, weight: float, scale: float) -> float:
        """Returns the factor on the loss of the next micro-batch, for its backward pass.

        The gradients of a window are summed, so all use the loss scale of the first micro-batch, even if the scaler's
        changes in between. Weights are relative to the first: counts of thousands would overflow fp16 gradients.

        Args:
            weight: The weight of the micro-batch.
            scale: The current loss scale.
        """
        if self.micro_batches:
            return self._scale * weight / self._unit
        return scale * weight / self._unit_of(weight)

    def add(self, weight: float, scale: float) -> bool:
        """Counts a micro-batch whose gradients were added; returns whether the weights are due for an update."""
        if not self.micro_batches:
            self._unit, self._scale = self._unit_of(weight), scale
        self.micro_batches += 1
        self._weight += weight
        return self.micro_batches >= self._size

    def _unit_of(self, first: float) -> float:
        """Returns the unit of a window whose first micro-batch has a weight."""
        return first * self._size if self._divides_losses else first

    @property
    def complete(self) -> bool:
        """Whether the weights are due for an update."""
        return self.micro_batches >= self._size

    def share(self) -> Share:
        """Returns the share of the micro-batches so far."""
        return Share(self._weight, self._unit, self._scale)

    def divisor_of(self, share: Share) -> float:
        """Returns the divisor of gradients that make up a share, including the loss scale."""
        return share.scale * (1.0 if self.reduction == "sum" else share.weight / share.unit)

    @property
    def divisor(self) -> float:
        """The divisor of the gradients so far, including the loss scale."""
        return self.divisor_of(self.share())

    def reset(self) -> None:
        """Begins a new window."""
        self.micro_batches, self._weight, self._unit, self._scale = 0, 0.0, 1.0, 1.0

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as JSON values. It includes an assigned size, but not one from the options."""
        return {
            "micro_batches": self.micro_batches,
            "reduction": self.reduction,
            "weight": self._weight,
            "unit": self._unit,
            "scale": self._scale,
            "assigned_size": self._size if self._assigned else None,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned.

        Raises:
            KeyError, TypeError, ValueError: If it is invalid; nothing has changed then.
        """
        count, size = state_dict["micro_batches"], state_dict["assigned_size"]
        limits = [("micro_batches", count, 0)] + ([] if size is None else [("assigned_size", size, 1)])
        for key, value, minimum in limits:
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
                raise ValueError(f"{key} must be an int, at least {minimum}, but it is {shown(value)}")
        weight, unit, scale = (float(state_dict[key]) for key in ("weight", "unit", "scale"))
        if not (0 <= weight < math.inf and 0 < unit < math.inf and 0 < scale < math.inf):
            raise ValueError(
                f"weight {shown(weight)}, unit {unit!r} and scale {scale!r} must be finite and not negative"
            )
        if count and state_dict["reduction"] != self.reduction:
            raise ValueError(
                f"the state was taken in the middle of a window of reduction {state_dict['reduction']!r}, but the "
                f"trainer has batch.gradient_reduction {self.reduction!r}: load it with the same reduction, end the "
                "window (trainer.optimizer_step()) before saving, or remove the key 'gradients' from the state dict"
            )
        # The window continues with the trainer's own size. If it already has that many micro-batches, because the size
        # was different or separate backward passes exceeded it, the next step or update ends it.
        self._size, self._assigned = self.given_size if size is None else int(size), size is not None
        self.micro_batches, self._weight, self._unit, self._scale = int(count), weight, unit, scale


class Arrival(NamedTuple):
    """What a process brings to a meeting.

    Attributes:
        kind: As in :class:`Meeting`. A process that has no data left brings ``follow``, and does what the others do.
        share: Its contribution.
        rates: The learning rates, which must be equal; a process that follows takes those of the others.
        gradients: Its gradients by parameter name, multiplied by the loss scale; the operation may overwrite them.
        changed: Buffers that training changes here.
        step: The ``train_step`` calls so far.
    """

    kind: str
    share: Share = Share(0.0)
    rates: Sequence[float] = ()
    gradients: Named = MappingProxyType({})
    changed: Collection[str] = ()
    step: int = 0


class Meeting(NamedTuple):
    """What the processes agreed on before a joint operation.

    Attributes:
        own: What this process has brought.
        kind: The operation: ``update`` with the gradients of windows, ``step`` with those in ``p.grad``, ``pass`` (a
            backward pass of the user's own loop), ``state`` or ``model`` (collect the state with or without the
            optimizer), ``save`` or ``load`` (report whether it succeeded), ``gather``, or ``follow`` if all
            processes have no data left.
        shares: The contribution of each process, by rank.
        rates: The learning rates.
        present: Parameters that have gradients in any process.
        changed: Buffers that training changes in any process.
        step: The highest number of ``train_step`` calls in any process.
        doing: The lowest rank that does not merely follow; 0 if all do.
    """

    own: Arrival
    kind: str
    shares: Sequence[Share]
    rates: Sequence[float]
    present: Collection[str]
    changed: Collection[str]
    step: int
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


class Strategy:
    """How the processes that train one model work together. Here, it is one process, which has nothing to exchange.

    Subclasses override all methods. :meth:`lay_out`, :meth:`started` and :meth:`failed` concern only this process. All
    processes call the other methods together, after a :meth:`meet` that agreed on the operation.

    Attributes:
        world_size: The number of processes.
        world_rank: The rank of this process, from 0.
        zero_stage: 1 if each process keeps a part of the optimizer's state; else 0.
        divides_windows: Whether all processes need a part of a window that is restored, because an update combines the
            means of their windows.
        joining: Whether this process is in a context of :meth:`join`.
        stop_asked: Whether this process wants all to stop; the others learn it at the next meeting.
        stop_heard: Whether any process asked to stop at the last meeting.
    """

    world_size: int = 1
    world_rank: int = 0
    zero_stage: int = 0
    divides_windows: bool = False
    joining: bool = False
    stop_asked: bool = False
    stop_heard: bool = False

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
        return seed

    def lay_out(self, trainable: Named) -> tuple[dict[str, torch.Tensor], Parts]:
        """Returns the required gradient memory by parameter name, if any, and the parts that this process updates."""
        return {}, Parts()

    def started(self, dtypes: Mapping[str, str], compared: Callable[[], dict[str, Any]]) -> None:
        """Records the start of training; the next :meth:`meet` for an update compares it.

        Args:
            dtypes: Dtypes of the first batch by input name.
            compared: Returns what the first training graph computes, as ``Guard.compared`` does.
        """

    def meet(self, arrival: Arrival) -> Meeting:
        """Waits for the other processes and agrees with them on the next operation.

        Raises:
            DistributedError: If another process does not arrive in time, or requests another operation, or has other
                rates, another loss scale or, for ``step``, gradients of other parameters.
        """
        return Meeting(arrival, arrival.kind, (arrival.share,), *arrival[2:])

    def reduce(self, meeting: Meeting) -> tuple[Named, Share]:
        """Combines the gradients of all windows.

        Args:
            meeting: From :meth:`meet`; this process has brought gradients in the memory from :meth:`lay_out`.

        Returns:
            The gradients for the parts that this process updates, and the share that they represent.
        """
        return meeting.own.gradients, meeting.own.share

    def average(self, meeting: Meeting) -> dict[str, torch.Tensor]:
        """Returns the mean of the gradients over the processes; here they may be anywhere in memory."""
        return dict(meeting.own.gradients)

    def spread(self, meeting: Meeting, parameters: Named, buffers: Named) -> None:
        """Copies results of a pass or update to the processes that lack them.

        Args:
            meeting: The meeting of the pass or update.
            parameters: The parameters whose parts this process updated; empty if there was no update.
            buffers: All buffers; those that training changes get the leader's values.
        """

    def total(self, meeting: Meeting, keep: bool = True) -> dict[str, torch.Tensor]:
        """Returns the sum of the gradients of all windows so far; the windows continue.

        Args:
            meeting: As for :meth:`reduce`; the sum has its total weight, in the leader's unit.
            keep: Whether this process needs the result; if not, it is empty.
        """
        return dict(meeting.own.gradients)

    def whole(self, parts: Named, keep: bool = True) -> dict[str, torch.Tensor]:
        """Assembles tensors from the parts of all processes, in the shapes of the parameters.

        Args:
            parts: By parameter name.
            keep: Whether this process needs the result; if not, it is empty.
        """
        return dict(parts)

    def gather(self, data: bytes) -> list[bytes]:
        """Returns the data of all processes, by rank."""
        return [data]

    def join(self, follow: Callable[[], str]) -> AbstractContextManager[None]:
        """Returns a context that, at its end, follows the other processes until all of them have reached it.

        Args:
            follow: Follows once: meets, and takes part without a contribution; returns the kind of the meeting.
        """
        return contextlib.nullcontext()

    def failed(self, error: BaseException) -> None:
        """Records the error of a step of this process, so that the others can report why they waited in vain."""


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
        check_done(strategy, strategy.meet(Arrival(kind)), f"{type(error).__name__}: {error}")
        raise
    check_done(strategy, strategy.meet(Arrival(kind)))
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
