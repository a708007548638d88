"""Arithmetic that several writers of models share."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from .emitter import Emitter


def one_minus_power(emit: Emitter, base: float, exponent: ir.Value, wide: bool = False) -> ir.Value:
    """Returns 1 - base ** exponent, the bias correction of a moment.

    In float32 the difference would lose digits for the first counts, and browsers on a GPU have no float64. With
    y = exponent log(base) / 2 it is -2 sinh(y) exp(y), in which nothing cancels.

    Args:
        emit: Adds the nodes.
        base: At least 0 and below 1.
        exponent: A count above 0.
        wide: Whether the result is float64; it is float32 otherwise.
    """
    dtype = np.float64 if wide else np.float32
    count = emit("Cast", exponent, to=ir.DataType.DOUBLE if wide else ir.DataType.FLOAT)
    if wide or base == 0.0:
        return emit("Sub", emit.constant(1.0, dtype), emit("Pow", emit.constant(base, dtype), count))
    half = emit("Mul", count, emit.constant(math.log(base) / 2, dtype))
    return emit("Mul", emit("Mul", emit("Sinh", half), emit("Exp", half)), emit.constant(-2.0, dtype))
