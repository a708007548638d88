"""Folds constants, removes what nobody reads and computes what is there twice only once."""

from __future__ import annotations

import onnx_ir as ir
import onnxscript.optimizer

__all__ = ["convert_opset", "simplify"]


def simplify(model: ir.Model) -> None:
    """Simplifies a freshly translated model in place; what it computes stays the same.

    The weights are inputs of the model, so none can be folded into a constant.
    """
    onnxscript.optimizer.optimize_ir(model, num_iterations=1, onnx_shape_inference=False)


def convert_opset(model: ir.Model, opset: int) -> None:
    """Raises the operator set of a model in place."""
    if model.opset_imports[""] < opset:
        import onnxscript.version_converter

        onnxscript.version_converter.convert_version(model, opset, fallback=True)
