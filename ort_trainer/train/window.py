"""The accumulation window: the micro-batches of one weight update, and how their gradients are combined."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..core.errors import shown

__all__ = ["AccumulationWindow", "Share"]


class Share(NamedTuple):
    """The contribution of a process to an update.

    Attributes:
        weight: The total weight of its micro-batches; 0 if it has none.
        unit: The weight to which its gradients are relative: that of its first micro-batch.
        scale: The loss scale by which its gradients are multiplied.
    """

    weight: float
    unit: float = 1.0
    scale: float = 1.0


class AccumulationWindow:
    """Counts the micro-batches of a window and computes the factors and divisors of their gradients.

    Args:
        size: Micro-batches per weight update.
        reduction: What the update uses: the ``mean`` or the ``sum`` of the gradients, or their mean ``weighted`` by a
            number given with every micro-batch.

    Attributes:
        micro_batches: The number of micro-batches so far.
        reduction: As given.
        given_size: The size as given; an assigned size overrides it.
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
        """Returns the factor on the loss of the coming micro-batch, for its backward pass.

        The gradients of a window are summed, so all use the loss scale of the first micro-batch, even if the scaler's
        changes in between. Weights are relative to the first: counts of thousands would overflow fp16 gradients.

        Args:
            weight: The weight of the micro-batch.
            scale: The current loss scale.
        """
        return self._scale * weight / self._unit if self.micro_batches else scale

    def add(self, weight: float, scale: float) -> bool:
        """Counts a micro-batch whose gradients were added; returns whether the weights are due for an update."""
        if not self.micro_batches:
            self._unit, self._scale = weight, scale
        self.micro_batches += 1
        self._weight += weight
        return self.micro_batches >= self._size

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
        """Returns the state as JSON values. A size is part of it if it was assigned, not if it is from the options."""
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
