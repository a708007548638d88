"""``StepSession``: the step, as ONNX Runtime's C++ class of the same name offers it."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..graph import TrainingGraph
from ..optim import OptimizerConfig
from ..optim.update import OptimizerUpdate
from .aten.runner import KernelRunner, calls_pytorch
from .engine import providers_for, session_options
from .runner import GraphRunner, Plan, load

if TYPE_CHECKING:
    from .engine import InferenceSession, SessionOptions

__all__ = ["StepSession"]

# A training run meets as many shapes as there are (batch, length) pairs; each keeps bindings of a few kilobytes.
_MAXIMUM_PLANS = 256


class StepSession:
    """Owns parameters, gradients, moments and buffers, and runs training, evaluation and weight updates on them.

    The tensors are PyTorch's; ONNX Runtime reads and writes the same memory. The C++ names mean what they mean there:
    ``train_step`` adds to the gradients, ``optimizer_step`` applies them, ``lazy_reset_grad`` makes the next
    ``train_step`` start from zero.

    Args:
        parameters: All parameters by name, trained or not. The session keeps these very tensors and changes them.
        buffers: All buffers by name, likewise.
        trainable: Names of the parameters to train, each with all the names by which a parameter group may call it.
        optimizer_config: The update rule; its learning rates are the initial ones.
        clip: Whether gradients are clipped to the config's ``max_norm_clip``.
        max_norm: A limit of the gradient norm instead of the config's; None for the config's.
        device: Where everything is.
        given_options: Options of the ONNX Runtime sessions, used as they are; None for the package's own.
        deterministic: Whether to ask ONNX Runtime for deterministic kernels.
        provider_options: Execution provider -> its options.
        mem_limit: Bytes that ONNX Runtime may allocate on a CUDA device; 0 is no limit.
        seed: Seed of the random numbers of training (dropout).
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        trainable: Mapping[str, Sequence[str]],
        optimizer_config: OptimizerConfig,
        *,
        clip: bool = True,
        max_norm: float | None = None,
        device: str | torch.device = "cpu",
        given_options: SessionOptions | None = None,
        deterministic: bool = False,
        provider_options: Mapping[str, Mapping[str, object]] | None = None,
        mem_limit: int = 0,
        seed: int = 0,
    ) -> None:
        self._device = torch.device(device)
        self._given_options, self._deterministic = given_options, deterministic
        if given_options is not None:
            session_options(given_options, deterministic)  # which checks them
        self._providers = providers_for(self._device, provider_options or {}, mem_limit)
        self.parameters = dict(parameters)
        self.buffers = dict(buffers)
        self.gradients: dict[str, torch.Tensor] = {}
        self.generator = torch.Generator(self._device).manual_seed(seed)
        self._present: set[str] = set()
        self._reset = True
        self._keeps_destinations = False
        self._scratch: dict[str, torch.Tensor] = {}
        self._updated: dict[str, torch.Tensor] = {}
        self._runners: dict[tuple[bool, Hashable], list[GraphRunner]] = {}
        self._variants: dict[bool, Hashable] = {True: None, False: None}
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._scales: dict[str, tuple[float, torch.Tensor]] = {}
        self._pruned: dict[tuple[Any, ...], GraphRunner] = {}
        self._learning_rates: Sequence[float] = optimizer_config.learning_rates
        self.optimizer = OptimizerUpdate(
            optimizer_config,
            {name: self.parameters[name] for name in trainable},
            {name: optimizer_config.group_of(*names) for name, names in trainable.items()},
            clip=clip,
            max_norm=max_norm,
        )

    @functools.cached_property
    def _options(self) -> SessionOptions:
        """Made for the first graph: until then nothing of ONNX Runtime is needed, and its import takes a while."""
        return session_options(self._given_options, self._deterministic)

    @functools.cached_property
    def _one_thread(self) -> SessionOptions:
        """For graphs whose nodes call PyTorch: what is heavy is done by its threads, beside which others would wait."""
        return session_options(None, self._deterministic, threads=1)

    def add_graph(self, graph: TrainingGraph) -> None:
        """Adds a training or evaluation graph; there can be several of each, for different shapes.

        Raises:
            RuntimeError: If ONNX Runtime can't load it.
        """
        runner = self._make_runner(graph)
        # One graph that writes into bound memory is enough for gradients to have to stay where they are.
        self._keeps_destinations |= graph.training and runner.keeps_destinations
        for name in graph.gradients:
            if name not in self.gradients:
                self.gradients[name] = torch.zeros_like(self.parameters[name])
        for name in graph.buffer_updates:
            if name not in self._updated:
                self._updated[name] = torch.empty_like(self.buffers[name])
        self._runners_for(graph.training).append(runner)

    def save_optimized(self, graph: TrainingGraph, path: Path) -> None:
        """Writes a graph as ONNX Runtime runs it here: after its own optimizations, for these providers."""
        # The user's own options are never written to, and can't be copied: of them the level of optimization counts.
        options = session_options(None, self._options.use_deterministic_compute)
        options.graph_optimization_level = self._options.graph_optimization_level
        options.optimized_model_filepath = str(path)
        load(graph, self._providers, options)

    def graphs(self, training: bool) -> list[TrainingGraph]:
        """Returns the graphs of a mode, for all variants of the model, in the order in which they were added."""
        return [runner.graph for (mode, _), runners in self._runners.items() if mode == training for runner in runners]

    def choose_variant(self, training: bool, variant: Hashable) -> None:
        """Chooses the variant of the model whose graphs are added, found and run from now on.

        Args:
            training: Which graphs.
            variant: Whatever stands for it; at first it is None.
        """
        self._variants[training] = variant

    @property
    def inference_session(self) -> InferenceSession:
        """The ONNX Runtime session of the first training graph.

        Raises:
            RuntimeError: If there is none yet.
        """
        self._first(True)
        return self._runners_for(True)[0].inference_session

    def plan(self, training: bool, batch: Mapping[str, torch.Tensor], names: Sequence[str]) -> Plan | None:
        """Returns what :meth:`train` or :meth:`evaluate` needs for batches of these shapes: one look-up a step.

        Args:
            training: For which of the two.
            batch: Inputs by name. For evaluation, those that the outputs do not need may be left out.
            names: Outputs to return.

        Returns:
            The plan of the first graph that accepts the shapes; None if there is no such graph.

        Raises:
            TypeError: If an input is left out that the outputs need.
        """
        shapes = [value.shape for value in batch.values()]
        key = (training, self._variants[training], *names, None, *batch, *shapes)
        plan = self._plans.get(key)
        if plan is None:
            runner = self._find(training, dict(zip(batch, shapes, strict=True)))
            if runner is None:
                return None
            if len(batch) < len(runner.graph.inputs):
                runner = self._without(runner, set(batch), names)
            plan = self._plans[key] = runner.plan(dict(zip(batch, shapes, strict=True)), names)
            if len(self._plans) > _MAXIMUM_PLANS:
                del self._plans[next(iter(self._plans))]
        return plan

    def input_names(self, training: bool = True) -> list[str]:
        """Returns the names of the batch inputs, in the order in which steps take them."""
        return [spec.name for spec in self._first(training).inputs]

    def output_names(self, training: bool = True) -> list[str]:
        """Returns the names of the outputs, in the order in which steps return them."""
        return [spec.name for spec in self._first(training).outputs]

    def train_step(
        self, inputs: Sequence[torch.Tensor], *, loss_scale: float = 1.0, names: Sequence[str] | None = None
    ) -> list[torch.Tensor]:
        """Runs forward and backward pass and adds to the gradients.

        If the run fails, gradients, buffers and random state are what they were.

        Args:
            inputs: The batch in the order of :meth:`input_names`, contiguous and on the session's device.
            loss_scale: Factor on the loss in the backward pass; the returned loss is without it.
            names: Outputs to return; None for all.

        Returns:
            The outputs as new tensors, in the order of ``names``.
        """
        batch, plan = self._choose(True, inputs, names)
        return self.train(plan, batch, loss_scale=loss_scale)

    def train(self, plan: Plan, batch: Mapping[str, torch.Tensor], *, loss_scale: float = 1.0) -> list[torch.Tensor]:
        """Does what :meth:`train_step` does, with a plan from :meth:`plan`.

        Args:
            plan: For the shapes of the batch.
            batch: Inputs by name, contiguous and on the session's device.
            loss_scale: As for :meth:`train_step`.
        """
        graph = plan.runner.graph
        fresh = self._reset or not self._present
        key = "fresh" if fresh else "add"
        if fresh and not self._keeps_destinations:
            # What is there is used up, and its memory is better spent on this run.
            self.gradients |= dict.fromkeys(graph.gradients, torch.empty(0, device=self._device))
        random_state = self.generator.get_state() if graph.random else None
        try:
            results, written = plan.runner.run(
                plan,
                batch,
                destination_key=key,
                destinations=self._destinations(graph, fresh)
                if self._keeps_destinations and key not in plan.bindings
                else {},
                loss_scale=self._scale(graph, loss_scale),
                generator=self.generator,
            )
        except Exception:
            if random_state is not None:
                self.generator.set_state(random_state)
            raise
        if not self._keeps_destinations:
            gradients = self.gradients if fresh else self._scratch
            gradients |= {name: written[output] for name, output in graph.gradients.items()}
            self._updated |= {name: written[output] for name, output in graph.buffer_updates.items()}
        if fresh:
            self._present = set(graph.gradients)
        else:
            self._add_gradients(graph)
            if not self._keeps_destinations:
                self._scratch.clear()
        self._reset = False
        for name in graph.buffer_updates:
            self.buffers[name].copy_(self._updated[name])
        return list(results.values())

    def eval_step(
        self, inputs: Sequence[torch.Tensor | None], *, names: Sequence[str] | None = None
    ) -> list[torch.Tensor]:
        """Runs the forward pass in evaluation mode; changes nothing.

        Args:
            inputs: The batch in the order of :meth:`input_names`. An input that the asked-for outputs do not need may
                be None.
            names: Outputs to return; None for all.

        Returns:
            The outputs as new tensors, in the order of ``names``.

        Raises:
            TypeError: If an input is None that the outputs need.
        """
        batch, plan = self._choose(False, inputs, names)
        return self.evaluate(plan, batch)

    def evaluate(self, plan: Plan, batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Does what :meth:`eval_step` does, with a plan from :meth:`plan`."""
        runner = plan.runner
        if len(batch) > len(runner.graph.inputs):
            batch = {spec.name: batch[spec.name] for spec in runner.graph.inputs}
        results, _ = runner.run(plan, batch)
        return list(results.values())

    def lazy_reset_grad(self) -> None:
        """Makes the next :meth:`train_step` overwrite the gradients instead of adding to them."""
        self._reset = True

    def optimizer_step(self, *, divisor: float = 1.0, check_finite: bool = False) -> bool:
        """Updates the weights with the gradients. Call :meth:`lazy_reset_grad` afterwards: they are used up.

        Args:
            divisor: What the gradients are divided by first.
            check_finite: Whether to change nothing if any gradient is not finite.

        Returns:
            Whether all gradients were finite; True where that was not checked.

        Raises:
            RuntimeError: If there are no gradients: no :meth:`train_step` since the last reset.
        """
        gradients = self.present_gradients()
        if self._reset:
            raise RuntimeError("there are no gradients to apply: call train_step before optimizer_step")
        return self.optimizer.step(gradients, self._learning_rates, divisor, check_finite)

    def set_learning_rate(self, *learning_rates: float) -> None:
        """Sets the learning rate of the coming updates: one for all parameters, or one per group and the default."""
        self._learning_rates = [float(rate) for rate in learning_rates]

    def get_learning_rate(self) -> float:
        """Returns the learning rate of the coming updates; of several, that of parameters that are in no group."""
        return self._learning_rates[-1]

    def present_gradients(self) -> dict[str, torch.Tensor]:
        """Returns the gradients since the last reset, by parameter name; empty right after one."""
        return {} if self._reset else {name: self.gradients[name] for name in self.gradients if name in self._present}

    def restore_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Sets the accumulated gradients; empty for none."""
        for name, value in gradients.items():
            self.gradients.setdefault(name, torch.zeros_like(self.parameters[name])).copy_(value)
        self._present = set(gradients)
        self._reset = not gradients

    def _first(self, training: bool) -> TrainingGraph:
        if not self._runners_for(training):
            raise RuntimeError(f"the session has no {'training' if training else 'evaluation'} graph yet: add one")
        return self._runners_for(training)[0].graph

    def _runners_for(self, training: bool) -> list[GraphRunner]:
        return self._runners.setdefault((training, self._variants[training]), [])

    def _state(self, name: str) -> torch.Tensor:
        return self.parameters[name] if name in self.parameters else self.buffers[name]

    def _choose(
        self, training: bool, inputs: Sequence[torch.Tensor | None], names: Sequence[str] | None
    ) -> tuple[dict[str, torch.Tensor], Plan]:
        own = self.input_names(training)
        if len(inputs) != len(own):
            raise TypeError(f"{len(inputs)} inputs were given, but the graph takes {len(own)}: {own}")
        batch = {name: value for name, value in zip(own, inputs, strict=True) if value is not None}
        plan = self.plan(training, batch, self.output_names(training) if names is None else names)
        if plan is None:
            shapes = {name: tuple(value.shape) for name, value in batch.items()}
            raise ValueError(
                f"no graph of the session accepts the shapes {shapes}: the model fixes a dimension, or asks for other "
                "sizes; add a graph that was exported for them"
            )
        return batch, plan

    def _find(self, training: bool, shapes: Mapping[str, tuple[int, ...]]) -> GraphRunner | None:
        return next((runner for runner in self._runners_for(training) if runner.graph.takes(shapes)), None)

    def _without(self, runner: GraphRunner, given: set[str], names: Sequence[str]) -> GraphRunner:
        """Returns a runner of the part of a graph that computes some outputs from some inputs."""
        key = (id(runner), tuple(names))
        if key not in self._pruned:
            self._pruned[key] = self._make_runner(runner.graph.pruned(names))
        missing = [spec.name for spec in self._pruned[key].graph.inputs if spec.name not in given]
        if missing:
            raise TypeError(f"inputs {missing} are missing: outputs {list(names)} need them")
        return self._pruned[key]

    def _destinations(self, graph: TrainingGraph, fresh: bool) -> dict[str, torch.Tensor]:
        """Returns the tensors that a run writes, by graph output: the gradients, or what is added to them then."""
        gradients = self.gradients if fresh else self._scratch_gradients(graph)
        found = {output: gradients[name] for name, output in graph.gradients.items()}
        return found | {output: self._updated[name] for name, output in graph.buffer_updates.items()}

    def _make_runner(self, graph: TrainingGraph) -> GraphRunner:
        state = {name: self._state(name) for name in graph.state}
        try:
            if calls_pytorch(graph):
                return KernelRunner(graph, state, self._providers, self._one_thread, self._device)
            return GraphRunner(graph, state, self._providers, self._options, self._device)
        except Exception as error:
            kind = "training" if graph.training else "evaluation"
            raise RuntimeError(f"ONNX Runtime can't load the {kind} graph: {error}") from error

    def _scale(self, graph: TrainingGraph, loss_scale: float) -> torch.Tensor | None:
        spec = graph.loss_scale
        if spec is None:
            return None
        known = self._scales.get(spec.name)
        if known is None or known[0] != loss_scale:
            assert spec.shape is not None
            value = torch.full([int(size) for size in spec.shape], loss_scale, dtype=spec.dtype, device=self._device)
            known = self._scales[spec.name] = (loss_scale, value)
        return known[1]

    def _scratch_gradients(self, graph: TrainingGraph) -> dict[str, torch.Tensor]:
        for name in graph.gradients:
            if name not in self._scratch:
                self._scratch[name] = torch.empty_like(self.gradients[name])
        return self._scratch

    def _add_gradients(self, graph: TrainingGraph) -> None:
        known = [name for name in graph.gradients if name in self._present]
        if known:
            torch._foreach_add_([self.gradients[name] for name in known], [self._scratch[name] for name in known])
        for name in set(graph.gradients) - self._present:
            self.gradients[name].copy_(self._scratch[name])
            self._present.add(name)
