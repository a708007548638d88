"""The update that shares its state with the optimizer of ``from_torch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core.errors import shown
from .torch_optimizer import FollowedConfig
from .update import OptimizerUpdate

TORCH_NAMES = {"Moment_1": "exp_avg", "Moment_2": "exp_avg_sq", "Momentum": "momentum_buffer"}
"""State tensor of a rule -> its name in the equivalent optimizer of ``torch.optim``."""


class FollowedUpdate(OptimizerUpdate):
    """Updates the weights by a rule, and shares its state with the optimizer that it follows.

    In ``optimizer.state``, parameters that were updated have the state tensors themselves. What others put in their
    place, as ``optimizer.load_state_dict`` does, is copied into the state tensors before these are used again. With
    ZeRO a process has only parts of the state, so ``state_dict`` and ``load_state_dict`` of the optimizer raise.

    Raises:
        ValueError: If the optimizer has a state that does not fit.
    """

    def __init__(self, config: FollowedConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self._optimizer, self._torch_parameters = config.optimizer, config.parameters
        self._shared: dict[str, dict[str, torch.Tensor]] = {}
        self._shown: set[str] = set()
        for name, slots in self.slots.items():
            shared = {TORCH_NAMES[slot]: value for slot, value in slots.items()}
            if TORCH_NAMES["Moment_1"] in shared:  # SGD keeps no count
                shared["step"] = self.counts[name]
            if shared:
                self._shared[name] = shared
        self.refresh()
        if self.parts.are_shared:
            self._shared.clear()
            self._optimizer.state.clear()
            self._optimizer.register_state_dict_pre_hook(_refuse)
            self._optimizer.register_load_state_dict_pre_hook(_refuse)

    def refresh(self) -> None:
        """Takes what is in ``optimizer.state`` in place of the state tensors."""
        state = self._optimizer.state
        for name, shared in self._shared.items():
            values = state.get(self._torch_parameters[name])
            if values is None:
                if name in self._shown:
                    self._take(name, {})
            elif any(values.get(key) is not tensor for key, tensor in shared.items()):
                self._take(name, values)

    def publish(self) -> None:
        """Shares the state of all parameters that were updated."""
        for name in self._shared:
            self._show(name, bool(self.counts[name]))

    def _update(self, gradients: Mapping[str, torch.Tensor], *arguments: Any) -> None:
        self.refresh()
        super()._update(gradients, *arguments)
        for name in (self._shared.keys() - self._shown) & gradients.keys():
            self._show(name)

    def _show(self, name: str, has_begun: bool = True) -> None:
        """Shares the state tensors of a parameter, or removes those of one that was never updated."""
        parameter = self._torch_parameters[name]
        if has_begun:
            self._optimizer.state[parameter] = dict(self._shared[name])
            self._shown.add(name)
        else:
            self._optimizer.state.pop(parameter, None)
            self._shown.discard(name)

    def _take(self, name: str, values: Mapping[str, Any]) -> None:
        """Copies what ``optimizer.state`` has for a parameter into its state tensors, and shares these again.

        Args:
            name: The parameter.
            values: The values; without any, as SGD's before its first update, the state begins anew.
        """
        parameter, shared, count = self._torch_parameters[name], self._shared[name], self.counts[name]
        if all(values.get(key) is None for key in shared):
            torch._foreach_zero_([*self.slots[name].values(), count])
            self._show(name, has_begun=False)
            return
        for key, tensor in shared.items():
            value, shape = values.get(key), torch.Size() if key == "step" else parameter.shape
            if torch.Size(getattr(value, "shape", ())) != shape or not isinstance(value, (int, float, torch.Tensor)):
                raise ValueError(
                    f"{type(self._optimizer).__name__}.state of {name!r} must have {key!r} of shape {list(shape)}, but "
                    f"it is {shown(value)}: load a state dict of the same optimizer over the same parameters"
                )
            value = torch.as_tensor(value)
            tensor.copy_(value if key == "step" else self.parts.of({name: value})[name])
        if "step" not in shared:
            count.clamp_(min=1)  # SGD's momentum is no first one, however often it was updated
        self._show(name)


def _refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    raise RuntimeError(
        f"with ZeRO this process has only a part of {type(optimizer).__name__}'s state, so its state_dict() and "
        "load_state_dict() are incomplete: use trainer.state_dict() and trainer.load_state_dict(), or checkpoints, in "
        "all processes"
    )
