"""The weight update: clips, checks, and lets the rule of an optimizer change the weights, in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ownership import shared_groups
from .config import OptimizerConfig
from .parts import Parts
from .rule import ParameterBatch

__all__ = ["Again", "OptimizerUpdate"]

Again = Callable[[], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""Runs forward and backward pass once more; returns the loss, and the gradients by parameter name."""


@dataclass
class _Group:
    """Parameters of one group of the config, with their hyper-parameters, limit of the gradient norm, and counts."""

    index: int
    hyper: dict[str, Any]
    limit: float
    names: list[str] = field(default_factory=list)
    counter: torch.Tensor | None = None


class OptimizerUpdate:
    """Owns what an optimizer keeps of the trainable parameters, and updates the weights.

    Args:
        config: Which rule, with which hyper-parameters. The learning rate is an argument of :meth:`step`.
        parameters: Trainable parameters by name; :meth:`step` changes them in place.
        groups: Index of the config's group of each, by the same names.
        clip: Whether gradients are clipped to ``max_norm_clip``.
        max_norm: A limit of the gradient norm instead of the config's, for every optimizer; None for the config's.
        max_value: A limit of the absolute value of each element of a gradient; None for none.
        parts: What of each parameter this process updates; None for all of it. Gradients are those of the parts.

    Attributes:
        rule: How weights are updated.
        slots: Parameter name -> its state tensors by slot, such as ``Moment_1``; empty where there are none.
        counts: Parameter name -> number of updates done, a float32 scalar as torch's kernels want it, where it is kept.
        norm: The global norm of the gradients of the last update, divided and not clipped, a scalar; None where it was
            not needed.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        parameters: Mapping[str, torch.Tensor],
        groups: Mapping[str, int],
        clip: bool = True,
        max_norm: float | None = None,
        max_value: float | None = None,
        parts: Parts | None = None,
    ) -> None:
        self.norm: torch.Tensor | None = None
        self._max_value = max_value
        self.rule, self._config = config.rule, config
        self.parts = Parts() if parts is None else parts
        self._parameters = self.parts.of(parameters)
        self.slots: dict[str, dict[str, torch.Tensor]] = {}
        self.counts: dict[str, torch.Tensor] = {}
        found: dict[int, _Group] = {}
        for name, parameter in self._parameters.items():
            index = groups[name]
            hyper = config.hyper_parameters(index)
            limit = hyper.get("max_norm_clip", math.inf) if max_norm is None else max_norm
            found.setdefault(index, _Group(index, hyper, limit if clip else math.inf)).names.append(name)
            self.slots[name] = {
                slot: torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                for slot in self.rule.slots_for(hyper)
            }
        self._groups = list(found.values())
        for group in self._groups:
            if self.rule.keeps_count(group.hyper):
                device = self._parameters[group.names[0]].device
                group.counter = torch.zeros(len(group.names), dtype=torch.float32, device=device)
                self.counts |= zip(group.names, group.counter.unbind(), strict=True)
        # Weights with memory in common are updated one after the other, as PyTorch does.
        self._one_by_one = bool(shared_groups(parameters, parameters))
        self._clips = any(math.isfinite(group.limit) for group in self._groups)

    @property
    def groups(self) -> Iterator[tuple[int, dict[str, Any], float, list[str]]]:
        """Index of the config's group, hyper-parameters, limit of the gradient norm and names of the parameters."""
        for group in self._groups:
            yield group.index, group.hyper, group.limit, group.names

    def step(
        self,
        gradients: Mapping[str, torch.Tensor],
        learning_rates: Sequence[float],
        divisor: float = 1.0,
        check_finite: bool = False,
        again: Again | None = None,
    ) -> bool:
        """Updates the weights once.

        Args:
            gradients: Gradient of every parameter that has one; the others are left alone, as PyTorch does. They are
                divided and clipped in place.
            learning_rates: One for all groups, or one for each group of the config in order and the default group.
            divisor: What the gradients are divided by first: loss scale times micro-batches.
            check_finite: Whether to skip the whole update if any gradient is not finite.
            again: Computes loss and gradients anew with the weights of now, for optimizers that ask for it.

        Returns:
            Whether the gradients were finite; always True where that was not checked.
        """
        asked = self.asks_norm(check_finite) and bool(gradients)
        self.norm = self.parts.total_norm(gradients.values()) / divisor if asked else None
        if check_finite and self.norm is not None and not torch.isfinite(self.norm):
            torch._foreach_div_(list(gradients.values()), divisor)
            return False
        self._update(gradients, learning_rates, divisor, again)
        return True

    def rebind(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Updates other tensors from now on, of the parameters among those that are given by name."""
        known = {name: value for name, value in parameters.items() if name in self._parameters}
        self._parameters |= self.parts.of(known)

    def forget(self, used: Mapping[str, torch.Tensor]) -> None:
        """Is told that gradients which it has used are needed no longer."""

    def _update(
        self,
        gradients: Mapping[str, torch.Tensor],
        learning_rates: Sequence[float],
        divisor: float,
        again: Again | None,
    ) -> None:
        for group in self._groups:
            found = [name for name in group.names if name in gradients]
            divided = self._clip_values([gradients[name] for name in found], _divisor(group, self.norm, divisor))
            for names in ([name] for name in found) if self._one_by_one else [found] if found else []:
                self.rule.update(
                    ParameterBatch(
                        weights=[self._parameters[name] for name in names],
                        gradients=[gradients[name] for name in names],
                        slots=[self.slots[name] for name in names],
                        counts=[self.counts.get(name) for name in names],
                        lr=learning_rates[0 if len(learning_rates) == 1 else group.index],
                        divisor=divided,
                        hyper=self._config.hyper_parameters(group.index) if self._config.is_live else group.hyper,
                        counter=group.counter if len(names) == len(group.names) else None,
                        parts=self.parts,
                    )
                )

    def asks_norm(self, check_finite: bool) -> bool:
        """Returns whether :meth:`step` computes the norm: it is needed, or can't be had after the update."""
        return self._clips or check_finite or self._max_value is not None

    def _divide(self, gradients: Mapping[str, torch.Tensor], divisor: float) -> None:
        """Divides and clips gradients in place."""
        for group in self._groups:
            found = [gradients[name] for name in group.names if name in gradients]
            rest = self._clip_values(found, _divisor(group, self.norm, divisor))
            if found and (isinstance(rest, torch.Tensor) or rest != 1.0):
                torch._foreach_div_(found, rest)

    def _clip_values(self, gradients: list[torch.Tensor], divisor: float | torch.Tensor) -> float | torch.Tensor:
        """Clips each element, if that was asked for; returns what the gradients are to be divided by afterwards."""
        if self._max_value is None or not gradients:
            return divisor
        torch._foreach_div_(gradients, divisor)
        torch._foreach_clamp_min_(gradients, -self._max_value)
        torch._foreach_clamp_max_(gradients, self._max_value)
        return 1.0


def _divisor(group: _Group, norm: torch.Tensor | None, divisor: float) -> float | torch.Tensor:
    """Returns what the group's gradients are divided by.

    Clipping divides by ``norm / limit`` where the global norm is above the group's limit.
    """
    if math.isfinite(group.limit) and norm is not None:
        excess: torch.Tensor = norm / group.limit
        return divisor * excess.clamp(min=1.0)
    return divisor
