"""The contract of a step: its graph and what is known of it, as data, and the passes over ONNX models."""

from .contract import SIZES, Dim, RandomInput, Step, TensorSpec, dtype_name
from .program_graph import ProgramGraph

__all__ = ["SIZES", "Dim", "ProgramGraph", "RandomInput", "Step", "TensorSpec", "dtype_name"]
