"""Runs passes one after the other."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["run_passes"]


def run_passes(model: ir.Model, *passes: ir.passes.PassBase) -> ir.Model:
    """Returns what passes make of a model, one after the other.

    An error of a pass comes out as it is, without onnx_ir's own around it: callers look at its kind.
    """
    try:
        return ir.passes.Sequential(*passes)(model).model
    except ir.passes.PassError as error:
        raise error.__cause__ or error from None
