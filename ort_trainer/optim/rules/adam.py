"""Adam with decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, ClassVar

import torch

from ...core.errors import shown
from ..config import ParameterGroups, number
from ..rule import NodeWriter, ParameterBatch, ParameterNodes, Rule, by_count
from ._moments import MOMENT_1, MOMENT_2, AdaptiveConfig, adaptive_step

__all__ = ["AdamConfig", "AdamWConfig"]

# A step count so large that every bias correction 1 - beta^t is exactly 1, which disables the correction.
_NO_CORRECTION = 1e30


class AdamConfig(AdaptiveConfig):
    """Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019).

    With the gradient g, weight w, moments m and v, update number t (from 1), and c1 = 1 - alpha^t, c2 = 1 - beta^t
    (both 1 without bias correction): ``m = alpha m + (1 - alpha) g``, ``v = beta v + (1 - beta) g^2``, then

    - ``BEFORE_WEIGHT_UPDATE``: ``w -= lr (m / c1 / (sqrt(v / c2) + epsilon) + lambda w)``, which is
      ``torch.optim.AdamW``;
    - ``AFTER_WEIGHT_UPDATE``: ``z = w - lr sqrt(c2) / c1 m / (sqrt(v) + epsilon)``, ``w = z - lr lambda z``, which is
      the AdamW that Hugging Face Transformers had.

    Args:
        params: Parameter groups by name, each with any of the hyper-parameters below.
        lr: Learning rate, at least 0.
        alpha: Decay of the first moment, in [0, 1).
        beta: Decay of the second moment, in [0, 1).
        lambda_coef: Weight decay, at least 0.
        epsilon: Added to the denominator, at least 0.
        max_norm_clip: Limit of the global gradient norm, above 0; used while ``utils.grad_norm_clip`` is on.
        do_bias_correction: Whether c1 and c2 are used.
        weight_decay_mode: A :class:`DecayMode`.
    """

    class DecayMode(IntEnum):
        """When weight decay is applied."""

        BEFORE_WEIGHT_UPDATE = 0
        AFTER_WEIGHT_UPDATE = 1

    def __init__(
        self,
        params: ParameterGroups = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        epsilon: float = 1e-8,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = True,
        weight_decay_mode: DecayMode = DecayMode.BEFORE_WEIGHT_UPDATE,
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda_coef": lambda_coef,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
            "weight_decay_mode": weight_decay_mode,
        }
        super().__init__("AdamOptimizer", params, defaults)

    def _checked(self, key: str, value: Any) -> Any:
        if key != "weight_decay_mode":
            return super()._checked(key, value)
        if isinstance(value, bool) or not isinstance(value, int) or value not in tuple(self.DecayMode):
            raise ValueError(f"'weight_decay_mode' must be an AdamConfig.DecayMode, but {shown(value)} was given")
        return self.DecayMode(value)


class AdamWConfig(AdamConfig):
    """``torch.optim.AdamW``, with its argument names and defaults.

    It uses the rule of :class:`AdamConfig` in mode ``BEFORE_WEIGHT_UPDATE``; their checkpoints are interchangeable. As
    in torch's optimizer, gradients are not clipped, unless a limit is given here or in ``utils.max_grad_norm``.

    Args:
        params: Parameter groups by name, each with any of the hyper-parameters below.
        lr: Learning rate, at least 0.
        betas: Decay of the first and of the second moment, each in [0, 1).
        eps: Added to the denominator, at least 0.
        weight_decay: Weight decay, at least 0.
        max_norm_clip: Limit of the global gradient norm, above 0; used while ``utils.grad_norm_clip`` is on.
    """

    _NAMES: ClassVar[dict[str, str]] = {"eps": "epsilon", "weight_decay": "lambda_coef"}

    def __init__(
        self,
        params: ParameterGroups = (),
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_norm_clip: float = math.inf,
    ) -> None:
        values = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "max_norm_clip": max_norm_clip}
        super().__init__(params, lr, **self._own_names(values))

    @property
    def betas(self) -> tuple[float, float]:
        """Decay of the first and of the second moment."""
        return (self.alpha, self.beta)

    @property
    def eps(self) -> float:
        """Addend of the denominator."""
        return float(self.epsilon)

    @property
    def weight_decay(self) -> float:
        """Weight decay."""
        return float(self.lambda_coef)

    def _shown(self, values: Mapping[str, Any]) -> dict[str, Any]:
        names = {rule_name: name for name, rule_name in self._NAMES.items()}
        shown = {names.get(key, key): value for key, value in values.items()}
        if "alpha" in shown:
            shown["betas"] = (shown.pop("alpha"), shown.pop("beta"))
        allowed = ("params", "lr", "betas", *self._NAMES, "max_norm_clip")
        return {key: shown[key] for key in allowed if key in shown}

    def _own_names(self, group: Mapping[str, Any]) -> dict[str, Any]:
        allowed = ("params", "lr", "betas", *self._NAMES, "max_norm_clip")
        renamed: dict[str, Any] = {}
        for key, value in group.items():
            if key not in allowed:
                raise ValueError(f"AdamWConfig does not have {key!r}: a parameter group has {list(allowed)}")
            if key == "betas":
                if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
                    raise TypeError(f"'betas' must be two numbers, but {shown(value)} was given")
                renamed["alpha"], renamed["beta"] = (number("betas", beta, below=1.0) for beta in value)
            elif key in self._NAMES:
                renamed[self._NAMES[key]] = number(key, value)
            else:
                renamed[key] = value
        return renamed


class _Adam(Rule):
    """Adam with torch's fused kernel."""

    name = "AdamOptimizer"
    slots = (MOMENT_1, MOMENT_2)

    def update(self, batch: ParameterBatch) -> None:
        if batch.hyper["weight_decay_mode"] == AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE:
            self._update(batch, batch.hyper["epsilon"], batch.hyper["lambda_coef"])
            return
        for count, part in by_count(batch):
            hyper = batch.hyper
            # This mode adds epsilon before the second moment's correction; the kernel adds it after.
            correction = math.sqrt(1.0 - hyper["beta"] ** (count + 1)) if hyper["do_bias_correction"] else 1.0
            self._update(part, hyper["epsilon"] / correction, 0.0)
            if hyper["lambda_coef"]:
                torch._foreach_mul_(part.weights, 1.0 - batch.lr * hyper["lambda_coef"])

    def _update(self, batch: ParameterBatch, epsilon: float, decay: float) -> None:
        batch.count_up()
        scale = batch.scale()
        for part in batch.by_dtype():
            counts: Any = part.counts  # all are counted
            # torch.optim.AdamW calls this after checks that take as long as the update of a small model.
            torch._fused_adamw_(
                part.weights,
                part.gradients,
                part.by_slot[MOMENT_1],
                part.by_slot[MOMENT_2],
                [],
                counts
                if batch.hyper["do_bias_correction"]
                else [torch.full_like(count, _NO_CORRECTION) for count in counts],
                lr=batch.lr,
                beta1=batch.hyper["alpha"],
                beta2=batch.hyper["beta"],
                weight_decay=decay,
                eps=epsilon,
                amsgrad=False,
                maximize=False,
                grad_scale=scale,
                found_inf=None,
            )

    def nodes(self, nodes: NodeWriter, parameter: ParameterNodes) -> tuple[Any, Mapping[str, Any]]:
        weight, rate, hyper = parameter.weight, parameter.rate, parameter.hyper
        before = hyper["weight_decay_mode"] == AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE
        moments, step, factor = adaptive_step(nodes, parameter, corrected_epsilon=before)
        scale = rate if factor is None else nodes.op("Mul", rate, factor)
        if hyper["lambda_coef"]:
            decay = nodes.op("Mul", rate, nodes.number(hyper["lambda_coef"], weight))
            remaining = nodes.op("Sub", nodes.number(1.0, weight), decay)
            scale = scale if before else nodes.op("Mul", scale, remaining)
            weight = nodes.op("Mul", weight, remaining)
        return nodes.op("Sub", weight, nodes.op("Mul", step, scale)), moments
