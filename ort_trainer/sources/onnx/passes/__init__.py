"""What an ONNX model goes through on its way to a training graph: one pass a file, chained in ``build.py``."""

from .autocast import AutocastPass
from .differentiate import DifferentiatePass, serialized
from .evaluation import ToEvaluationPass
from .found import Found
from .infer_shapes import InferShapesPass, SymbolicShapesPass
from .lower import LowerPass
from .measure_shapes import MeasureShapesPass
from .merge_loss import MergeLossPass
from .random_numbers import RandomNumbersPass
from .running_statistics import RunningStatisticsPass
from .scale_loss import ScaleLossPass
from .set_interface import SetInterfacePass

__all__ = [
    "AutocastPass",
    "DifferentiatePass",
    "Found",
    "InferShapesPass",
    "LowerPass",
    "MeasureShapesPass",
    "MergeLossPass",
    "RandomNumbersPass",
    "RunningStatisticsPass",
    "ScaleLossPass",
    "SetInterfacePass",
    "SymbolicShapesPass",
    "ToEvaluationPass",
    "serialized",
]
