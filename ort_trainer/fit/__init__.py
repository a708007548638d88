"""A training loop for those who want none of their own: what ``ORTTrainer.fit`` runs, and its callbacks.

It stands on the trainer's public methods alone, so whatever it does can be done in a loop of one's own.
"""

from .callbacks import Callback, Checkpoints, EarlyStopping, ManagedCheckpoints
from .loggers import CSVLogger, TensorBoardLogger
from .loop import fit
from .progress import Progress
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
