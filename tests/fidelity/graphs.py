"""Keeps exported graphs in a folder, so that a second environment runs the very graphs that the first one exported."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import torch

from ort_trainer.graph import TrainingGraph
from ort_trainer.sources.torch import GraphBuilder


@contextlib.contextmanager
def kept_graphs(case: str) -> Iterator[None]:
    """Exports the graphs of a case only once, where ``ORT_TRAINER_TEST_GRAPHS`` names a folder."""
    folder = os.environ.get("ORT_TRAINER_TEST_GRAPHS")
    if not folder:
        yield
        return
    build = GraphBuilder.build

    def kept(self: GraphBuilder, batch: Mapping[str, torch.Tensor], training: bool) -> TrainingGraph:
        shapes = {name: tuple(value.shape) for name, value in batch.items()}
        # Training graphs for PyTorch's kernels are of no use to an engine without them.
        kernels = self.step.kernels if training else ""
        key = repr((case, self.step.autocast, training, kernels, shapes, torch.__version__))
        path = Path(folder) / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.onnx"
        if path.exists():
            return TrainingGraph.from_bytes(path.read_bytes())
        graph = build(self, batch, training)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(graph.to_bytes())
        return graph

    with mock.patch.object(GraphBuilder, "build", kept):
        yield
