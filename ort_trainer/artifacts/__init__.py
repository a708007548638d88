"""Writes artifacts for ``ort_trainer.api``: training, evaluation and optimizer models, and a checkpoint."""

from typing import TYPE_CHECKING

from ..core.lazy import lazily

if TYPE_CHECKING:
    from .convert import convert_artifacts, convert_checkpoint, trainer_state_dict
    from .generate import generate_artifacts
    from .kinds import LossType, OptimType

__all__ = [
    "LossType",
    "OptimType",
    "convert_artifacts",
    "convert_checkpoint",
    "generate_artifacts",
    "trainer_state_dict",
]

# Lazy, because converting checkpoints must not require torch.
_PLACES = {
    "LossType": "kinds",
    "OptimType": "kinds",
    "convert_artifacts": "convert",
    "convert_checkpoint": "convert",
    "generate_artifacts": "generate",
    "trainer_state_dict": "convert",
}
__getattr__, __dir__ = lazily(__name__, _PLACES)
