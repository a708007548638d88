"""What must be equal in all processes that train one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loop import TrainingLoop

__all__ = ["traits_of"]

# Sections and keys of the options that may differ from process to process.
_OWN = ("device", "debug", "session_options", "provider_options")


def traits_of(loop: TrainingLoop) -> dict[str, Any]:
    """Returns them by what messages call them, as JSON values."""
    source, config = loop.source, loop.config
    tensors = {**source.parameters, **source.buffers}
    aliases = source.names_of_trainable()
    return {
        "parameters and buffers": {
            name: [list(value.shape), str(value.dtype).removeprefix("torch.")] for name, value in tensors.items()
        },
        "trained parameters": list(aliases),
        "optimizer": config.name,
        "hyper-parameters": {
            name: {key: repr(value) for key, value in config.hyper_parameters(config.group_of(*names)).items()}
            for name, names in aliases.items()
        },
    }
