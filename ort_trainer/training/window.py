"""The accumulation window: the micro-batches whose gradients make one weight update, and how they are put together."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import shown

__all__ = ["AccumulationWindow", "Share"]


@dataclass(frozen=True)
class Share:
    """What a process brings to an update.

    Attributes:
        weight: What its micro-batches count, added up; 0 where it has none.
        unit: The weight by which its gradients were not multiplied.
        scale: The loss scale in them.
    """

    weight: float
    unit: float = 1.0
    scale: float = 1.0


class AccumulationWindow:
    """Counts the micro-batches of a window and says what their gradients are multiplied and divided by.

    Args:
        size: Micro-batches per weight update.
        reduction: What the update uses: the ``mean`` or the ``sum`` of the gradients, or their mean ``weighted`` by a
            number that comes with every micro-batch.

    Attributes:
        micro_batches: How many the window has so far.
        reduction: As given.
        given_size: The size as given, which an assigned one replaces.
    """

    def __init__(self, size: int, reduction: str = "mean") -> None:
        self.reduction = reduction
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
                "micro-batches of a window, whose update it would change: assign it between two windows, right after "
                "an update"
            )
        self._size = int(value)
        self._assigned = True

    def checked_weight(self, weight: Any) -> float:
        """Returns the weight of a micro-batch as a float; 1 where the reduction takes none.

        Raises:
            TypeError: If it is missing, or no number.
            ValueError: If it is not positive and finite.
        """
        if self.reduction != "weighted":
            return 1.0
        if weight is None:
            raise TypeError(
                "batch.gradient_reduction 'weighted' needs the weight of every micro-batch: "
                "train_step(..., gradient_weight=n), for instance the number of labels that count"
            )
        if hasattr(weight, "item") and getattr(weight, "ndim", None) == 0:
            weight = weight.item()
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
            raise TypeError(
                f"gradient_weight must be a number, but {shown(weight)} ({type(weight).__name__}) was given"
            )
        if not 0.0 < float(weight) < math.inf:
            raise ValueError(
                f"gradient_weight must be positive and finite, but {shown(weight)} was given: leave out "
                "micro-batches that "
                "count for nothing, as their mean loss does not exist"
            )
        return float(weight)

    def factor(self, weight: float, scale: float) -> float:
        """Returns what the loss of a coming micro-batch is multiplied by before the backward pass.

        The gradients of a window are added up, so all have the loss scale of the first, also if the scaler's is
        assigned in between. Weights are relative to the first: counts of thousands would overflow fp16 gradients.

        Args:
            weight: Of the micro-batch.
            scale: The loss scale of now.
        """
        return self._scale * weight / self._unit if self.micro_batches else scale

    def add(self, weight: float, scale: float) -> None:
        """Counts a micro-batch that was added to the gradients."""
        if not self.micro_batches:
            self._unit, self._scale = weight, scale
        self.micro_batches += 1
        self._weight += weight

    @property
    def complete(self) -> bool:
        """Whether the weights are to be updated."""
        return self.micro_batches >= self._size

    def share(self, scale: float) -> Share:
        """Returns what the micro-batches so far bring to an update; without any, nothing, with a given loss scale."""
        return Share(self._weight, self._unit, self._scale) if self.micro_batches else Share(0.0, scale=scale)

    def divisor_of(self, share: Share) -> float:
        """Returns what gradients are divided by in which micro-batches count so much, the loss scale in it."""
        return share.scale * (1.0 if self.reduction == "sum" else share.weight / share.unit)

    @property
    def divisor(self) -> float:
        """What the gradients so far are divided by, the loss scale in it."""
        return self.divisor_of(Share(self._weight, self._unit, self._scale))

    def reset(self) -> None:
        """Begins a new window."""
        self.micro_batches, self._weight, self._unit, self._scale = 0, 0.0, 1.0, 1.0

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: JSON values only. An assigned size is state; one of the options is not."""
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
            KeyError, TypeError, ValueError: If it does not fit; nothing has changed then.
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
                f"trainer has batch.gradient_reduction {self.reduction!r}: load it with the same, end the window "
                "(trainer.optimizer_step()) and save it again, or leave the key 'gradients' out of the state dict"
            )
        # The window goes on with the trainer's own size. Where it has that many already, as the size was another, or
        # backward passes on their own have gone on beyond it, the next step, or update, ends it.
        self._size, self._assigned = self.given_size if size is None else int(size), size is not None
        self.micro_batches, self._weight, self._unit, self._scale = int(count), weight, unit, scale
