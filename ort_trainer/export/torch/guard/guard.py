"""The guard of a PyTorch model's graphs: does the graph still mean what the model means?"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any

import torch
from torch import nn

from ...model_source import Named, nothing_to_train
from ..borrow import BORROWED
from .loss_watch import LossWatch
from .model_watch import ModelWatch
from .shared_tensors import SharedTensors

__all__ = ["Guard"]


class Guard:
    """Watches what graphs of a model depend on: its modules and settings, the loss function, and their memory.

    Args:
        model: The model.
        loss_fn: The loss function, or None.
        trainable: Canonical names of the parameters that may be trained.
        frozen: Names of parameters that are never trained, even if they require grad.
        share: Whether the trainer works on the model's own tensors.

    Attributes:
        memory: The model's own tensors, if the trainer works on them.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Any, trainable: Collection[str], frozen: Collection[str], share: bool
    ) -> None:
        self._name = type(model).__name__
        self._model = ModelWatch(model, trainable, frozen)
        self._modules = [self._model]
        if isinstance(loss_fn, nn.Module) and not isinstance(loss_fn, torch.jit.ScriptModule):
            self._modules.append(ModelWatch(loss_fn, (), [name for name, _ in loss_fn.named_parameters()]))
        self._loss = LossWatch(loss_fn, model)
        self.memory = SharedTensors(model, self._model) if share else None

    def check(self, training: bool) -> tuple[Hashable, Named]:
        """Returns the key of the graphs to use, and the tensors with other memory; see ``ModelSource.check``."""
        with BORROWED:  # an export in another thread may have set other modes for a while
            key = (*[watch.variant(training) for watch in self._modules], self._loss.variant())
            if training and not self._model.trainable:
                raise nothing_to_train(self._name)
            return key, {} if self.memory is None else self.memory.take_changes()

    @property
    def last_change(self) -> str:
        """What has changed in the model and the loss's modules; see ``ModelSource.last_change``."""
        return "; ".join(filter(None, (watch.last_change for watch in self._modules)))

    @property
    def trainable(self) -> frozenset[str]:
        """Canonical names of the parameters that a training step differentiates now."""
        return self._model.trainable

    @property
    def modes(self) -> Mapping[nn.Module, bool]:
        """Module -> whether it is in training mode in a training step, if that differs from ``train()``."""
        return {part: mode for watch in self._modules for part, mode in (watch.modes or {}).items()}

    def check_exportable(self) -> None:
        """Checks what only an export requires of the model: see ``ModelWatch.check_exportable``."""
        with BORROWED:
            self._model.check_exportable()

    def depends_on_modes(self, modules: Collection[nn.Module]) -> None:
        """Records which modules' modes the graph of the current variant depends on."""
        for watch in self._modules:
            watch.depends_on_modes(modules)
