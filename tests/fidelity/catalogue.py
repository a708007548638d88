"""All cases, by section of the table."""

from __future__ import annotations

from . import layer_cases, transformer_cases, vision_cases
from .case import Case

__all__ = ["SECTIONS"]

SECTIONS: dict[str, list[Case]] = {
    "Transformers": transformer_cases.CASES,
    "Convolutional networks": vision_cases.CASES,
    "Recurrent networks": layer_cases.RECURRENT,
    "Losses": layer_cases.LOSSES,
    "Activations and norms": layer_cases.ACTIVATIONS,
    "What a forward pass may do": layer_cases.FUNCTIONS,
}
