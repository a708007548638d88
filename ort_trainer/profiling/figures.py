"""Computes the figures of a profile from the measured steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..step import Step
from ..step.origins import Origins, parent_of
from .profile import ModuleTime, OperatorTime, Profile
from .timing import Operation, TimedRun


@dataclass
class MeasuredStep:
    """One training step. Times are nanoseconds of ``time.perf_counter_ns``.

    Attributes:
        start: When the step started.
        end: When it ended.
        runs: Its graph runs.
        updates: Start and end of its weight updates.
        set_up: Start and end of one-time work in it.
    """

    start: int
    end: int = 0
    runs: list[TimedRun] = field(default_factory=list)
    updates: list[tuple[int, int]] = field(default_factory=list)
    set_up: list[tuple[int, int]] = field(default_factory=list)

    @property
    def duration(self) -> int:
        """Duration of the step without one-time work."""
        return self.end - self.start - sum(end - start for start, end in self.set_up)

    @property
    def is_complete(self) -> bool:
        """Whether the operators of all runs are known."""
        return all(run.is_complete for run in self.runs)


FUSED = "(fused)"

# Prefixes of operators that consist mostly of matrix products; PyTorch's, then ONNX's.
_PRODUCTS = (
    *("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.addbmm", "aten.mv", "aten.addmv", "aten.dot"),
    *("aten.linear", "aten.convolution", "aten.mkldnn_", "aten._scaled_dot_product", "aten._convolution"),
    *("aten.addr", "aten._grouped_mm", "ort_trainer.grouped_mm", "ort_trainer.linear", "mkldnn."),
    *("MatMul", "Gemm", "Conv", "FusedMatMul", "FusedGemm", "FusedConv", "NhwcFusedConv", "TransposeMatMul", "Einsum"),
    *("LSTM", "GRU", "RNN", "Attention", "MultiHeadAttention"),
)


def is_product(operator: str) -> bool:
    """Returns whether an operator, by its name in a profile, consists mostly of matrix products."""
    return operator.startswith(_PRODUCTS)


class GraphOrigins:
    """The origins of several graphs, each parsed once."""

    def __init__(self) -> None:
        self._origins: dict[int, Origins] = {}

    def of(self, graph: Step) -> Origins:
        """Returns the origins of a graph."""
        if id(graph) not in self._origins:
            self._origins[id(graph)] = Origins.from_text(graph.origins)
        return self._origins[id(graph)]


def fill(profile: Profile, steps: Sequence[MeasuredStep], origins: GraphOrigins, remarks: Sequence[str]) -> None:
    """Writes the figures of steps whose runs have been collected into a profile.

    Args:
        profile: The profile.
        steps: The steps, at least one.
        origins: Origins of their graphs.
        remarks: Remarks for the report.
    """
    remarks = list(remarks)
    complete = [step for step in steps if step.is_complete]
    if len(complete) < len(steps):
        remarks.append(
            f"the figures cover only {len(complete)} of the {len(steps)} steps: ONNX Runtime's profiler records at "
            "most a million events"
        )
    sums = _Sums(complete or steps, origins)
    profile.seconds = tuple(step.duration / 1e9 for step in steps)
    profile.milliseconds = sums.mean(sums.total)
    waits = [after.start - before.end for before, after in itertools.pairwise(steps)]
    profile.waiting = sum(waits) / max(len(waits), 1) / 1e6
    profile.operators, profile.modules = sums.operator_times(), sums.module_times()
    profile.products = sums.mean(sum(spent for name, spent in sums.operators.items() if is_product(name)))
    profile.optimizer = sums.mean(sums.updates)
    # If a session runs several nodes in parallel, operators may take more time in total than the step.
    profile.overhead = sums.mean(max(sums.total - sums.updates - sum(sums.operators.values()), 0))
    profile.kernels = " and ".join(dict.fromkeys(run.graph.kernels for step in steps for run in step.runs))
    profile.remarks, profile.done = tuple(remarks), True


class _Sums:
    """Sums over all steps, in nanoseconds."""

    def __init__(self, steps: Sequence[MeasuredStep], origins: GraphOrigins) -> None:
        self._steps = len(steps)
        self.total = sum(step.duration for step in steps)
        self.updates = sum(end - start for step in steps for start, end in step.updates)
        self.operators: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._modules: dict[str, list[int]] = {}
        self._kinds: dict[str, str] = {}
        for step in steps:
            for run in step.runs:
                graph_origins = origins.of(run.graph)
                self._kinds.update(graph_origins.modules)
                for operation in run.operations:
                    self._add(operation, graph_origins)

    def mean(self, nanoseconds: float) -> float:
        """Returns the milliseconds per step of a sum over all steps."""
        return nanoseconds / 1e6 / self._steps

    def operator_times(self) -> tuple[OperatorTime, ...]:
        """Returns the operators, slowest first."""
        names = sorted(self.operators, key=lambda name: -self.operators[name])
        return tuple(
            OperatorTime(
                name,
                self._calls.get(name, 0) / self._steps,
                self.mean(self.operators[name]),
                self.operators[name] / self.total,
            )
            for name in names
        )

    def module_times(self) -> tuple[ModuleTime, ...]:
        """Returns the modules in the order of the model, followed by everything outside of them."""
        order = [path for path in self._kinds if path in self._modules]
        order += [path for path in self._modules if path not in self._kinds]
        times = []
        for path in order:
            forward, backward = self._modules[path]
            share = (forward + backward) / self.total
            times.append(ModuleTime(path, self._kinds.get(path, ""), self.mean(forward), self.mean(backward), share))
        return tuple(times)

    def _add(self, operation: Operation, origins: Origins) -> None:
        """Adds an operation to the sums of its operator, of its module, and of all modules around that."""
        name, spent = operation.name, operation.duration
        self.operators[name] = self.operators.get(name, 0) + spent
        self._calls[name] = self._calls.get(name, 0) + (not operation.is_part)
        if not operation.node or not origins.modules:
            return
        place = origins.place(operation.node, operation.step)
        path: str | None = FUSED if place is None else place.module
        backward = place is not None and place.backward
        while path is not None:
            self._modules.setdefault(path, [0, 0])[backward] += spent
            path = None if path == FUSED else parent_of(path)
