"""The weight update: checks and clips the gradients, then calls the optimizer's rule to change weights in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..engine.ownership import shared_groups
from .config import OptimizerConfig
from .parts import Parts
from .rounded_moments import update_rounded
from .rule import ParameterBatch

Again = Callable[[], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""Runs the forward and backward pass again; returns the loss, and the gradients by parameter name."""


@dataclass
class _Group:
    """Parameters of one group of the config, with their hyper-parameters, limit of the gradient norm, and counts.

    The batches are those of the last update, for the parameters that had gradients; usually the next has the same.
    """

    index: int
    hyper: dict[str, Any]
    limit: float
    names: list[str] = field(default_factory=list)
    counter: torch.Tensor | None = None
    updated: list[str] = field(default_factory=list)
    batches: list[ParameterBatch] = field(default_factory=list)


class OptimizerUpdate:
    """Owns the optimizer state of the trainable parameters, and updates the weights.

    Args:
        config: The rule and its hyper-parameters. The learning rate is an argument of :meth:`step`.
        parameters: Trainable parameters by name; :meth:`step` changes them in place.
        groups: Index of each parameter's group in the config, by name.
        clip: Whether gradients are clipped to ``max_norm_clip``.
        max_norm: Limit of the gradient norm that overrides the config's, for every optimizer; None for the config's.
        max_value: Limit of the absolute value of each gradient element; None for no limit.
        parts: The parts of the parameters that this process updates, and whose gradients it gets; None for all.
        rounds_moments: Whether the state tensors of float32 parameters are bfloat16.

    Attributes:
        rule: The rule that updates the weights.
        slots: Parameter name -> its state tensors by slot, such as ``Moment_1``; empty if it has none.
        counts: Parameter name -> number of updates, a float32 scalar as torch's kernels require; only if counted.
        shows_gradients: Whether the gradients of an update can be seen in ``p.grad`` until :meth:`forget`.
        asks_norm: Whether :meth:`step` computes the norm: because it needs it, or can't compute it afterwards.
        norm: The global norm of the gradients of the last update, a scalar, divided but not clipped; None if it was not
            needed.
    """

    shows_gradients = False

    def __init__(
        self,
        config: OptimizerConfig,
        parameters: Mapping[str, torch.Tensor],
        groups: Mapping[str, int],
        clip: bool = True,
        max_norm: float | None = None,
        max_value: float | None = None,
        parts: Parts | None = None,
        rounds_moments: bool = False,
    ) -> None:
        self.norm: torch.Tensor | None = None
        self._max_value, self._rounds_moments = max_value, rounds_moments
        self.rule, self._config = config.rule, config
        self.parts = Parts() if parts is None else parts
        self._parameters = self.parts.of(parameters)
        self.slots: dict[str, dict[str, torch.Tensor]] = {}
        self.counts: dict[str, torch.Tensor] = {}
        groups_by_index: dict[int, _Group] = {}
        for name, parameter in self._parameters.items():
            index = groups[name]
            hyper = config.hyper_parameters(index)
            limit = hyper.get("max_norm_clip", math.inf) if max_norm is None else max_norm
            groups_by_index.setdefault(index, _Group(index, hyper, limit if clip else math.inf)).names.append(name)
            dtype = torch.bfloat16 if rounds_moments and parameter.dtype == torch.float32 else None
            self.slots[name] = {
                slot: torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
                for slot in self.rule.slots_for(hyper)
            }
        self._groups = list(groups_by_index.values())
        for group in self._groups:
            if self.rule.keeps_count(group.hyper):
                device = self._parameters[group.names[0]].device
                group.counter = torch.zeros(len(group.names), dtype=torch.float32, device=device)
                self.counts |= zip(group.names, group.counter.unbind(), strict=True)
        # Like PyTorch, update weights that share memory one after the other.
        self._one_by_one = bool(shared_groups(parameters, parameters))
        self._clips = any(math.isfinite(group.limit) for group in self._groups)
        self.asks_norm = self._clips or max_value is not None

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
        number: int = 0,
    ) -> bool:
        """Updates the weights once.

        Args:
            gradients: Gradients by parameter name, which are divided and clipped in place. Parameters without a
                gradient do not change, as in PyTorch.
            learning_rates: One for all groups, or one for each group of the config in order and the default group.
            divisor: Divisor of the gradients, applied first: loss scale times micro-batches.
            check_finite: Whether to skip the whole update if any gradient is not finite.
            again: Recomputes loss and gradients with the current weights, for optimizers with a closure.
            number: Number of updates done, which chooses how rounded moments are rounded.

        Returns:
            Whether the gradients were finite; always True if that was not checked.
        """
        needs_norm = bool(gradients) and (check_finite or self.asks_norm)
        self.norm = self.parts.total_norm(gradients.values()) if needs_norm else None
        # Dividing by 1 would take as long as the update of a small model.
        if self.norm is not None and divisor != 1.0:
            self.norm = self.norm / divisor
        if check_finite and self.norm is not None and not torch.isfinite(self.norm):
            torch._foreach_div_(list(gradients.values()), divisor)
            return False
        self._number = number
        self._update(gradients, learning_rates, divisor, again)
        return True

    def rebind(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Replaces the tensors of the given parameters; unknown names are ignored."""
        trained = {name: value for name, value in parameters.items() if name in self._parameters}
        self._parameters |= self.parts.of(trained)
        for group in self._groups:
            group.updated, group.batches = [], []

    def forget(self, used: Mapping[str, torch.Tensor]) -> None:
        """Releases used gradients."""

    def refresh(self) -> None:
        """Takes the state that a user has put in place of this one; called before others use the state."""

    def publish(self) -> None:
        """Called after others have changed the state."""

    def _update(
        self,
        gradients: Mapping[str, torch.Tensor],
        learning_rates: Sequence[float],
        divisor: float,
        again: Again | None,
    ) -> None:
        for group in self._groups:
            names = group.names
            if not all(map(gradients.__contains__, names)):
                names = [name for name in names if name in gradients]
            if names != group.updated:
                group.updated, group.batches = names, self._batches(group, names)
            group_gradients = list(map(gradients.__getitem__, names))
            divided = _divisor(group, self.norm, divisor)
            if self._max_value is not None:
                divided = self._clip_values(group_gradients, divided)
            for index, batch in enumerate(group.batches):
                batch.gradients = group_gradients[index : index + 1] if self._one_by_one else group_gradients
                batch.lr, batch.divisor = learning_rates[0 if len(learning_rates) == 1 else group.index], divided
                batch.hyper = self._config.hyper_parameters(group.index) if self._config.is_live else group.hyper
                if self._rounds_moments and batch.slots[0]:
                    update_rounded(self.rule, batch, self._number)
                else:
                    self.rule.update(batch)
                batch.gradients = []  # the next run reuses their memory

    def _batches(self, group: _Group, names: list[str]) -> list[ParameterBatch]:
        """Returns batches of the parameters: all together, or one each, if any share memory."""
        return [
            ParameterBatch(
                weights=[self._parameters[name] for name in batch_names],
                gradients=[],
                slots=[self.slots[name] for name in batch_names],
                counts=[self.counts.get(name) for name in batch_names],
                lr=0.0,
                divisor=1.0,
                hyper=group.hyper,
                counter=group.counter if len(batch_names) == len(group.names) else None,
                parts=self.parts,
            )
            for batch_names in ([[name] for name in names] if self._one_by_one else [names] if names else [])
        ]

    def _divide(self, gradients: Mapping[str, torch.Tensor], divisor: float) -> None:
        """Divides and clips gradients in place."""
        for group in self._groups:
            group_gradients = [gradients[name] for name in group.names if name in gradients]
            rest = self._clip_values(group_gradients, _divisor(group, self.norm, divisor))
            if group_gradients and (isinstance(rest, torch.Tensor) or rest != 1.0):
                torch._foreach_div_(group_gradients, rest)

    def _clip_values(self, gradients: list[torch.Tensor], divisor: float | torch.Tensor) -> float | torch.Tensor:
        """Clips each element if there is a limit; returns the remaining divisor of the gradients."""
        if self._max_value is None or not gradients:
            return divisor
        torch._foreach_div_(gradients, divisor)
        torch._foreach_clamp_min_(gradients, -self._max_value)
        torch._foreach_clamp_max_(gradients, self._max_value)
        return 1.0


def _divisor(group: _Group, norm: torch.Tensor | None, divisor: float) -> float | torch.Tensor:
    """Returns the divisor of the group's gradients.

    Clipping divides by ``norm / limit`` if the global norm is above the group's limit.
    """
    if not math.isfinite(group.limit) or norm is None:
        return divisor
    excess = norm if group.limit == 1.0 else norm / group.limit
    return excess.clamp(min=1.0) if divisor == 1.0 else divisor * excess.clamp(min=1.0)
