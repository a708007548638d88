"""The user's own graph pass: the option ``_internal_use.extra_postprocess``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx
import onnx_ir as ir

from .contract import Step

Postprocess = Callable[[onnx.ModelProto], onnx.ModelProto | None]


class PostprocessPass(ir.passes.FunctionalPass):
    """Replaces a model with the one that the user's function returns or has changed in place.

    Args:
        postprocess: The user's function.

    Raises:
        TypeError: If the function returns anything else.
        ValueError: If the inputs or outputs differ afterwards.
    """

    def __init__(self, postprocess: Postprocess) -> None:
        self._postprocess = postprocess

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Runs the pass."""
        proto = ir.to_proto(model)
        returned = self._postprocess(proto)
        returned = proto if returned is None else returned
        if not isinstance(returned, onnx.ModelProto):
            raise TypeError(
                f"_internal_use.extra_postprocess must return an onnx.ModelProto or None, but returned {returned!r}"
            )
        result = ir.from_proto(returned)
        for kind in ("inputs", "outputs"):
            before = [value.name for value in getattr(model.graph, kind)]
            after = [value.name for value in getattr(result.graph, kind)]
            if before != after:
                raise ValueError(
                    f"_internal_use.extra_postprocess must keep the {kind} of the model, in order: they were {before} "
                    f"and are now {after}"
                )
        return ir.passes.PassResult(result, modified=True)


def postprocessed(graph: Step, postprocess: Postprocess) -> Step:
    """Returns the graph after the user's own pass."""
    return dataclasses.replace(graph, stored=PostprocessPass(postprocess)(graph.model).model)
