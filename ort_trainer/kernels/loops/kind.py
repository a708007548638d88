"""Compiled loops between calls of PyTorch's kernels. Imports that only exports need are lazy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ...capture.step_module import ExportedStep
from ...core.errors import ExportError
from ...engine.programs.processor import described
from ...graph.kernels import Kernels, Lowered
from ..programs.kind import ProgramKernels

if TYPE_CHECKING:
    from ...graph.flat_graph import FlatGraph
    from ...graph.named_graph import NamedGraph


class LoopKernels(ProgramKernels):
    """PyTorch's kernels, and loops that are compiled ahead of time, on CPUs and CUDA."""

    name = "compiled"
    reads_shapes = False
    checks_indices = False
    _compiled = True

    def objection(self, device: torch.device) -> str:
        """Returns why they can't run on a device; see the base class."""
        return (
            ""
            if device.type in ("cpu", "cuda")
            else f"compiled loops run on CPUs and CUDA, and training runs on {device}"
        )

    def key(self, device: torch.device) -> str:
        """Returns the processor too, whose own instructions the loops use, and the device, which they name."""
        where = f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else described()
        return f"{super().key(device)} {where}"

    def for_evaluation(self) -> Kernels:
        """Returns PyTorch's kernels: to compile a second graph takes longer than most evaluations."""
        return ProgramKernels()

    def check(self, step: ExportedStep, flat: FlatGraph) -> None:
        """Checks that nothing asks for values to be computed again; see the base class."""
        from ...graph.recompute import asks_for_recomputation

        if asks_for_recomputation(step.recompute, flat):
            raise ExportError(
                "compiled loops decide by themselves what the backward pass computes again: set utils.kernels to 'auto'"
            )

    def lower(self, graph: NamedGraph, step: ExportedStep, stage: Callable[[str], None]) -> Lowered:
        """Returns the graph as programs, some of which are loops; see the base class."""
        stage("compile")
        from .build import LoopBuilder  # Inductor takes half a second

        builder = LoopBuilder(graph)
        return {"programs": builder.build()}, builder.operators


class FastestKernels(ProgramKernels):
    """PyTorch's kernels, until compiled loops have shown to be faster in the steps of a training."""

    name = "fastest"
    checks_indices = False
    rival = LoopKernels.name

    def key(self, device: torch.device) -> str:
        """Returns the processor too, as an export may have loops."""
        return f"{super().key(device)} {described()}"
