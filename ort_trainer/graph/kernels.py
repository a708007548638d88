"""``Kernels``: the seam between the exporter and what computes a graph.

Each kind is a folder of ``kernels/``; ``kernels/kinds.py`` lists them. No other code compares kinds: what differs
between them is a member here.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..capture.step_module import ExportedStep
from ..fx.operator_table import Operator

if TYPE_CHECKING:  # these take a second to import, and only an export needs them
    from .flat_graph import FlatGraph
    from .named_graph import NamedGraph

Node = torch.fx.Node
Lowered = tuple[Mapping[str, Any], Mapping[str, Sequence[Node | None]]]
"""The fields of a step that hold a graph; and for each node of it, the operators that it computes, None for many."""


class Kernels(ABC):
    """A kind of kernels.

    Attributes:
        name: Its name in the option ``utils.kernels``.
        title: Whose kernels they are, for logs.
        of_pytorch: Whether they are PyTorch's own operators, which stay whole and run in the order of the graph;
            others get a graph that is decomposed, and may run it in any order.
        reads_shapes: Whether an operator can take a size from the shape of a tensor that it does not read otherwise.
        checks_indices: Whether an index that is out of range is an error, instead of the end of the process.
        rival: Name of the kind that is compiled while these train, and replaces them where it is faster; or "".
    """

    name: ClassVar[str]
    title: ClassVar[str]
    of_pytorch: ClassVar[bool]
    reads_shapes: ClassVar[bool] = False
    checks_indices: ClassVar[bool] = True
    rival: ClassVar[str] = ""

    def objection(self, device: torch.device) -> str:
        """Returns why they can't run on a device; "" if they can."""
        return ""

    def key(self, device: torch.device) -> str:
        """Returns what a graph for them on a device depends on, besides the program: settings and the processor."""
        return ""

    def for_evaluation(self) -> Kernels:
        """Returns the kind that evaluates where this one trains."""
        return self

    def check(self, step: ExportedStep, flat: FlatGraph) -> None:  # noqa: B027 - most need nothing
        """Checks a differentiated step.

        Raises:
            ExportError: If it asks for something that these kernels don't do.
        """

    def decompositions(self) -> AbstractContextManager[Mapping[Operator, Any]]:
        """Returns the context of differentiation, with the operators that are decomposed."""
        return contextlib.nullcontext({})

    def rewrite_forward(self, graph: torch.fx.Graph) -> None:  # noqa: B027 - most need nothing
        """Speeds up a graph before it is differentiated, in place."""

    def rewrite_call(self, flat: FlatGraph) -> None:
        """Prepares the joint graph of a call before it is divided into passes, in place."""
        flat.read_sizes_from_batch()

    def rewrite_step(self, flat: FlatGraph, graph: NamedGraph, mask: Node | None) -> None:  # noqa: B027 - most need nothing
        """Prepares the graph of a step, in place.

        Args:
            flat: The differentiated step.
            graph: The same graph with names.
            mask: The input that says which places are padded, to leave them out; or None.

        Raises:
            ExportError: If these kernels can't compute the graph.
        """

    @abstractmethod
    def lower(self, graph: NamedGraph, step: ExportedStep, stage: Callable[[str], None]) -> Lowered:
        """Returns a graph in the form that the engine runs.

        Args:
            graph: The graph; it is consumed.
            step: What is exported, for its options.
            stage: Called with the name of each stage when it begins.

        Raises:
            ExportError: If these kernels can't compute an operator of the graph.
        """
