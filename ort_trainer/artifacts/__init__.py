"""Writes what ``ort_trainer.api`` trains from: models of step, evaluation and update, and a checkpoint."""

from .convert import convert_checkpoint, trainer_state_dict
from .generate import generate_artifacts
from .kinds import LossType, OptimType

__all__ = ["LossType", "OptimType", "convert_checkpoint", "generate_artifacts", "trainer_state_dict"]
