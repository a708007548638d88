"""``Rule``: what an optimizer is, as the rest of the package sees it. Each file in ``rules/`` has one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from .parts import Parts

__all__ = ["RULES", "Nodes", "ParameterBatch", "ParameterNodes", "Rule", "by_count"]

Key = TypeVar("Key", bound=Hashable)

RULES: dict[str, Rule] = {}
"""Name of an optimizer -> its rule; every rule enters itself when its class is made."""


@dataclass
class ParameterBatch:
    """Parameters of one group, which are updated with the same hyper-parameters.

    Attributes:
        weights: The parameters; they are changed in place.
        gradients: Their gradients, of the same shapes; the update leaves them divided, and unchanged otherwise.
        slots: The state tensors of each, by slot; they are changed in place.
        counts: Updates done, of each, a float32 scalar; it is counted up in place. None of those that keep no count.
        lr: The learning rate.
        divisor: What the gradients are to be divided by: a number, or a scalar tensor where they are clipped.
        hyper: The hyper-parameters, without the learning rate.
        counter: The memory of all counts, where they lie in one tensor that holds no others.
        parts: What of the parameters these tensors are; it knows the norms of the whole ones.
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

    def slot(self, name: str) -> list[torch.Tensor]:
        """Returns one state tensor of every parameter."""
        return [slots[name] for slots in self.slots]

    def divide(self) -> None:
        """Divides the gradients, in place, where there is something to divide by."""
        if isinstance(self.divisor, torch.Tensor) or self.divisor != 1.0:
            torch._foreach_div_(self.gradients, self.divisor)
            self.divisor = 1.0

    def scale(self) -> torch.Tensor | None:
        """Returns the divisor as PyTorch's fused kernels take it, which divide the gradients in place by it."""
        divisor = self.divisor
        if not isinstance(divisor, torch.Tensor) and divisor != 1.0:
            divisor = torch.tensor(divisor, device=self.weights[0].device)
        return divisor if isinstance(divisor, torch.Tensor) else None

    def count_up(self) -> None:
        """Counts an update of each."""
        if self.counter is not None:  # ten times faster for many parameters
            self.counter.add_(1)
        else:
            torch._foreach_add_([count for count in self.counts if count is not None], 1)

    def part(self, indices: Iterable[int]) -> ParameterBatch:
        """Returns some of the parameters."""
        chosen = list(indices)
        weights, gradients, slots, counts = (
            [values[index] for index in chosen] for values in (self.weights, self.gradients, self.slots, self.counts)
        )
        return ParameterBatch(weights, gradients, slots, counts, self.lr, self.divisor, self.hyper, None, self.parts)  # type: ignore[arg-type]

    def split(self, keys: Iterable[Key]) -> list[tuple[Key, ParameterBatch]]:
        """Returns the parameters of each key, with one key for each parameter given; mostly all have the same."""
        groups: dict[Key, list[int]] = {}
        for index, key in enumerate(keys):
            groups.setdefault(key, []).append(index)
        if len(groups) == 1:
            return [(key, self) for key in groups]
        return [(key, self.part(indices)) for key, indices in groups.items()]


def by_count(batch: ParameterBatch) -> list[tuple[int, ParameterBatch]]:
    """Splits parameters by the number of updates that they have had; there is more than one only in odd cases."""
    parts = batch.split([0 if count is None else int(count) for count in batch.counts])
    return sorted(parts, key=lambda part: part[0])


@dataclass(frozen=True)
class ParameterNodes:
    """One parameter as values of an ONNX graph.

    Attributes:
        weight: The weight.
        gradient: Its gradient, divided and clipped.
        slots: Its state tensors.
        count: Updates done plus 1, an int64 without dimensions; None where no count is kept.
        rate: The learning rate, a scalar of the weight's type.
        hyper: The hyper-parameters, without the learning rate.
    """

    weight: Any
    gradient: Any
    slots: Mapping[str, Any]
    count: Any
    rate: Any
    hyper: Mapping[str, Any]


class Nodes(Protocol):
    """Writes a rule as ONNX nodes. Values are ``onnx_ir`` values."""

    def op(self, op_type: str, *inputs: Any, **attributes: Any) -> Any:
        """Returns the result of a node; its type is that of the first input."""
        ...

    def number(self, value: float, like: Any) -> Any:
        """Returns a constant of another value's type."""
        ...

    def power(self, base: float, exponent: Any, like: Any) -> Any:
        """Returns ``1 - base ** exponent`` of an int64 exponent, computed in float64, as another value's type."""
        ...


class Rule(ABC):
    """How an optimizer changes a weight, what it keeps for that, and how both look in a state dict and in ONNX.

    Attributes:
        name: The name in state dicts, such as ``AdamOptimizer``.
        slots: Names of the state tensors, of the parameter's shape, that a parameter may have.
        shares_count: Whether a state dict has one count for all parameters, ``shared_optimizer_state``, as legacy's
            LAMB; if not, each parameter that keeps a count has ``Update_Count``.
    """

    name: ClassVar[str]
    slots: ClassVar[tuple[str, ...]]
    shares_count: ClassVar[bool] = False

    def __init_subclass__(cls, registered: bool = True, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if registered:
            RULES[cls.name] = cls()

    def slots_for(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the state tensors that parameters with these hyper-parameters have."""
        return self.slots

    def keeps_count(self, hyper: Mapping[str, Any]) -> bool:
        """Returns whether the updates of parameters with these hyper-parameters are counted."""
        return True

    @abstractmethod
    def update(self, batch: ParameterBatch) -> None:
        """Updates parameters once, in place, with their state tensors and counts."""

    @abstractmethod
    def nodes(self, nodes: Nodes, parameter: ParameterNodes) -> tuple[Any, Mapping[str, Any]]:
        """Writes the same as ONNX nodes, with few of them over whole tensors: scalars are put together first.

        The new value of a tensor may be written into the memory of the old one, so whatever else reads the old one must
        come before it: what is returned must depend on that.

        Args:
            nodes: Writes them.
            parameter: What they start from.

        Returns:
            The new weight, and the new state tensors by slot.
        """
