"""Runs calls of the model, each on a graph with the branches that its batch takes in the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..core.errors import ValueBranchError, VerificationError
from ..core.indices import check_indices
from ..core.pages import page
from ..engine import Executor, Plan, Request
from ..step import Step
from .batch import Batch
from .step_graphs import StepGraphs
from .transaction import Transaction
from .verify import StepVerifier

# Graphs for batches of the same sizes that take different branches of the model.
_MAXIMUM_BRANCHES = 8
_SHOWN_CONDITIONS = 5  # in an error

Result = TypeVar("Result")


@dataclass(eq=False)
class Call:
    """A batch, bound to the plan that runs it.

    Attributes:
        executor: Runs the plan.
        request: What it is to compute.
        plan: The plan; after a run, the one that ran.
        left: What the last run left for places outside tensors.
    """

    executor: Executor
    request: Request
    plan: Plan
    left: Sequence[torch.Tensor] = ()


class Calls:
    """Runs calls.

    Args:
        graphs: The trainer's graphs.
        device: Where they run.
        checks_indices: Whether indices are checked before a run: the option ``debug.check_indices``.
        verifier: Compares steps with PyTorch; None for none.

    Attributes:
        checks_indices: As given.
    """

    def __init__(
        self, graphs: StepGraphs, device: torch.device, checks_indices: bool, verifier: StepVerifier | None
    ) -> None:
        self._graphs, self._on_host, self._verifier = graphs, device.type == "cpu", verifier
        self.checks_indices = checks_indices

    def check_indices(self, call: Call) -> None:
        """Raises an IndexError if a value of the batch that the plan uses as an index is out of range."""
        batch: Batch = call.request.batch
        indices = call.plan.indices
        if not self._on_host:  # to read values there would wait for the device, whose kernels check them
            indices = tuple(entry for entry in indices if entry[0].input in batch.on_host)
        check_indices(indices, batch.array, call.plan.sizes, batch.extremes)

    def run(self, call: Call, work: Callable[[Plan], Result], transaction: Transaction | None = None) -> Result:
        """Runs the plan of a call, or one for the same batch whose graph has the branches that the batch takes.

        Args:
            call: The call, whose plan becomes the one that ran.
            work: Runs a plan; a :class:`ValueBranchError` of it has changed nothing.
            transaction: Has begun for the plan; None if there is none.

        Returns:
            What ``work`` returned.

        Raises:
            ValueBranchError: If there are too many such graphs, or the branches differ from those of PyTorch's run.
            IndexError: If ONNX Runtime fails at an index out of range, which was not checked before.
            Exception: What the model raises for this batch.
        """
        refused: list[Step] = []
        is_new = False
        while True:
            try:
                return work(call.plan)
            except ValueBranchError as error:
                refused.append(call.plan.runner.whole)
                if is_new and error.__cause__ is not None:  # PyTorch takes the branches of this graph
                    raise error.__cause__ from None
                if is_new or len(refused) == _MAXIMUM_BRANCHES:
                    raise ValueBranchError(f"{error}\n{_why_no_other_graph(refused, is_new)}") from None
            except VerificationError as error:
                if self._verifier is None or not self._verifier.renews(error):
                    raise
            except RuntimeError as error:
                if not (call.plan.runner.names_indices or self.checks_indices):
                    # ONNX Runtime names neither the input nor, for some operators, the value.
                    try:
                        self.check_indices(call)
                    except IndexError as found:
                        advice = "with debug.check_indices True, such a value is found before the run"
                        raise IndexError(f"{found}. Nothing has changed; {advice}") from error
                raise
            if transaction is not None:
                transaction.undo()
            graphs = call.executor.graphs(call.request.training)
            call.plan = self._graphs.plan(call.executor, call.request._replace(refused=refused))
            is_new = len(call.executor.graphs(call.request.training)) > len(graphs)
            if transaction is not None:
                transaction.begin(call.executor, call.plan.runner.step)


def _why_no_other_graph(refused: Sequence[Step], is_new: bool) -> str:
    """Returns why a batch gets no graph with its branches, and what to do.

    Args:
        refused: The graphs whose branches it does not take.
        is_new: Whether the last one was exported for this batch.
    """
    if is_new:
        return (
            "The graph was exported for this batch, for which PyTorch takes that branch, so the condition depends on "
            "random numbers, such as those of dropout, or on rounding: compute both branches, and choose with "
            "torch.where"
        )
    lines = dict.fromkeys(line for step in refused for _, line in step.assumptions.values())
    shown = "\n  ".join(list(lines)[:_SHOWN_CONDITIONS])
    more = f"\n  and {len(lines) - _SHOWN_CONDITIONS} more" if len(lines) > _SHOWN_CONDITIONS else ""
    return (
        f"There are {len(refused)} graphs already for batches of these sizes, at most one for each of "
        f"{_MAXIMUM_BRANCHES} combinations of branches. These conditions differ from batch to batch, or may:\n"
        f"  {shown}{more}\n"
        "Compute both branches and choose with torch.where; as a size, take x.item() instead of int(x); decide before "
        "the step, and pass the result as an input; or train with ORTModule, which runs such batches in PyTorch "
        f"({page('models.md#branches-on-values')})"
    )
