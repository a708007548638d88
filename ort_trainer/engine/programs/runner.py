"""Runs a graph whose nodes are programs of PyTorch's operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...step import Step
from ..memory import keep_freed_memory
from ..runner import GraphRunner, Plan
from .bridge import execute, from_torch, prepare
from .program import Program

__all__ = ["KernelRunner", "calls_pytorch"]


def calls_pytorch(graph: Step) -> bool:
    """Returns whether nodes of a graph are programs of PyTorch's operators."""
    return bool(graph.programs)


class KernelRunner(GraphRunner):
    """An ONNX Runtime session of a graph of programs.

    PyTorch's results can't be written into memory that was bound earlier, so they are new tensors, which are copied to
    the destinations, if there are any.
    """

    keeps_destinations = False

    def _prepare(self) -> None:
        keep_freed_memory()
        prepare({key: Program.from_text(text) for key, text in self.graph.programs.items()})
        self._feeds = {name: from_torch(value.detach()) for name, value in self._state.items()}
        names = [output.name for output in self.graph.outputs]  # a part of a graph may have no loss
        self._wanted = self.graph.loss if self.graph.loss in names else names[0]
        self._scale: torch.Tensor | None = None
        self._scale_feed: Any = None

    def rebind(self, name: str, tensor: torch.Tensor) -> None:
        """Replaces the tensor of a parameter or buffer."""
        super().rebind(name, tensor)
        self._feeds[self.graph.state[name]] = from_torch(tensor.detach())

    def run(
        self,
        plan: Plan,
        batch: Mapping[str, torch.Tensor],
        *,
        destination_key: Any = "",
        destinations: Mapping[str, torch.Tensor] | None = None,
        loss_scale: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
        options: Any = None,
    ) -> tuple[dict[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        """Runs the graph once; see the base class. Unlike there, ``destinations`` are needed in every run, or never."""
        feeds = dict(self._feeds)
        for name, value in batch.items():
            feeds[name] = from_torch(value.float() if value.dtype is torch.bfloat16 else value)
        if self.graph.loss_scale is not None and loss_scale is not None:
            if loss_scale is not self._scale:
                self._scale, self._scale_feed = loss_scale, from_torch(loss_scale)
            feeds[self.graph.loss_scale.name] = self._scale_feed
        if plan.random:
            for (spec, _), value in zip(plan.random, self._draw(plan, generator), strict=True):
                feeds[spec.name] = from_torch(value)
        found = self._execute(feeds)
        for name, destination in (destinations or {}).items():
            destination.copy_(found[name])
        results = {}
        for output in plan.outputs:
            value = found[output.name]
            if output.dtype is torch.bool:
                value = value.view(torch.bool)
            elif output.bound is not output.dtype:
                value = value.to(output.dtype)
            results[output.name] = value
        return results, {**found, **destinations} if destinations else found

    def _execute(self, feeds: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        # The C++ session below ONNX Runtime's Python class, whose methods wrap every result.
        return execute(self.inference_session._sess, feeds, self._wanted)
