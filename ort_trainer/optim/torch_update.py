"""The weight update by a PyTorch optimizer: puts gradients into ``p.grad`` and calls the optimizer's own ``step``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .parts import global_norm
from .torch_optimizer import TorchOptimizerConfig
from .update import Again, OptimizerUpdate

__all__ = ["TorchUpdate"]


class TorchUpdate(OptimizerUpdate):
    """Updates the model's own parameters with a PyTorch optimizer.

    After :meth:`step` the gradients remain in ``p.grad`` until the next run of a training graph.
    """

    shows_gradients = True

    def __init__(self, config: TorchOptimizerConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self._torch = config
        self._put_there: dict[str, torch.Tensor | None] = {}
        if any(parameter.device.type != "cpu" for parameter in config.parameters.values()):
            config.optimizer.load_state_dict(config.optimizer.state_dict())  # moves the state to the parameters' device

    def forget(self, used: Mapping[str, torch.Tensor]) -> None:
        """Releases the gradients and their memory; a ``p.grad`` that the user has assigned stays."""
        for name in used:
            parameter = self._torch.parameters[name]
            if parameter.grad is self._put_there.get(name):
                parameter.grad = None
        self._put_there.clear()

    def _update(
        self,
        gradients: Mapping[str, torch.Tensor],
        learning_rates: Sequence[float],
        divisor: float,
        again: Again | None,
    ) -> None:
        optimizer = self._torch.optimizer
        gone = [
            name
            for name, own in self._parameters.items()  # without frozen and unused ones
            if self._torch.parameters[name].dtype == own.dtype
            and self._torch.parameters[name].data_ptr() != own.data_ptr()
        ]
        if gone:
            raise RuntimeError(
                f"the model's parameters {gone[:3]} have been replaced since the trainer was made (as by "
                f"load_state_dict(assign=True)), and {type(optimizer).__name__} still has the old ones: create a new "
                "optimizer and a new trainer"
            )
        self._put(gradients, divisor)
        if again is None:
            optimizer.step()
            return

        def closure() -> torch.Tensor:
            loss, found = again()
            self.norm = global_norm(found.values()) if self._clips else None
            self._put(found, 1.0)
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]

    def _put(self, gradients: Mapping[str, torch.Tensor], divisor: float) -> None:
        self._divide(gradients, divisor)
        for name, parameter in self._torch.parameters.items():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
            self._put_there[name] = parameter.grad
