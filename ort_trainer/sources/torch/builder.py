"""``GraphBuilder``: exports a model as often as its shapes ask for it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx
import torch

from ...graph import TrainingGraph
from ...graph.postprocess import postprocessed
from .borrow import borrowed
from .isolation import can_isolate, run_in_child
from .step_module import ExportedStep, StepModule

__all__ = ["GraphBuilder"]

_STANDARD = ("", "ai.onnx")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphBuilder:
    """Builds training and evaluation graphs of one step.

    Attributes:
        step: What to export.
        postprocess: The user's own pass over the ONNX model, or None.
        contrib_ops: Whether that may add operators that are not standard ONNX.
    """

    step: ExportedStep
    postprocess: Callable[[onnx.ModelProto], onnx.ModelProto | None] | None = None
    contrib_ops: bool = True

    def build(self, batch: Mapping[str, torch.Tensor], training: bool) -> TrainingGraph:
        """Exports the step for a batch's dtypes; symbolic dimensions stay free where the model lets them.

        Where it can be, the export runs in a child process: the exporter takes more memory than many a model, and a
        process gives all of it back.

        Args:
            batch: A sample of every input.
            training: Whether to build the joint forward and backward graph, or the one for evaluation.

        Raises:
            ExportError: If the model can't be exported or its outputs are not as described.
        """
        start = time.perf_counter()
        answer = run_in_child(lambda: _encode(*self._export(batch, training))) if can_isolate() else None
        graph, reasons = self._export(batch, training) if answer is None else _decode(answer)
        kind = "training" if training else "evaluation"
        seconds = time.perf_counter() - start
        _log.info("exported the %s graph in %.1f s: %d nodes", kind, seconds, len(graph.model.graph))
        for symbol, size in graph.fixed.items():
            where = reasons.get(symbol, "")
            _log.warning("the model fixes dimension %r at %d (%s): each other size is exported", symbol, size, where)
        if self.postprocess is not None:
            graph = postprocessed(graph, self.postprocess)
        if not self.contrib_ops:
            _refuse_contrib_ops(graph)
        return graph

    def _export(self, batch: Mapping[str, torch.Tensor], training: bool) -> tuple[TrainingGraph, dict[str, str]]:
        from .export import export  # the exporter's own imports take seconds and 100 MB

        return export(self.step, batch, training)

    def reference(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Returns what PyTorch itself computes in evaluation mode, with the model's own weights."""
        module = StepModule(self.step)
        sample = [batch[entry.name] for entry in self.step.description.inputs]
        with borrowed(module, (), training=False), torch.no_grad(), self.step.autocast_for(sample):
            return tuple(module(*(value.clone() for value in sample)))


def _refuse_contrib_ops(graph: TrainingGraph) -> None:
    """The option ``_internal_use.enable_onnx_contrib_ops`` False."""
    found = {f"{node.domain}::{node.op_type}" for node in graph.model.graph.all_nodes() if node.domain not in _STANDARD}
    if found:
        raise ValueError(
            f"_internal_use.enable_onnx_contrib_ops is False, but the graph has {sorted(found)}, which is not standard "
            "ONNX: leave them out of _internal_use.extra_postprocess, or set it to True"
        )


def _encode(graph: TrainingGraph, reasons: Mapping[str, str]) -> bytes:
    text = json.dumps(reasons).encode()
    return len(text).to_bytes(8, "little") + text + graph.to_bytes()


def _decode(data: bytes) -> tuple[TrainingGraph, dict[str, str]]:
    end = 8 + int.from_bytes(data[:8], "little")
    return TrainingGraph.from_bytes(data[end:]), json.loads(data[8:end])
