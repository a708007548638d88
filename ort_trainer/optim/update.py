"""The weight update: applies an optimizer config to parameters and gradients, in place, on torch's kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.adamw import adamw

from .config import AdamConfig, _OptimizerConfig

__all__ = ["MOMENT_1", "MOMENT_2", "OptimizerUpdate", "global_norm"]

MOMENT_1 = "Moment_1"
MOMENT_2 = "Moment_2"
# A step count so large that every bias correction 1 - beta^t is exactly 1: Adam without bias correction.
_NO_CORRECTION = 1e30


def global_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the Euclidean norm of all gradients taken together, a scalar; not finite if any element is not."""
    norms = torch._foreach_norm(list(gradients))
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]))
    return total


@dataclass
class _Group:
    """Parameters of one group of the config, with their hyper-parameters and the limit of the gradient norm."""

    index: int
    hyper: dict[str, Any]
    limit: float
    names: list[str] = field(default_factory=list)


class OptimizerUpdate:
    """Owns the moments and update counts of the trainable parameters, and updates the weights.

    Args:
        config: Which rule, with which hyper-parameters. The learning rate is an argument of :meth:`step`.
        parameters: Trainable parameters by name; :meth:`step` changes them in place.
        groups: Index of the config's group of each, by the same names.
        clip: Whether gradients are clipped to ``max_norm_clip``.
        max_norm: A limit of the gradient norm instead of the config's, for SGD too; None for the config's.

    Attributes:
        moments: Parameter name -> ``Moment_1`` and ``Moment_2``, of the parameter's shape; empty for SGD.
        counts: Parameter name -> number of updates done, a float32 scalar as torch's kernels want it.
    """

    def __init__(
        self,
        config: _OptimizerConfig,
        parameters: Mapping[str, torch.Tensor],
        groups: Mapping[str, int],
        clip: bool = True,
        max_norm: float | None = None,
    ) -> None:
        self._config = config
        self._parameters = dict(parameters)
        self.moments: dict[str, dict[str, torch.Tensor]] = {}
        self.counts: dict[str, torch.Tensor] = {}
        if config.name != "SGDOptimizer":
            for name, parameter in self._parameters.items():
                self.moments[name] = {
                    key: torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                    for key in (MOMENT_1, MOMENT_2)
                }
                self.counts[name] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        found: dict[int, _Group] = {}
        for name in self._parameters:
            index = groups[name]
            hyper = config.hyper_parameters(index)
            limit = hyper.get("max_norm_clip", math.inf) if max_norm is None else max_norm
            found.setdefault(index, _Group(index, hyper, limit if clip else math.inf)).names.append(name)
        self._groups = list(found.values())
        self._clip = any(math.isfinite(group.limit) for group in self._groups)

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
    ) -> bool:
        """Updates the weights once.

        Args:
            gradients: Gradient of every parameter that has one; the others are left alone, as PyTorch does. They are
                scratch memory afterwards.
            learning_rates: One for all groups, or one for each group of the config in order and the default group.
            divisor: What the gradients are divided by first: loss scale times micro-batches.
            check_finite: Whether to skip the whole update if any gradient is not finite.

        Returns:
            Whether the gradients were finite; always True where that was not checked.
        """
        norm = global_norm(gradients.values()) / divisor if (self._clip or check_finite) and gradients else None
        if check_finite and norm is not None and not torch.isfinite(norm):
            return False
        for group in self._groups:
            names = [name for name in group.names if name in gradients]
            if not names:
                continue
            lr = learning_rates[0 if len(learning_rates) == 1 else group.index]
            scale = self._scale(group, norm, divisor)
            if self._config.name == "SGDOptimizer":
                clipped = math.isfinite(group.limit)  # if not, the divisor goes into the rate, without another pass
                self._sgd(names, gradients, lr if clipped else lr / divisor, scale if clipped else None)
            elif self._config.name == "AdamOptimizer":
                for same_count in self._by_count(names, group.hyper):
                    self._adam(same_count, gradients, lr, scale, group.hyper)
            else:
                for name in names:
                    self._lamb(name, gradients[name], lr, scale, group.hyper)
        return True

    def _scale(self, group: _Group, norm: torch.Tensor | None, divisor: float) -> torch.Tensor | None:
        """Returns what the group's gradients are divided by, as a tensor, or None for 1.

        Clipping divides by ``norm / limit`` where the global norm is above the group's limit.
        """
        if math.isfinite(group.limit) and norm is not None:
            excess: torch.Tensor = norm / group.limit
            return divisor * excess.clamp(min=1.0)
        if divisor == 1.0:
            return None
        return torch.tensor(divisor, device=next(iter(self._parameters.values())).device)

    def _count(self, name: str) -> float:
        return float(self.counts[name])

    def _by_count(self, names: list[str], hyper: Mapping[str, Any]) -> list[list[str]]:
        """Splits parameters by update count where the rule depends on it outside the kernel."""
        if hyper["weight_decay_mode"] == AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE:
            return [names]
        return [list(same) for _, same in itertools.groupby(sorted(names, key=self._count), key=self._count)]

    def _sgd(
        self, names: list[str], gradients: Mapping[str, torch.Tensor], lr: float, scale: torch.Tensor | None
    ) -> None:
        weights = [self._parameters[name] for name in names]
        found = [gradients[name] for name in names]
        if scale is not None:
            torch._foreach_div_(found, scale)
        torch._foreach_add_(weights, found, alpha=-lr)

    def _adam(
        self,
        names: list[str],
        gradients: Mapping[str, torch.Tensor],
        lr: float,
        scale: torch.Tensor | None,
        hyper: Mapping[str, Any],
    ) -> None:
        counts = [self.counts[name] for name in names]
        after = hyper["weight_decay_mode"] == AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
        corrected = hyper["do_bias_correction"]
        epsilon = hyper["epsilon"]
        if after and corrected:
            # This mode adds epsilon before the second moment's correction: the kernel adds it after.
            epsilon /= (1.0 - hyper["beta"] ** (self._count(names[0]) + 1)) ** 0.5
        weights = [self._parameters[name] for name in names]
        adamw(
            weights,
            [gradients[name] for name in names],
            [self.moments[name][MOMENT_1] for name in names],
            [self.moments[name][MOMENT_2] for name in names],
            [],
            counts if corrected else [torch.full_like(count, _NO_CORRECTION) for count in counts],
            fused=True,
            grad_scale=scale,
            amsgrad=False,
            beta1=hyper["alpha"],
            beta2=hyper["beta"],
            lr=lr,
            weight_decay=0.0 if after else hyper["lambda_coef"],
            eps=epsilon,
            maximize=False,
        )
        if not corrected:
            torch._foreach_add_(counts, 1)
        if after and hyper["lambda_coef"]:
            torch._foreach_mul_(weights, 1.0 - lr * hyper["lambda_coef"])

    def _lamb(
        self, name: str, gradient: torch.Tensor, lr: float, scale: torch.Tensor | None, hyper: Mapping[str, Any]
    ) -> None:
        weight = self._parameters[name]
        first, second = self.moments[name][MOMENT_1], self.moments[name][MOMENT_2]
        count = self.counts[name].add_(1)
        if scale is not None:
            gradient = gradient.div_(scale)
        first.lerp_(gradient, 1.0 - hyper["alpha"])
        second.mul_(hyper["beta"]).addcmul_(gradient, gradient, value=1.0 - hyper["beta"])
        corrected = hyper["do_bias_correction"]
        correction_1 = 1.0 - hyper["alpha"] ** float(count) if corrected else 1.0
        correction_2 = 1.0 - hyper["beta"] ** float(count) if corrected else 1.0
        # The gradient is scratch memory by now.
        denominator = torch.div(second, correction_2, out=gradient).sqrt_().add_(hyper["epsilon"])
        direction = torch.div(first, denominator, out=denominator).div_(correction_1)
        direction.add_(weight, alpha=hyper["lambda_coef"])
        ratio = weight.norm() / direction.norm()
        ratio = torch.where(
            torch.isfinite(ratio) & (ratio > 0), ratio.clamp(hyper["ratio_min"], hyper["ratio_max"]), 1.0
        )
        weight.sub_(direction.mul_(ratio), alpha=lr)
