"""``Executor``: runs training and evaluation, chooses graphs by the shapes of a batch, accumulates gradients."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..step import Step, TensorSpec
from .devices import default_generator, limit_memory
from .ort import make_session, providers_for, session_options
from .request import Request
from .runner import Check, GraphRunner, Plan, check_branches, check_failure
from .runners import Runners
from .turns import Turns

if TYPE_CHECKING:
    from .ort import InferenceSession, SessionOptions

# A training run may have as many shapes as (batch, length) pairs; each plan holds a few kilobytes of bindings.
_MAXIMUM_PLANS = 256
_shape = attrgetter("shape")


class Results(NamedTuple):
    """The results of a run in training mode.

    Attributes:
        outputs: The outputs that were asked for.
        left: Values for places outside tensors: the outputs ``Step.left``.
    """

    outputs: list[torch.Tensor]
    left: list[torch.Tensor]


class Executor:
    """Owns parameters, gradients and buffers, and runs training and evaluation on them.

    The tensors are PyTorch's; ONNX Runtime reads and writes the same memory. :meth:`train` adds to the gradients,
    ``gradients.reset()`` makes the next :meth:`train` start from zero.

    Args:
        parameters: All parameters by name, trained or not. The executor uses these tensors directly and changes them.
        buffers: All buffers by name, used in the same way.
        device: The device of all tensors.
        given_options: The user's options of ONNX Runtime's sessions, used as they are; None for the package's.
        deterministic: Whether to request deterministic kernels.
        provider_options: Execution provider -> its options.
        mem_limit: Bytes that PyTorch and ONNX Runtime may each allocate on a CUDA device; 0 for no limit.
        seed: Seed of the random numbers of training (dropout); None to use PyTorch's global generator.
        gradient_memory: Required memory of gradients, by parameter name; None for no requirement.
        cuda_graphs: The option ``utils.cuda_graphs``.

    Attributes:
        parameters, buffers: As given.
        engine: Makes the runners of graphs.
        outside: Tensors by name that graphs take, but that are neither parameters nor buffers of the model.
        variants: Mode -> key of the selected variant of the model, whose graphs are added and run; initially None.
        generator: Draws the random numbers of training.
        draws_on_device: Whether graphs may draw from the generator themselves; otherwise random numbers are inputs.
        changed_buffers: Names of the buffers that training changes.
        gradients: The gradients since the last reset.
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
        cuda_graphs: str = "off",
    ) -> None:
        self._device = torch.device(device)
        self.draws_on_device = self._device.type != "cpu"
        limit_memory(self._device, mem_limit)
        providers = providers_for(self._device, provider_options or {}, mem_limit)
        self.engine = Runners(self._device, given_options, deterministic, providers, cuda_graphs)
        self.parameters = dict(parameters)
        self.buffers = dict(buffers)
        self.outside: dict[str, torch.Tensor] = {}
        self.gradients = Gradients(self.parameters, self._device, gradient_memory)
        self.generator = (
            default_generator(self._device) if seed is None else torch.Generator(self._device).manual_seed(seed)
        )
        self._updated: dict[str, torch.Tensor] = {}
        self.changed_buffers: Collection[str] = ()
        self._runners: dict[tuple[bool, Hashable], list[GraphRunner]] = {}
        self.variants: dict[bool, Hashable] = {True: None, False: None}
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._pruned: dict[tuple[Any, ...], GraphRunner] = {}
        self._turns: dict[GraphRunner, Turns] = {}
        self._replaced: list[Step] = []  # kept, because graphs are known by their ids
        self._scales: dict[TensorSpec, tuple[float, torch.Tensor]] = {}

    @property
    def inference_session(self) -> InferenceSession:
        """The ONNX Runtime session of the first training graph.

        Raises:
            RuntimeError: If there is none yet, or the graph runs on PyTorch's kernels.
        """
        if not self._runners_for(True):
            raise RuntimeError("there is no training graph yet: call prepare() or train_step() first")
        return self._runners_for(True)[0].session()

    def add_graph(self, step: Step) -> None:
        """Adds a training or evaluation graph; there can be several of each, for different shapes.

        Raises:
            RuntimeError: If ONNX Runtime can't load it.
        """
        runner = self._make_runner(step)
        # If any graph writes into bound memory, the gradients must stay where they are.
        self.gradients.stays |= step.training and runner.keeps_destinations
        for name in step.gradients:
            self.gradients.memory(name)
        self.gradients.arrange()
        for name in step.buffer_updates:
            if name not in self._updated:
                self._updated[name] = torch.empty_like(self.tensor(name))
        self.changed_buffers = self._updated.keys() & self.buffers.keys()
        self._runners_for(step.training).append(runner)

    def add_rival(self, step: Step, rival: Step, decided: Callable[[bool, tuple[float, float]], None]) -> None:
        """Adds a graph that computes what a training graph computes: in training, both take turns until one is faster.

        Args:
            step: The training graph.
            rival: The other one, with the same inputs and outputs.
            decided: See :class:`Turns`.

        Raises:
            RuntimeError: If the rival can't be loaded, or this executor does not have the training graph.
        """
        runner = next((each for each in itertools.chain(*self._runners.values()) if each.step is step), None)
        if runner is None:
            raise RuntimeError("the graph that it was compiled for is not used any more")
        self._turns[runner] = Turns(runner, self._make_runner(rival), decided)
        self._plans = {key: plan for key, plan in self._plans.items() if plan.runner is not runner}

    def save_optimized(self, step: Step, path: Path) -> None:
        """Writes a graph as ONNX Runtime runs it here: after its own optimizations, for these providers."""
        # The user's own options must not be changed and can't be copied; only their optimization level matters here.
        own = self.engine.options
        options = session_options(None, own.use_deterministic_compute)
        options.graph_optimization_level = own.graph_optimization_level
        options.optimized_model_filepath = str(path)
        make_session(step.serialized(), options, self.engine.providers)

    def rebind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replaces tensors of the executor.

        Args:
            tensors: Parameters and buffers by name, of the same shapes, dtypes and device; or other tensors that
                are part of the state of later graphs.
        """
        for name, tensor in tensors.items():
            kinds = (self.parameters, self.buffers, self.outside)
            next((kind for kind in kinds if name in kind), self.outside)[name] = tensor
            for runner in self._all_runners():
                if name in runner.step.state:
                    runner.rebind(name, tensor)
        for plan in self._plans.values():
            plan.bindings.clear()

    def tensor(self, name: str) -> torch.Tensor:
        """Returns a buffer, or a tensor from outside, that graphs may change."""
        return self.buffers[name] if name in self.buffers else self.outside[name]

    def graphs(self, training: bool) -> list[Step]:
        """Returns the graphs of a mode, for all variants of the model, in the order in which they were added."""
        return [runner.step for (mode, _), runners in self._runners.items() if mode == training for runner in runners]

    def runs(self) -> dict[int, int]:
        """Returns how often graphs have run, by their ids; what runs only a part of a graph counts for it."""
        counts: dict[int, int] = collections.Counter()
        for runner in self._all_runners():
            counts[id(runner.whole)] += runner.runs
        return counts

    def _all_runners(self) -> list[GraphRunner]:
        rivals = (turns.rival for turns in self._turns.values())
        return [*itertools.chain(*self._runners.values()), *self._pruned.values(), *rivals]

    def graphs_of_variant(self, training: bool) -> list[Step]:
        """Returns the graphs of a mode for the selected variant."""
        return [runner.step for runner in self._runners_for(training)]

    def plan(self, request: Request) -> Plan | None:
        """Returns a plan of :meth:`train`, :meth:`forward` or :meth:`evaluate` for batches of these shapes.

        Args:
            request: What to run. Without gradients, inputs that the outputs do not need may be left out. What a
                training run leaves outside is computed as well.

        Returns:
            The plan of the first graph that accepts the shapes, or the one made earlier for such batches; None if no
            graph accepts them.

        Raises:
            TypeError: If an input that the outputs need is missing.
        """
        batch, training, names, backward, _, refused = request
        shapes = list(map(_shape, batch.values()))
        # None separates the outputs' names from the inputs'.
        key = (training, backward, self.variants[training], *names, None, *batch, *shapes)
        plan = self._plans.get(key)
        if plan is None or (refused and any(plan.runner.whole is step for step in refused)):
            runner = self._find(training, dict(zip(batch, shapes, strict=True)), refused)
            if runner is None:
                return None
            names = (*names, *runner.step.left)
            if len(batch) < len(runner.step.inputs) or (training and not backward):
                runner = self._without(runner, set(batch), names)
            sizes = dict(zip(batch, shapes, strict=True))
            plan = self._plans[key] = runner.plan(sizes, names)
            turns = self._turns.get(runner)
            if turns is not None and turns.rival.step.takes(sizes):
                turns.add(plan, turns.rival.plan(sizes, names))
            if len(self._plans) > _MAXIMUM_PLANS:
                del self._plans[next(iter(self._plans))]  # the oldest
        return plan

    def train(
        self, plan: Plan, batch: Mapping[str, torch.Tensor], *, loss_scale: float = 1.0, check: Check | None = None
    ) -> Results:
        """Runs the forward and backward pass and adds to the gradients.

        If the run fails, gradients and buffers do not change.

        Args:
            plan: From :meth:`plan`, for the shapes of the batch.
            batch: Inputs by name, contiguous and on the executor's device.
            loss_scale: Factor on the loss in the backward pass; the returned loss is without it.
            check: Checks the results before the run takes effect, and raises to discard it.

        Returns:
            The outputs that the plan fetches, and what the run leaves outside, as new tensors.

        Raises:
            ValueBranchError: If the batch takes another branch than the graph.
        """
        step = plan.runner.step
        fresh = self.gradients.begin()
        results, written = self._run(plan, batch, fresh, loss_scale, check)
        gradients = dict(zip(step.gradients, map(written.__getitem__, step.gradients.values()), strict=True))
        self.gradients.take(gradients, fresh)
        return results

    def gradients_of(
        self, plan: Plan, batch: Mapping[str, torch.Tensor], *, loss_scale: float = 1.0, check: Check | None = None
    ) -> tuple[Results, dict[str, torch.Tensor]]:
        """Does what :meth:`train` does, but returns the gradients instead of adding them to the executor's.

        Returns:
            What :meth:`train` returns, and the gradients of the loss times its scale by parameter name, as new tensors.
        """
        self.gradients.begin()
        results, written = self._run(plan, batch, False, loss_scale, check)
        gradients = {name: written[output] for name, output in plan.runner.step.gradients.items()}
        if self.gradients.stays or plan.runner.overwritten(plan):  # by the next run
            gradients = {name: value.clone() for name, value in gradients.items()}
        return results, gradients

    def trial(self, step: Step, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Runs a training graph without effect: gradients, buffers and random state stay as they are.

        Args:
            step: Any training graph of PyTorch's kernels for this model.
            batch: Inputs by name, contiguous and on the executor's device.

        Returns:
            The loss, and the gradients by parameter name, as new tensors.
        """
        runner = self._make_runner(step)
        plan = runner.plan({name: tuple(value.shape) for name, value in batch.items()}, [step.loss])
        state = self.generator.get_state()
        try:
            scale = step.loss_scale and self._scale(step.loss_scale, 1.0)
            results, outputs = runner.run(plan, batch, loss_scale=scale, generator=self.generator)
            check_branches(step, results)
        finally:
            self.generator.set_state(state)
        return outputs[step.loss], {name: outputs[output] for name, output in step.gradients.items()}

    def forward(self, plan: Plan, batch: Mapping[str, torch.Tensor]) -> Results:
        """Runs the forward pass in training mode: draws random numbers and changes buffers, without gradients.

        Args:
            plan: From :meth:`plan`, without a backward pass.
            batch: Inputs by name, contiguous and on the executor's device.
        """
        needed = {spec.name: batch[spec.name] for spec in plan.runner.step.inputs}
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
        if len(batch) > len(runner.step.inputs):
            batch = {spec.name: batch[spec.name] for spec in runner.step.inputs}
        try:
            results, _ = runner.run(plan, batch)
        except (IndexError, RuntimeError) as error:
            check_failure(runner.step, error)
            raise
        check_branches(runner.step, results)
        runner.runs += 1
        return list(results.values())

    def _runners_for(self, training: bool) -> list[GraphRunner]:
        """Returns the runners of a mode for the selected variant; appending to the list adds one."""
        return self._runners.setdefault((training, self.variants[training]), [])

    def _run(
        self,
        plan: Plan,
        batch: Mapping[str, torch.Tensor],
        fresh: bool,
        loss_scale: float,
        check: Check | None = None,
        alone: bool = False,
    ) -> tuple[Results, Mapping[str, torch.Tensor]]:
        """Runs a graph in training mode; returns its results, and tensors with the other outputs by name.

        If the run fails, buffers do not change. A rival takes turns, unless the plan runs ``alone``.
        """
        if self._turns and not alone and (turns := self._turns.get(plan.runner)) is not None:
            result = turns.run(plan, lambda plan: self._run(plan, batch, fresh, loss_scale, check, alone=True))
            if turns.winner is not None:
                self._end_turns(turns)
            return result
        step = plan.runner.step
        overwritten = () if fresh else plan.runner.overwritten(plan)
        if overwritten:
            self.gradients.move_out(overwritten)
        key = "fresh" if fresh else "add"
        destinations: dict[str, torch.Tensor] = {}
        if self.gradients.stays and key not in plan.bindings:
            tensors = self.gradients.destinations(step.gradients, fresh)
            destinations = {output: tensors[name] for name, output in step.gradients.items()}
            destinations |= {output: self._updated[name] for name, output in step.buffer_updates.items()}
        try:
            results, written = plan.runner.run(
                plan,
                batch,
                destination_key=key,
                destinations=destinations,
                loss_scale=step.loss_scale and self._scale(step.loss_scale, loss_scale),
                generator=self.generator,
            )
        except (IndexError, RuntimeError) as error:
            check_failure(step, error)
            raise
        if step.assumptions:
            check_branches(step, results)
        if check is not None:
            check(step, results, written)
        plan.runner.runs += 1
        for name, output in step.buffer_updates.items():
            self.tensor(name).copy_(written[output])
        fetched = list(results.values())
        count = len(fetched) - len(step.left)
        return Results(fetched[:count], fetched[count:]), written

    def _end_turns(self, turns: Turns) -> None:
        """Lets the winner run from now on; if it does not take all sizes, the other one runs for those."""
        runner, rival = turns.runner, turns.rival
        del self._turns[runner]
        if turns.winner is rival:
            (runners,) = (each for each in self._runners.values() if runner in each)
            runners.insert(runners.index(runner), rival)
            if (rival.step.guards, rival.step.fixed) == (runner.step.guards, runner.step.fixed):
                runners.remove(runner)
                self._replaced.append(runner.step)
            self._plans = {key: plan for key, plan in self._plans.items() if plan.runner is not runner}

    def _scale(self, spec: TensorSpec, value: float) -> torch.Tensor:
        """Returns the loss scale as a graph input, the same tensor until it changes."""
        cached = self._scales.get(spec)  # the same tensor needs no new binding
        if cached is None or cached[0] != value:
            shape, dtype = [int(size) for size in spec.shape or ()], getattr(torch, spec.dtype)
            cached = self._scales[spec] = value, torch.full(shape, value, dtype=dtype, device=self._device)
        return cached[1]

    def _find(
        self, training: bool, shapes: Mapping[str, tuple[int, ...]], refused: Collection[Step]
    ) -> GraphRunner | None:
        """Returns the runner of the first graph that takes inputs of these shapes and is not refused."""
        left = [runner for runner in self._runners_for(training) if all(runner.step is not step for step in refused)]
        return next((runner for runner in left if runner.step.takes(shapes)), None)

    def _without(self, runner: GraphRunner, input_names: set[str], names: Sequence[str]) -> GraphRunner:
        """Returns a runner for the part of a graph that computes some outputs from some inputs."""
        key = (id(runner), tuple(names))
        if key not in self._pruned:
            self._pruned[key] = self._make_runner(runner.step.pruned(names))
            self._pruned[key].whole = runner.step
        missing = [spec.name for spec in self._pruned[key].step.inputs if spec.name not in input_names]
        if missing:
            raise TypeError(f"inputs {missing} are missing: outputs {list(names)} need them")
        return self._pruned[key]

    def _make_runner(self, step: Step) -> GraphRunner:
        """Returns a runner of a graph on the executor's tensors.

        Raises:
            RuntimeError: If the graph can't be loaded, or takes a buffer that has become a tensor meanwhile.
        """
        tensors = {**self.parameters, **self.buffers, **self.outside}
        late = [name for name in step.state if name not in tensors]
        if late:
            raise RuntimeError(
                f"the buffers {late} were None when the first step was exported, and are tensors now: give them values "
                "before, for example by a call of the model, in a new trainer that loads this one's state_dict()"
            )
        state = {name: tensors[name] for name in step.state}
        try:
            return self.engine.runner(step, state)
        except Exception as error:
            whose = step.kernels.removesuffix("'s")
            raise RuntimeError(f"{whose} can't load the {step.kind} graph: {error}") from error


class Gradients:
    """Gradients by parameter name.

    Runs add to them until :meth:`reset`, after which the next run overwrites them. The gradients that an update has
    used can be read until that run.

    Args:
        parameters: All parameters by name.
        device: The device of all tensors.
        memory: Required memory of gradients, by parameter name; other gradients may be anywhere.

    Attributes:
        tensors: The memory of each gradient; only the contents of those from :meth:`present` are valid.
        stays: Whether runs write into memory that was bound earlier, so that the tensors must not move.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        device: torch.device,
        memory: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._parameters, self._nothing = parameters, torch.empty(0, device=device)
        self._memory = {} if memory is None else dict(memory)
        self.tensors: dict[str, torch.Tensor] = dict(self._memory)
        self.stays = False
        self._present: set[str] = set()
        self._scratch: dict[str, torch.Tensor] = {}
        self._reset = True
        self._used = False

    def memory(self, name: str) -> torch.Tensor:
        """Returns the tensor of a gradient; creates it if it does not exist or was released."""
        gradient = self.tensors.get(name)
        if gradient is None or gradient.shape != self._parameters[name].shape:
            gradient = self.tensors[name] = torch.zeros_like(self._parameters[name])
        return gradient

    def destinations(self, names: Iterable[str], fresh: bool) -> dict[str, torch.Tensor]:
        """Returns the tensors that a run writes: the gradients, or scratch tensors to add to them."""
        if fresh:
            return {name: self.memory(name) for name in names}
        for name in names:
            if name not in self._scratch:
                self._scratch[name] = torch.empty_like(self.memory(name))
        return {name: self._scratch[name] for name in names}

    def begin(self) -> bool:
        """Releases used gradients, so that the next run can use their memory; returns whether it overwrites them."""
        if not self._reset and self._present:
            return False
        self._used = False
        if not self.stays:
            # Empty tensors free the memory, while the names stay in their order.
            self.tensors = dict.fromkeys(self.tensors, self._nothing) | self._memory
        return True

    def move_out(self, places: Iterable[torch.Tensor]) -> None:
        """Copies the gradients that are in one of some places, which the next run overwrites."""
        known = set(map(id, places))
        self.tensors |= {name: value.clone() for name, value in self.tensors.items() if id(value) in known}

    def take(self, written: Mapping[str, torch.Tensor], fresh: bool) -> None:
        """Replaces the gradients by a run's results, or adds them; they are in :meth:`destinations` or new memory."""
        if fresh and not self._memory:
            self.tensors |= written
            self._present = set(written)
        elif fresh:
            # Gradients with required memory stay there; those that a run has not written there are copied.
            copied = [name for name in written if name in self._memory and written[name] is not self._memory[name]]
            if copied:
                torch._foreach_copy_([self._memory[name] for name in copied], [written[name] for name in copied])
            self.tensors |= {**written, **{name: self._memory[name] for name in copied}} if copied else written
            self._present = set(written)
        else:
            present = [name for name in written if name in self._present]
            if present:
                torch._foreach_add_([self.tensors[name] for name in present], [written[name] for name in present])
            for name in written.keys() - self._present:
                self.memory(name).copy_(written[name])
                self._present.add(name)
        self._reset = False

    def reset(self, used: bool = False) -> None:
        """Makes the next run overwrite the gradients; until then, those that an update has ``used`` can be read."""
        self._reset, self._used = True, used or self._used

    def present(self) -> dict[str, torch.Tensor]:
        """Returns the gradients since the last reset; empty right after one."""
        if not self._reset and len(self._present) == len(self.tensors):
            return dict(self.tensors)
        return {} if self._reset else self._present_tensors()

    def hold(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Takes the gradients that an update uses instead of the present ones; empty invalidates the gradients."""
        self.tensors |= gradients
        self._present = set(gradients)

    def used(self) -> dict[str, torch.Tensor]:
        """Returns the gradients that the last update used, divided and clipped; empty from the next run on."""
        return self._present_tensors() if self._reset and self._used else {}

    def restore(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Sets the present gradients; empty for none."""
        memory = {name: self.memory(name) for name in gradients}  # all, before the first value changes
        for name, value in gradients.items():
            memory[name].copy_(value)
        self.arrange()
        self._present = set(gradients)
        self._reset, self._used = not gradients, False

    def arrange(self) -> None:
        """Puts the tensors in the order of the parameters.

        Their norm is a sum whose rounding depends on the order, so it must be the same in all processes, and after a
        checkpoint was loaded, which may create gradients before there is a graph.
        """
        self.tensors = {name: self.tensors[name] for name in self._parameters if name in self.tensors}

    def _present_tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if name in self._present}
