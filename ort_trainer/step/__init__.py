"""The training graph: pure data, and the passes over it."""

from .training_graph import Dim, RandomInput, TensorSpec, TrainingGraph

__all__ = ["Dim", "RandomInput", "TensorSpec", "TrainingGraph"]
