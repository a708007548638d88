"""``Executor``: runs of training and evaluation, with graphs looked up by the shapes of a batch."""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..step import Step, TensorSpec
from .gradients import Gradients
from .ort import make_session, providers_for, session_options
from .programs.runner import KernelRunner, calls_pytorch
from .runner import Check, GraphRunner, Plan
from .torch_memory import TorchMemory

if TYPE_CHECKING:
    from .ort import InferenceSession, SessionOptions

__all__ = ["Executor"]

# A training run may have as many shapes as (batch, length) pairs; each plan holds a few kilobytes of bindings.
_MAXIMUM_PLANS = 256
_shape = attrgetter("shape")


class Executor:
    """Owns parameters, gradients and buffers, and runs training and evaluation on them.

    The tensors are PyTorch's; ONNX Runtime reads and writes the same memory. :meth:`train` adds to the gradients,
    :meth:`lazy_reset_grad` makes the next :meth:`train` start from zero.

    Args:
        parameters: All parameters by name, trained or not. The executor uses these tensors directly and changes them.
        buffers: All buffers by name, used in the same way.
        device: The device of all tensors.
        given_options: Options of the ONNX Runtime sessions, used as they are; None for the package's own.
        deterministic: Whether to request deterministic kernels from ONNX Runtime.
        provider_options: Execution provider -> its options.
        mem_limit: Bytes that ONNX Runtime may allocate on a CUDA device; 0 for no limit.
        seed: Seed of the random numbers of training (dropout); None to use PyTorch's global generator.
        gradient_memory: Required memory of gradients, by parameter name; None for no requirement.

    Attributes:
        parameters, buffers: As given.
        variants: By mode, the key of the model's variant whose graphs are added, found and run; initially None.
        generator: Draws the random numbers of training.
        changed_buffers: Names of the buffers that training changes.
        present_gradients, used_gradients, hold_gradients, restore_gradients: See ``present``, ``used``, ``hold`` and
            ``restore`` of :class:`Gradients`.
        lazy_reset_grad: Makes the next :meth:`train` overwrite the gradients instead of adding to them.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        *,
        device: str | torch.device = "cpu",
        given_options: SessionOptions | None = None,
        deterministic: bool = False,
        provider_options: Mapping[str, Mapping[str, object]] | None = None,
        mem_limit: int = 0,
        seed: int | None = 0,
        gradient_memory: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._given_options, self._deterministic = given_options, deterministic
        if given_options is not None:
            session_options(given_options, deterministic)  # checks them
        self._providers = providers_for(self._device, provider_options or {}, mem_limit)
        self.parameters = dict(parameters)
        self.buffers = dict(buffers)
        self._gradients = held = Gradients(self.parameters, self._device, gradient_memory)
        self.present_gradients, self.used_gradients = held.present, held.used
        self.hold_gradients, self.restore_gradients = held.hold, held.restore
        self.lazy_reset_grad = held.reset
        self.generator = (
            _global_generator(self._device) if seed is None else torch.Generator(self._device).manual_seed(seed)
        )
        self._updated: dict[str, torch.Tensor] = {}
        self.changed_buffers: Collection[str] = self._updated.keys()
        self._runners: dict[tuple[bool, Hashable], list[GraphRunner]] = {}
        self.variants: dict[bool, Hashable] = {True: None, False: None}
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._pruned: dict[tuple[Any, ...], GraphRunner] = {}
        self._memory = TorchMemory(self._device)
        self._scales: dict[TensorSpec, tuple[float, torch.Tensor]] = {}

    @functools.cached_property
    def _options(self) -> SessionOptions:
        """Created lazily for the first graph, because it imports ONNX Runtime, which takes a while."""
        return session_options(self._given_options, self._deterministic)

    @functools.cached_property
    def _one_thread(self) -> SessionOptions:
        """For graphs whose nodes call PyTorch, whose threads do the work; a second pool would compete for the cores."""
        return session_options(None, self._deterministic, threads=1)

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """The memory of the gradients by parameter name; only those in :meth:`present_gradients` are valid."""
        return self._gradients.tensors

    @property
    def inference_session(self) -> InferenceSession:
        """The ONNX Runtime session of the first training graph.

        Raises:
            RuntimeError: If there is none yet.
        """
        if not self._runners_for(True):
            raise RuntimeError("there is no training graph yet: call prepare() or train_step() first")
        return self._runners_for(True)[0].inference_session

    def add_graph(self, graph: Step) -> None:
        """Adds a training or evaluation graph; there can be several of each, for different shapes.

        Raises:
            RuntimeError: If ONNX Runtime can't load it.
        """
        runner = self._make_runner(graph)
        # If any graph writes into bound memory, the gradients must not move.
        self._gradients.stays |= graph.training and runner.keeps_destinations
        for name in graph.gradients:
            self._gradients.memory(name)
        for name in graph.buffer_updates:
            if name not in self._updated:
                self._updated[name] = torch.empty_like(self.buffers[name])
        self._runners_for(graph.training).append(runner)

    def save_optimized(self, graph: Step, path: Path) -> None:
        """Writes a graph as ONNX Runtime runs it here: after its own optimizations, for these providers."""
        # The user's own options must not be changed and can't be copied; only their optimization level matters here.
        options = session_options(None, self._options.use_deterministic_compute)
        options.graph_optimization_level = self._options.graph_optimization_level
        options.optimized_model_filepath = str(path)
        make_session(graph.serialized(), options, self._providers)

    def rebind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replaces tensors of the executor.

        Args:
            tensors: Parameters and buffers by name, of the same shapes, dtypes and device.
        """
        for name, tensor in tensors.items():
            (self.parameters if name in self.parameters else self.buffers)[name] = tensor
            for runner in (*(r for runners in self._runners.values() for r in runners), *self._pruned.values()):
                if name in runner.graph.state:
                    runner.rebind(name, tensor)
        for plan in self._plans.values():
            plan.bindings.clear()

    def graphs(self, training: bool) -> list[Step]:
        """Returns the graphs of a mode, for all variants of the model, in the order in which they were added."""
        return [runner.graph for (mode, _), runners in self._runners.items() if mode == training for runner in runners]

    def graphs_of_variant(self, training: bool) -> list[Step]:
        """Returns the graphs of a mode for the selected variant."""
        return [runner.graph for runner in self._runners_for(training)]

    def plan(
        self, training: bool, batch: Mapping[str, torch.Tensor], names: Sequence[str], backward: bool = True
    ) -> Plan | None:
        """Returns a plan of :meth:`train`, :meth:`forward` or :meth:`evaluate` for batches of these shapes.

        Args:
            training: Whether to run in training mode.
            batch: Inputs by name. Without gradients, inputs that the outputs do not need may be left out.
            names: Outputs to return.
            backward: Whether a run in training mode computes gradients.

        Returns:
            The plan of the first graph that accepts the shapes; None if there is no such graph.

        Raises:
            TypeError: If an input that the outputs need is missing.
        """
        shapes = list(map(_shape, batch.values()))
        key = (training, backward, self.variants[training], *names, None, *batch, *shapes)
        plan = self._plans.get(key)
        if plan is None:
            runner = self._find(training, dict(zip(batch, shapes, strict=True)))
            if runner is None:
                return None
            if len(batch) < len(runner.graph.inputs) or (training and not backward):
                runner = self._without(runner, set(batch), names)
            plan = self._plans[key] = runner.plan(dict(zip(batch, shapes, strict=True)), names)
            if len(self._plans) > _MAXIMUM_PLANS:
                del self._plans[next(iter(self._plans))]
        return plan

    def train(
        self, plan: Plan, batch: Mapping[str, torch.Tensor], *, loss_scale: float = 1.0, check: Check | None = None
    ) -> list[torch.Tensor]:
        """Runs the forward and backward pass and adds to the gradients.

        If the run fails, gradients and buffers do not change.

        Args:
            plan: From :meth:`plan`, for the shapes of the batch.
            batch: Inputs by name, contiguous and on the executor's device.
            loss_scale: Factor on the loss in the backward pass; the returned loss is without it.
            check: Checks the outputs before the run takes effect, and raises to discard it.

        Returns:
            The outputs that the plan fetches, as new tensors.
        """
        graph = plan.runner.graph
        fresh = self._gradients.begin()
        results, written = self._run(plan, batch, fresh, loss_scale, check)
        found = dict(zip(graph.gradients, map(written.__getitem__, graph.gradients.values()), strict=True))
        self._gradients.take(found, fresh)
        return results

    def gradients_of(
        self, plan: Plan, batch: Mapping[str, torch.Tensor], *, loss_scale: float = 1.0, check: Check | None = None
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Does what :meth:`train` does, but returns the gradients instead of adding them to the executor's.

        Returns:
            The outputs, and the gradients of the loss times its scale by parameter name, as new tensors.
        """
        self._gradients.begin()
        results, written = self._run(plan, batch, False, loss_scale, check)
        found = {name: written[output] for name, output in plan.runner.graph.gradients.items()}
        # The next run overwrites bound tensors.
        return results, {name: value.clone() for name, value in found.items()} if self._gradients.stays else found

    def forward(self, plan: Plan, batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Runs the forward pass in training mode: draws random numbers and changes buffers, without gradients.

        Args:
            plan: From :meth:`plan`, without a backward pass.
            batch: Inputs by name, contiguous and on the executor's device.
        """
        needed = {spec.name: batch[spec.name] for spec in plan.runner.graph.inputs}
        return self._run(plan, needed, True, 1.0)[0]

    def evaluate(self, plan: Plan, batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Runs the forward pass in evaluation mode; changes nothing.

        Args:
            plan: From :meth:`plan`, for evaluation.
            batch: Inputs by name, contiguous and on the executor's device.

        Returns:
            The outputs that the plan fetches, as new tensors.
        """
        runner = plan.runner
        if len(batch) > len(runner.graph.inputs):
            batch = {spec.name: batch[spec.name] for spec in runner.graph.inputs}
        results, _ = runner.run(plan, batch)
        return list(results.values())

    @property
    def starts_over(self) -> bool:
        """Whether the next :meth:`train` overwrites the gradients."""
        return self._gradients.are_fresh

    def _runners_for(self, training: bool) -> list[GraphRunner]:
        return self._runners.setdefault((training, self.variants[training]), [])

    def _run(
        self, plan: Plan, batch: Mapping[str, torch.Tensor], fresh: bool, loss_scale: float, check: Check | None = None
    ) -> tuple[list[torch.Tensor], Mapping[str, torch.Tensor]]:
        """Runs a graph in training mode; returns the fetched outputs, and tensors with the other outputs by name.

        If the run fails, buffers do not change.
        """
        graph = plan.runner.graph
        key = "fresh" if fresh else "add"
        destinations: dict[str, torch.Tensor] = {}
        if self._gradients.stays and key not in plan.bindings:
            found = self._gradients.destinations(graph.gradients, fresh)
            destinations = {output: found[name] for name, output in graph.gradients.items()}
            destinations |= {output: self._updated[name] for name, output in graph.buffer_updates.items()}
        results, written = plan.runner.run(
            plan,
            batch,
            destination_key=key,
            destinations=destinations,
            loss_scale=self._scale(graph, loss_scale),
            generator=self.generator,
        )
        if check is not None:
            check(results, graph.loss)
        for name, output in graph.buffer_updates.items():
            self.buffers[name].copy_(written[output])
        return list(results.values()), written

    def _scale(self, graph: Step, value: float) -> torch.Tensor | None:
        """Returns the loss scale as a graph input, the same tensor until it changes; None if the graph has none."""
        spec = graph.loss_scale
        if spec is None:
            return None
        known = self._scales.get(spec)
        if known is None or known[0] != value:
            shape, dtype = [int(size) for size in spec.shape or ()], getattr(torch, spec.dtype)
            known = self._scales[spec] = value, torch.full(shape, value, dtype=dtype, device=self._device)
        return known[1]

    def _find(self, training: bool, shapes: Mapping[str, tuple[int, ...]]) -> GraphRunner | None:
        return next((runner for runner in self._runners_for(training) if runner.graph.takes(shapes)), None)

    def _without(self, runner: GraphRunner, given: set[str], names: Sequence[str]) -> GraphRunner:
        """Returns a runner for the part of a graph that computes some outputs from some inputs."""
        key = (id(runner), tuple(names))
        if key not in self._pruned:
            self._pruned[key] = self._make_runner(runner.graph.pruned(names))
        missing = [spec.name for spec in self._pruned[key].graph.inputs if spec.name not in given]
        if missing:
            raise TypeError(f"inputs {missing} are missing: outputs {list(names)} need them")
        return self._pruned[key]

    def _make_runner(self, graph: Step) -> GraphRunner:
        tensors = {**self.parameters, **self.buffers}
        state = {name: tensors[name] for name in graph.state}
        try:
            if calls_pytorch(graph):
                return KernelRunner(graph, state, self._memory, self._one_thread, self._providers)
            return GraphRunner(graph, state, self._memory, self._options, self._providers)
        except Exception as error:
            kind = "training" if graph.training else "evaluation"
            raise RuntimeError(f"ONNX Runtime can't load the {kind} graph: {error}") from error


def _global_generator(device: torch.device) -> torch.Generator:
    """Returns PyTorch's global generator for a device."""
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()  # type: ignore[no-untyped-call] # creates the generators
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
