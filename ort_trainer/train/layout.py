"""The tensors of a trainer's state and their names in a state dict."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..export import ModelSource
from ..optim import OptimizerConfig
from ..optim.rule import Rule
from ..optim.torch_optimizer import TorchOptimizerConfig

__all__ = ["TRAINER_OPTIONS", "Layout"]

TRAINER_OPTIONS = (
    "mixed_precision",
    "zero_stage",
    "world_rank",
    "world_size",
    "optimizer_name",
    "data_parallel_size",
    "horizontal_parallel_size",
    "gradient_accumulation_steps",
)


@dataclass(frozen=True)
class Layout:
    """The contents of a trainer's state; known from the model and optimizer, before any export.

    Attributes:
        tensors: Name -> parameter or persistent buffer, tied names included, in the order of ``model.state_dict()``.
        non_persistent: Name -> buffer that ``model.state_dict()`` leaves out.
        canonical: Name -> the first name of the same tensor.
        trainable: Canonical names of the parameters that are trained.
        rule: The optimizer's.
        slots: Canonical name -> the state tensors that the optimizer keeps, such as ``Moment_1``.
        counted: Canonical names of the parameters whose updates are counted.
        device: Where training runs.
        torch_config: The config of the PyTorch optimizer that does the updates; None for our own rules.
    """

    tensors: Mapping[str, torch.Tensor]
    non_persistent: Mapping[str, torch.Tensor]
    canonical: Mapping[str, str]
    trainable: Sequence[str]
    rule: Rule
    slots: Mapping[str, Sequence[str]]
    counted: Collection[str]
    device: torch.device
    torch_config: TorchOptimizerConfig | None = None

    @classmethod
    def of(cls, source: ModelSource, config: OptimizerConfig, device: torch.device) -> Layout:
        """Returns the layout for a model and an optimizer."""
        rule = config.rule
        aliases = source.names_of_trainable()
        hyper = {name: config.hyper_parameters(config.group_of(*names)) for name, names in aliases.items()}
        return cls(
            tensors=source.saved,
            non_persistent=source.non_persistent,
            canonical=source.canonical,
            trainable=source.trainable,
            rule=rule,
            slots={name: rule.slots_for(values) for name, values in hyper.items()},
            counted={name for name, values in hyper.items() if rule.keeps_count(values)},
            device=device,
            torch_config=config if isinstance(config, TorchOptimizerConfig) else None,
        )
