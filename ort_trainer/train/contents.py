"""What the state of a training loop consists of."""

from __future__ import annotations

import torch

from ..engine.ownership import owned_dtype
from ..export.model import ModelSource
from ..optim import OptimizerConfig
from ..optim.torch_optimizer import TorchOptimizerConfig
from ..state.state_dict import Contents


def contents_of(source: ModelSource, config: OptimizerConfig, device: torch.device, window_size: int) -> Contents:
    """Returns the contents of the state for a model, an optimizer and a size of the accumulation window."""
    rule, aliases = config.rule, source.names_of_trainable()
    hyper = {name: config.hyper_parameters(config.group_of(*names)) for name, names in aliases.items()}
    return Contents(
        tensors=source.saved,
        non_persistent=source.non_persistent,
        canonical=source.canonical,
        trainable=source.trainable,
        frozen={*source.parameters} - {*source.trainable},
        optimizer=rule.name,
        shares_count=rule.shares_count,
        slots={name: rule.slots_for(values) for name, values in hyper.items()},
        counted={name for name, values in hyper.items() if rule.keeps_count(values)},
        device=device,
        owned_dtype=owned_dtype,
        window_size=window_size,
        torch_optimizer=type(config.optimizer).__name__ if isinstance(config, TorchOptimizerConfig) else None,
    )
