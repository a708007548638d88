"""What a training run keeps beside the state of its trainer: its checkpoints, and where it stands in its data."""

from .manager import CheckpointManager
from .position import Position
from .saved import SavedCheckpoint
from .stop import StopSignals

__all__ = ["CheckpointManager", "Position", "SavedCheckpoint", "StopSignals"]
