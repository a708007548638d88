"""The contenders' names in benchmarks of training steps, in results/, and in the pictures of these."""

from __future__ import annotations

__all__ = ["COMPILE", "CONTENDERS", "EAGER", "FASTEST", "FLOOR", "LEGACY", "LOOPS", "MODULE", "ONNX", "OURS"]

EAGER, COMPILE, MODULE, LEGACY = "eager", "compile", "ORTModule", "legacy 1.16.3"
# Behind a comma, the kernels.
OURS = "ort_trainer"
LOOPS, FASTEST, ONNX = f"{OURS}, compiled", f"{OURS}, fastest", f"{OURS}, onnxruntime"
FLOOR = "products alone"
CONTENDERS = (EAGER, COMPILE, MODULE, OURS, LOOPS, FASTEST, ONNX, LEGACY, FLOOR)
