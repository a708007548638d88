"""``Rule``: the interface of an optimizer. Each file in ``rules/`` has one."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from .parts import Parts

Key = TypeVar("Key", bound=Hashable)

RULES: dict[str, Rule] = {}
"""Name of an optimizer -> its rule. Every rule registers itself when its class is defined."""


@dataclass
class ParameterBatch:
    """Parameters of one group, which are updated with the same hyper-parameters.

    Attributes:
        weights: The parameters, updated in place.
        gradients: Their gradients, of the same shapes. The update divides them in place and changes nothing else.
        slots: The state tensors of each parameter, by slot, updated in place.
        counts: The number of updates of each parameter, a float32 scalar incremented in place; None if not counted.
        lr: The learning rate.
        divisor: Divisor of the gradients: a number, or a scalar tensor if they are clipped.
        hyper: The hyper-parameters, without the learning rate.
        counter: The tensor that consists of exactly these counts, if there is one.
        parts: Which parts of the parameters these tensors are; it computes norms of the whole tensors.
    """

    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]
    slots: list[Mapping[str, torch.Tensor]]
    counts: list[torch.Tensor | None]
    lr: float
    divisor: float | torch.Tensor
    hyper: Mapping[str, Any]
    counter: torch.Tensor | None = None
    parts: Parts = field(default_factory=Parts)

    # These are kept, because weights and slots are the same tensors in every update.
    @functools.cached_property
    def by_slot(self) -> dict[str, list[torch.Tensor]]:
        """Slot -> the state tensor of every parameter."""
        return {name: [slots[name] for slots in self.slots] for name in self.slots[0]}

    @functools.cached_property
    def _ones(self) -> torch.Tensor:
        """The addend of the counter; PyTorch takes longer to make a tensor of a number than to add."""
        assert self.counter is not None
        return torch.ones_like(self.counter)

    @functools.cached_property
    def _dtypes(self) -> set[torch.dtype]:
        return {weight.dtype for weight in self.weights}

    def by_dtype(self) -> list[ParameterBatch]:
        """Groups the parameters by dtype."""
        if len(self._dtypes) == 1:
            return [self]
        return [part for _, part in self.split(weight.dtype for weight in self.weights)]

    def divide(self) -> None:
        """Divides the gradients in place, once."""
        if isinstance(self.divisor, torch.Tensor) or self.divisor != 1.0:
            torch._foreach_div_(self.gradients, self.divisor)
            self.divisor = 1.0

    def scale(self) -> torch.Tensor | None:
        """Returns the divisor in the form of PyTorch's fused kernels, which divide the gradients in place."""
        if torch.float64 in self._dtypes:  # for which the kernels' fp32 is not enough
            self.divide()
        divisor = self.divisor
        if not isinstance(divisor, torch.Tensor) and divisor != 1.0:
            divisor = torch.tensor(divisor, device=self.weights[0].device)
        return divisor if isinstance(divisor, torch.Tensor) else None

    def count_up(self) -> None:
        """Increments all counts."""
        if self.counter is not None:  # ten times faster for many parameters
            self.counter.add_(self._ones)
        else:
            torch._foreach_add_([count for count in self.counts if count is not None], 1)

    def part(self, indices: Iterable[int]) -> ParameterBatch:
        """Returns a batch of the chosen parameters."""
        chosen = list(indices)
        weights, gradients, slots, counts = (
            [values[index] for index in chosen] for values in (self.weights, self.gradients, self.slots, self.counts)
        )
        return ParameterBatch(weights, gradients, slots, counts, self.lr, self.divisor, self.hyper, None, self.parts)  # type: ignore[arg-type]

    def split(self, keys: Iterable[Key]) -> list[tuple[Key, ParameterBatch]]:
        """Groups the parameters by key, given one key for each; usually all keys are equal."""
        groups: dict[Key, list[int]] = {}
        for index, key in enumerate(keys):
            groups.setdefault(key, []).append(index)
        if len(groups) == 1:
            return [(key, self) for key in groups]
        return [(key, self.part(indices)) for key, indices in groups.items()]


def by_count(batch: ParameterBatch) -> list[tuple[int, ParameterBatch]]:
    """Groups parameters by their number of updates, which is almost always the same for all."""
    parts = batch.split([0 if count is None else int(count) for count in batch.counts])
    return sorted(parts, key=lambda part: part[0])


@dataclass(frozen=True)
class ParameterNodes:
    """One parameter as values of an ONNX graph.

    Attributes:
        weight: The weight.
        gradient: Its gradient, divided and clipped.
        slots: Its state tensors.
        count: Updates done plus 1, an int64 without dimensions; None if not counted.
        rate: The learning rate, a scalar of the weight's type.
        hyper: The hyper-parameters, without the learning rate.
    """

    weight: Any
    gradient: Any
    slots: Mapping[str, Any]
    count: Any
    rate: Any
    hyper: Mapping[str, Any]


class NodeWriter(Protocol):
    """Writes a rule as ONNX nodes. Values are ``onnx_ir`` values."""

    def op(self, op_type: str, *inputs: Any, **attributes: Any) -> Any:
        """Returns the result of a node, with the type of its first input."""
        ...

    def number(self, value: float, like: Any) -> Any:
        """Returns a constant of another value's type."""
        ...

    def power(self, base: float, exponent: Any, like: Any) -> Any:
        """Returns ``1 - base ** exponent`` for an int64 exponent, computed in float64, in another value's type."""
        ...


class Rule(ABC):
    """How an optimizer changes a weight, the state that it needs, and how both look in a state dict and in ONNX.

    Attributes:
        name: The name in state dicts, such as ``AdamOptimizer``.
        slots: Names of the state tensors that a parameter may have, each of the parameter's shape.
        shares_count: Whether a state dict has one count for all parameters in ``shared_optimizer_state``, as for the
            legacy LAMB; otherwise each counted parameter has its ``Update_Count``.
        by_element: Whether the update of an element depends on no other element of its tensor.
    """

    name: ClassVar[str]
    slots: ClassVar[tuple[str, ...]]
    shares_count: ClassVar[bool] = False
    by_element: ClassVar[bool] = True

    def __init_subclass__(cls, registered: bool = True, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if registered:
            RULES[cls.name] = cls()

    def slots_for(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the names of the state tensors of parameters with these hyper-parameters."""
        return self.slots

    def keeps_count(self, hyper: Mapping[str, Any]) -> bool:
        """Returns whether the updates of parameters with these hyper-parameters are counted."""
        return True

    @abstractmethod
    def update(self, batch: ParameterBatch) -> None:
        """Updates parameters once, in place, with their state tensors and counts."""

    @abstractmethod
    def nodes(self, nodes: NodeWriter, parameter: ParameterNodes) -> tuple[Any, Mapping[str, Any]]:
        """Writes the update as ONNX nodes, with few operations on whole tensors: scalars are combined first.

        The new value of a tensor may overwrite the old one in memory, so every node that reads the old value must run
        before: the returned value must depend on all of them.

        Args:
            nodes: Writes the nodes.
            parameter: The parameter.

        Returns:
            The new weight, and the new state tensors by slot.
        """
