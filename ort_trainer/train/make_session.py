"""Makes the session, which owns or shares a model's tensors, from the options."""

from __future__ import annotations

import torch

from ..engine import StepSession
from ..export import BORROWED, ModelSource
from ..optim import OptimizerConfig
from ..options import ORTTrainerOptions
from .strategy import Strategy

__all__ = ["make_session"]


def make_session(
    source: ModelSource,
    config: OptimizerConfig,
    options: ORTTrainerOptions,
    device: torch.device,
    seed: int,
    strategy: Strategy,
) -> StepSession:
    """Returns a session for a model.

    Args:
        source: The model.
        config: The optimizer.
        options: All settings.
        device: Where training runs.
        seed: Seed of training's random numbers.
        strategy: How several processes work together.
    """
    with BORROWED:  # an export temporarily puts other tensors into the model
        parameters, buffers = source.parameters, source.buffers
        tensors = source.adopt(device)
    trainable = source.names_of_trainable()
    memory, parts = strategy.lay_out({name: tensors[name] for name in trainable})
    return StepSession(
        {name: tensors[name] for name in parameters},
        {name: tensors[name] for name in buffers},
        trainable,
        config,
        clip=options.utils.grad_norm_clip,
        max_norm=options.utils.max_grad_norm,
        max_value=options.utils.max_grad_value,
        device=device,
        given_options=options.session_options,
        deterministic=options.debug.deterministic_compute,
        provider_options=options.provider_options,
        mem_limit=options.memory_limit(device),
        seed=None if options.utils.random_numbers == "pytorch_global" else seed,
        gradient_memory=memory,
        parts=parts,
    )
