"""A ready-made training loop: ``ORTTrainer.fit`` and its callbacks.

It uses only the trainer's public methods, so a loop of your own can do the same.
"""

from .callbacks import Callback, Checkpoints, EarlyStopping, ManagedCheckpoints
from .loggers import CSVLogger, Progress, TensorBoardLogger
from .loop import fit
from .state import FitState

__all__ = [
    "CSVLogger",
    "Callback",
    "Checkpoints",
    "EarlyStopping",
    "FitState",
    "ManagedCheckpoints",
    "Progress",
    "TensorBoardLogger",
    "fit",
]
