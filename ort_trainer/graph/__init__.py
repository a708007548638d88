"""The training graph: pure data, and the passes over it."""

from .index_range import IndexRange
from .training_graph import Dim, RandomInput, TensorSpec, TrainingGraph

__all__ = ["Dim", "IndexRange", "RandomInput", "TensorSpec", "TrainingGraph"]
