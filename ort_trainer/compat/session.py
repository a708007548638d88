"""``onnxruntime.TrainingSession`` for old scripts."""

from __future__ import annotations

import ort_trainer

from .options import ORTTrainerOptions

__all__ = ["TrainingSession"]


class TrainingSession(ort_trainer.TrainingSession):
    """:class:`ort_trainer.TrainingSession` for old scripts: a parameter without effect is only a warning."""

    _options = ORTTrainerOptions
