"""Checkpoint management, the position in the data, and stop signals of a training run."""

from .manager import CheckpointManager, SavedCheckpoint
from .position import Position
from .stop import StopSignals

__all__ = ["CheckpointManager", "Position", "SavedCheckpoint", "StopSignals"]
