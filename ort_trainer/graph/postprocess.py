"""The user's own pass over a graph: the option ``_internal_use.extra_postprocess``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx
import onnx_ir as ir

from .training_graph import TrainingGraph

__all__ = ["postprocessed"]


def postprocessed(
    graph: TrainingGraph, postprocess: Callable[[onnx.ModelProto], onnx.ModelProto | None]
) -> TrainingGraph:
    """Returns the graph with the model that the user's function returns, or that it changed.

    Raises:
        TypeError: If it returns something else.
        ValueError: If inputs or outputs are not what they were.
    """
    proto = ir.to_proto(graph.model)
    result = postprocess(proto)
    result = proto if result is None else result
    if not isinstance(result, onnx.ModelProto):
        raise TypeError(
            f"_internal_use.extra_postprocess must return an onnx.ModelProto or None, but returned {result!r}"
        )
    model = ir.from_proto(result)
    for kind in ("inputs", "outputs"):
        before = [value.name for value in getattr(graph.model.graph, kind)]
        after = [value.name for value in getattr(model.graph, kind)]
        if before != after:
            raise ValueError(
                f"_internal_use.extra_postprocess must keep the {kind} of the model, in order; they were {before} and "
                f"are {after}"
            )
    return dataclasses.replace(graph, model=model)
