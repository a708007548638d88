"""Checkpoint management, the position in the data, and stop signals of a training run."""

from .manager import CheckpointManager
from .position import Position
from .saved import SavedCheckpoint
from .stop import StopSignals

__all__ = ["CheckpointManager", "Position", "SavedCheckpoint", "StopSignals"]
