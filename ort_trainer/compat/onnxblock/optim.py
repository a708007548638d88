"""Optimizers as blocks, in the operators of onnxruntime-training."""

from __future__ import annotations

from typing import Any

from .blocks import Block

__all__ = ["SGD", "AdamW", "ClipGradNorm"]

_MICROSOFT = "com.microsoft"


class ClipGradNorm(Block):
    """Limits the norm of all gradients together."""

    def __init__(self, max_norm: float) -> None:
        self._limit = max_norm

    def build(self, gradients: str) -> str:
        """Limits a sequence of gradients."""
        return self._add("InplaceClipGradNorm", [gradients], domain=_MICROSOFT, max_norm=float(self._limit))


class _Optimizer(Block):
    def __init__(self, clip_grad: ClipGradNorm | None = None) -> None:
        self._clip = clip_grad

    def _gradients(self) -> str:
        """Returns the name of the gradients, clipped if asked."""
        return "gradients" if self._clip is None else str(self._clip("gradients"))


class AdamW(_Optimizer):
    """AdamW of Transformers, which decays weights after the update, and adds eps before the bias correction."""

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: ClipGradNorm | None = None,
    ) -> None:
        super().__init__(clip_grad)
        self._attributes: dict[str, Any] = {
            "alpha": float(betas[0]),
            "beta": float(betas[1]),
            "epsilon": float(eps),
            "weight_decay": float(weight_decay),
            "correct_bias": int(bias_correction),
            "adam_mode": 1,
        }

    def build(self, parameters: Any = ()) -> str:
        """Adds the update of sequences of parameters, gradients and moments."""
        names = ["learning_rate", "step", "params", self._gradients(), "first_order_moments", "second_order_moments"]
        return self._add("AdamWOptimizer", names, domain=_MICROSOFT, **self._attributes)


class SGD(_Optimizer):
    """Plain stochastic gradient descent."""

    def build(self, parameters: Any = ()) -> str:
        """Adds the update of sequences of parameters and gradients."""
        return self._add("SGDOptimizerV2", ["learning_rate", "params", self._gradients()], domain=_MICROSOFT)
