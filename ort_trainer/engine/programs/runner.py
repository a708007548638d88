"""Runs a graph whose nodes are programs of PyTorch's operators."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ...step import Step
from ..memory import keep_freed_memory
from ..runner import GraphRunner, Kind, Memory, Plan, with_probabilities
from .compiler import compiled, loaded

__all__ = ["PartialRun", "ProgramRunner", "Stage", "deterministic_kernels"]


class Stage(NamedTuple):
    """A program of a graph, to be run by itself.

    Attributes:
        run: A function of a list of tensors, which it empties.
        inputs: Names of the values that it takes.
        outputs: Names of the values that it returns.
        last: Names of the values that no later stage takes, and that are not outputs of the graph.
    """

    run: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
    inputs: list[str]
    outputs: list[str]
    last: list[str]


class ProgramRunner(GraphRunner):
    """Runs a graph of programs, as one Python function that calls PyTorch's operators in order.

    PyTorch's results can't be written into memory that was bound earlier, so they are new tensors, which are copied to
    the destinations, if there are any.

    Args:
        step: The step.
        state: The tensors for ``step.state``; empty if :meth:`call` receives them with the inputs.
        memory: The memory of all tensors.
        deterministic: Whether to request deterministic kernels from PyTorch.

    Attributes:
        calls: The nodes, in order.
    """

    keeps_destinations = False

    def __init__(self, step: Step, state: Mapping[str, torch.Tensor], memory: Memory, deterministic: bool) -> None:
        super().__init__(step, {name: value.detach() for name, value in state.items()}, memory)
        keep_freed_memory()
        self._deterministic = deterministic
        assert step.programs is not None
        self.calls, self._constants = loaded(step.programs)
        self._functions: dict[tuple[str, ...], Callable[..., tuple[torch.Tensor, ...]]] = {}

    @functools.cached_property
    def run_programs(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The graph as a function of its inputs, which returns all outputs."""
        return self.compiled(self.outputs)

    def compiled(self, outputs: Sequence[str], timed: bool = False) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Returns a function that computes some outputs from all inputs."""
        return compiled(self.calls, self.inputs, outputs, self._constants, timed)

    def plan(self, shapes: Mapping[str, tuple[int, ...]], names: Sequence[str]) -> Plan:
        """Returns a plan whose runs compute only the named ones of the described outputs; see the base class."""
        left_out = {spec.name for spec in self.step.outputs}.difference(names)
        results = tuple(name for name in self.outputs if name not in left_out)
        if results not in self._functions:
            self._functions[results] = self.compiled(results)
        plan = super().plan(shapes, names)
        return dataclasses.replace(plan, results=results, function=self._functions[results])

    @functools.cached_property
    def stages(self) -> list[Stage]:
        """The programs in order, for runs whose first results are used while the rest still runs."""
        stages: list[Stage] = []
        later = set(self.outputs)
        for call in reversed(self.calls):
            wanted = [name for name in call.outputs if name in later]
            inputs = [name for name in dict.fromkeys(call.inputs) if name not in self._constants]
            run = compiled([call], inputs, wanted, self._constants)
            stages.append(Stage(run, inputs, wanted, [name for name in inputs if name not in later]))
            later |= set(inputs)
        return stages[::-1]

    def rebind(self, name: str, tensor: torch.Tensor) -> None:
        """Replaces the tensor of a parameter or buffer."""
        super().rebind(name, tensor.detach())

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
        """Runs the graph once; see the base class. Destinations are not bound: a run writes only those it gets."""
        values = [*self._state.values()]
        for spec in self.step.inputs:
            value = batch[spec.name]  # as_taken() would be a call for each, in each step
            values.append(value.float() if value.dtype is torch.bfloat16 else value)
        if plan.random:
            values += self._draw(with_probabilities(plan.random, self._state), generator)
        if loss_scale is not None:
            values.append(loss_scale)
        with _as_captured(self._deterministic):
            assert plan.function is not None
            outputs = dict(zip(plan.results, plan.function(values), strict=True))
        for name, destination in (destinations or {}).items():
            destination.copy_(outputs[name])
        results = {
            output.name: outputs[output.name] if output.bound is output.dtype else outputs[output.name].to(output.dtype)
            for output in plan.outputs
        }
        return results, {**outputs, **destinations} if destinations else outputs

    def call(
        self,
        values: list[torch.Tensor],
        results: Callable[[], Sequence[Kind]] | None = None,
        run: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Runs the graph on all its inputs, or the program of a stage; see the base class."""
        with _as_captured(self._deterministic):
            return self.run_programs(values) if run is None else run(values)


class PartialRun:
    """A run of a graph of programs that advances only as far as the requested results need.

    Args:
        runner: The runner of the graph.
        values: The values of the runner's inputs.
    """

    def __init__(self, runner: ProgramRunner, values: Sequence[torch.Tensor]) -> None:
        self._runner, self._next = runner, 0
        self._values = dict(zip(runner.inputs, values, strict=True))

    def take(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Returns outputs of the graph, after running the stages that are needed for them; each can be taken once.

        It keeps no reference to outputs that no later stage takes, so that autograd can adopt them as gradients instead
        of copying them.
        """
        stages = self._runner.stages
        while not self._values.keys() >= set(names):
            stage = stages[self._next]
            self._next += 1
            values = [self._values[name] for name in stage.inputs]
            for name in stage.last:
                del self._values[name]
            outputs = self._runner.call(values, run=stage.run)
            self._values.update(zip(stage.outputs, outputs, strict=True))
        later = {name for stage in stages[self._next :] for name in stage.inputs}
        return [self._values[name] if name in later else self._values.pop(name) for name in names]


@contextmanager
def _as_captured(deterministic: bool) -> Iterator[None]:
    """A context without PyTorch's gradients and autocast, as when the graph was captured.

    Args:
        deterministic: Whether to request deterministic kernels.
    """
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    torch.set_grad_enabled(False)
    if autocast:
        torch.set_autocast_enabled("cpu", False)
    try:
        if deterministic and not torch.are_deterministic_algorithms_enabled():
            with deterministic_kernels():
                yield
        else:
            yield
    finally:
        torch.set_grad_enabled(grad)
        if autocast:
            torch.set_autocast_enabled("cpu", True)


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """A context with PyTorch's deterministic kernels; operators that have none only warn."""
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # for debugging; results never depend on such memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = fill
