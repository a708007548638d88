"""Runs a graph whose nodes are programs of PyTorch's operators."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...graph import TrainingGraph
from ..runner import GraphRunner, Plan, sample
from .bridge import DOMAIN, executing, from_torch, prepare, to_torch
from .program import Program

__all__ = ["KernelRunner", "calls_pytorch"]


def calls_pytorch(graph: TrainingGraph) -> bool:
    """Returns whether nodes of a graph are programs of PyTorch's operators."""
    return any(node.domain == DOMAIN for node in graph.model.graph)


class KernelRunner(GraphRunner):
    """An ONNX Runtime session of a graph of programs.

    A value that PyTorch has made can't be written into memory that was bound before. So results come out in memory of their
    own, and destinations get that memory instead of a copy.
    """

    def _prepare(self) -> None:
        nodes = [node for node in self.graph.model.graph if node.domain == DOMAIN]
        texts = {node.attributes["operator"].as_string(): node.attributes["overload_name"].as_string() for node in nodes}
        prepare({key: Program.from_text(text) for key, text in texts.items()})
        self._feeds = {name: from_torch(value) for name, value in self._state.items()}

    def run(
        self,
        plan: Plan,
        batch: Mapping[str, torch.Tensor],
        *,
        destination_key: str = "",
        destinations: Mapping[str, torch.Tensor] | None = None,
        loss_scale: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
        moves: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Runs the graph once; see the base class. ``destinations`` are needed every time."""
        given = dict(batch)
        if self.graph.loss_scale is not None and loss_scale is not None:
            given[self.graph.loss_scale.name] = loss_scale
        given |= zip((spec.name for spec, _ in plan.random), sample(plan.random, self._device, generator), strict=True)
        feeds = {**self._feeds, **{name: from_torch(value) for name, value in given.items()}}
        destinations = destinations or {}
        names = [*destinations, *(output.name for output in plan.outputs)]
        with executing():
            values = self.inference_session._sess.run_with_ort_values(feeds, names, None)
        found = [to_torch(value) for value in values]
        for destination, value in zip(destinations.values(), found, strict=False):
            if moves:
                destination.set_(value)
            else:
                destination.copy_(value)
        results = dict(zip((output.name for output in plan.outputs), found[len(destinations) :], strict=True))
        return {
            output.name: value.view(torch.bool) if output.dtype == torch.bool else value
            for output, value in zip(plan.outputs, results.values(), strict=True)
        }
