"""Runs passes in order."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["run_passes"]


def run_passes(model: ir.Model, *passes: ir.passes.PassBase) -> ir.Model:
    """Runs passes over a model in order and returns the result.

    It raises errors of a pass without onnx_ir's wrapper, because callers check their type.
    """
    try:
        return ir.passes.Sequential(*passes)(model).model
    except ir.passes.PassError as error:
        raise error.__cause__ or error from None
