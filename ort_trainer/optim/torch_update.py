"""The weight update by an optimizer of PyTorch: gradients go into ``p.grad``, and its own ``step`` does the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .parts import global_norm
from .torch_optimizer import TorchOptimizerConfig
from .update import Again, OptimizerUpdate

__all__ = ["TorchUpdate"]


class TorchUpdate(OptimizerUpdate):
    """Lets an optimizer of PyTorch update the model's own parameters.

    After :meth:`step` the gradients are in ``p.grad``, until the next run of a training graph needs memory.
    """

    def __init__(self, config: TorchOptimizerConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self._torch = config
        self._put_there: dict[str, torch.Tensor | None] = {}
        if any(parameter.device.type != "cpu" for parameter in config.parameters.values()):
            config.optimizer.load_state_dict(config.optimizer.state_dict())  # to where the parameters are by now

    def forget(self, used: Mapping[str, torch.Tensor]) -> None:
        """Gives up the gradients, so that their memory is free; what the user has put there stays."""
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
                f"{type(optimizer).__name__} has the parameters {gone[:3]} that the model had when the trainer was "
                "made, and the model has others (load_state_dict(assign=True) makes such): make optimizer and trainer "
                "anew"
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
