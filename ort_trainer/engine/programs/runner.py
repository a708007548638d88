"""Runs a graph whose nodes are programs of PyTorch's operators."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from ...step import Step
from ..devices import as_default_generator
from ..memory import keep_freed_memory
from ..runner import GraphRunner, Kind, Plan, Stage, Wanted, with_probabilities
from ..torch_memory import TorchMemory, as_taken
from .compiler import compiled, loaded
from .cuda_graphs import CapturedRun, Captures

_dtype = attrgetter("dtype")
Results = tuple[torch.Tensor, ...]


class ProgramRunner(GraphRunner):
    """Runs a graph of programs, as one Python function that calls PyTorch's operators in order.

    PyTorch's results can't be written into memory that was bound earlier, so they are new tensors, which are copied to
    the destinations, if there are any.

    Args:
        step: The step.
        state: The tensors for ``step.state``; empty if :meth:`call` receives them with the inputs.
        memory: The memory of all tensors.
        deterministic: Whether to request deterministic kernels from PyTorch.
        cuda_graphs: Whether :meth:`run` becomes a CUDA graph: ``auto``, ``on`` or ``off``.

    Attributes:
        calls: The nodes, in order.
    """

    keeps_destinations = False
    names_indices = True

    def __init__(
        self,
        step: Step,
        state: Mapping[str, torch.Tensor],
        memory: TorchMemory,
        deterministic: bool,
        cuda_graphs: str = "off",
    ) -> None:
        super().__init__(step, {name: value.detach() for name, value in state.items()}, memory)
        keep_freed_memory()
        self._deterministic, self._device = deterministic, memory.device
        self._taken = [spec.name for spec in step.inputs]
        assert step.programs is not None
        self.calls, self._constants = loaded(step.programs, memory.device)
        self._captures = (
            Captures(cuda_graphs, self._device) if self._device.type == "cuda" and cuda_graphs != "off" else None
        )
        self._functions: dict[tuple[str, ...], Callable[..., Results]] = {}

    @functools.cached_property
    def run_programs(self) -> Callable[..., Results]:
        """The graph as a function of its inputs, which returns all outputs."""
        return self.compiled(self.outputs)

    def compiled(self, outputs: Sequence[str], timed: bool = False) -> Callable[..., Results]:
        """Returns a function that computes some outputs from all inputs."""
        return compiled(self.calls, self.inputs, outputs, self._constants, timed, self._device)

    def plan(self, shapes: Mapping[str, tuple[int, ...]], names: Sequence[str]) -> Plan:
        """Returns a plan whose runs compute only the named ones of the described outputs; see the base class."""
        left_out = {spec.name for spec in self.step.outputs}.difference(names)
        results = tuple(name for name in self.outputs if name not in left_out)
        if results not in self._functions:
            self._functions[results] = self.compiled(results)
        plan = super().plan(shapes, names)
        return dataclasses.replace(plan, results=results, function=self._functions[results])

    @functools.cached_property
    def stages(self) -> Sequence[Stage]:  # type: ignore[override] # read-only there, too
        """The programs; see the base class."""
        stages: list[Stage] = []
        later = set(self.outputs)
        for call in reversed(self.calls):
            wanted = [name for name in call.outputs if name in later]
            inputs = [name for name in dict.fromkeys(call.inputs) if name not in self._constants]
            run = functools.partial(
                self._as_captured, compiled([call], inputs, wanted, self._constants, device=self._device)
            )
            stages.append(Stage(run, inputs, wanted, [name for name in inputs if name not in later]))
            later |= set(inputs)
        return stages[::-1]

    def rebind(self, name: str, tensor: torch.Tensor) -> None:
        """Replaces the tensor of a parameter or buffer."""
        super().rebind(name, tensor.detach())

    def overwritten(self, plan: Plan) -> Results:
        """Returns the results of the last run of a plan, if the next one overwrites them."""
        captured = plan.bindings.get(CapturedRun)
        return () if captured is None else captured.results

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
        state, values = [*self._state.values()], list(map(batch.__getitem__, self._taken))
        if torch.bfloat16 in map(_dtype, values):
            values = list(map(as_taken, values))
        if plan.random:
            values += self._draw(with_probabilities(plan.random, self._state), generator)
        if loss_scale is not None:
            values.append(loss_scale)
        function = plan.function
        assert function is not None
        if self._captures is None:
            state += values
            values.clear()  # the function empties its list, to free random numbers early
            computed = self._as_captured(function, state, generator=generator)
        else:
            computed = self._as_captured(
                self._captures.run, plan.bindings, function, state, values, generator=generator
            )
        outputs = dict(zip(plan.results, computed, strict=True))
        if CapturedRun in plan.bindings:
            outputs |= {output.name: outputs[output.name].clone() for output in plan.outputs}
        for name, destination in (destinations or {}).items():
            destination.copy_(outputs[name])
        results = {
            output.name: outputs[output.name] if output.bound is output.dtype else outputs[output.name].to(output.dtype)
            for output in plan.outputs
        }
        return results, {**outputs, **destinations} if destinations else outputs

    def draw(self, wanted: Wanted) -> list[torch.Tensor]:
        """Returns random inputs in their own dtype, which unlike ONNX Runtime's may be bfloat16; see the base class."""
        drawn = self._memory.draw(wanted, None)
        return [value.to(getattr(torch, spec.dtype)) for value, (spec, _) in zip(drawn, wanted, strict=True)]

    def call(self, values: list[torch.Tensor], results: Callable[[], Sequence[Kind]] | None = None) -> Results:
        """Runs the graph on all its inputs; see the base class."""
        return self._as_captured(self.run_programs, values)

    def _as_captured(
        self, function: Callable[..., Results], *arguments: Any, generator: torch.Generator | None = None
    ) -> Results:
        """Calls a function without PyTorch's gradients and autocast, as when the graph was captured.

        Args:
            function: Runs operators.
            arguments: Its arguments.
            generator: From which operators draw that take no generator; None for the default. On the CPU there are
                none.
        """
        kind = self._device.type
        grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled(kind)
        torch._C._set_grad_enabled(False)
        if autocast:
            torch.set_autocast_enabled(kind, False)
        try:
            makes_deterministic = self._deterministic and not torch.are_deterministic_algorithms_enabled()
            if kind == "cpu" and not makes_deterministic:
                return function(*arguments)  # without further contexts, which take time
            with contextlib.ExitStack() as stack:
                if makes_deterministic:
                    stack.enter_context(deterministic_kernels())
                if generator is not None:
                    stack.enter_context(as_default_generator(generator))
                if kind == "cuda":  # kernels run on the current device
                    stack.enter_context(torch.cuda.device(self._device))
                return function(*arguments)
        finally:
            torch._C._set_grad_enabled(grad)
            if autocast:
                torch.set_autocast_enabled(kind, True)


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
