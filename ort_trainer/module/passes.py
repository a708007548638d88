"""The forward and backward pass of a call, as a function of autograd."""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..capture.eager import random_state, set_random_state
from ..core.errors import ValueBranchError
from ..engine.runner import GraphRunner, Kind, check_branches, check_failure, evaluated, with_probabilities
from ..engine.runners import Runners
from ..engine.torch_memory import shaped
from ..engine.turns import Lane, Race
from ..step import SIZES, Step

_DDP: Any = torch.nn.parallel.DistributedDataParallel
Tensors = Sequence[torch.Tensor]
CheckGradients = Callable[[Mapping[int, torch.Tensor], list["torch.Tensor | None"]], list["torch.Tensor | None"]]
Run = Callable[[], tuple[Tensors, list[torch.Tensor]]]
Kinds = Sequence[tuple[torch.Size, torch.dtype]]


def reduces_early() -> bool:
    """Returns whether DistributedDataParallel calls the module, which reduces gradients during the backward pass."""
    return _DDP._active_ddp_module is not None


class Passes:
    """The graphs of a call. Parameters, buffers and inputs are *values*, in the order of the forward pass's inputs.

    Args:
        forward: The forward pass.
        backward: The backward passes: perhaps one for the gradient of a single output, such as the loss, and last the
            one that takes all gradients; empty if nothing requires grad.
        runners: Makes the runner of a pass.

    Attributes:
        step: The forward pass.
        runners: As given.
        runner: The forward pass's runner.
        outputs: The number of tensors that the module returns.
        saved: What the backward pass needs: whether each is a value (or a result of the forward pass), and its place.
        trained: Places of the values that get gradients.
        parts: Places of the outputs that require grad, in parts that can be differentiated one after the other.
        updates: The place of each value that the call changes, and the place of its new value among the results.
        conditions: Name of a condition -> its place among the results.
    """

    def __init__(self, forward: Step, backward: Sequence[Step], runners: Runners) -> None:
        self.step, self.runners = forward, runners
        self.runner = runners.runner(forward)
        self.outputs = len(forward.outputs)
        values = {name: place for place, name in enumerate(self.runner.inputs)}
        results = {name: place for place, name in enumerate(self.runner.outputs)}
        updated = {
            **{forward.state[name]: new for name, new in forward.buffer_updates.items()},
            **forward.input_updates,
        }
        self.conditions = {name: results[name] for name in forward.assumptions}
        self.updates = [(values[name], results[new]) for name, new in updated.items()]
        self.saved: list[tuple[bool, int]] = []
        self.trained: list[int] = []
        differentiable = {results[name]: part for name, part in forward.differentiable.items()}
        parts = dict.fromkeys(differentiable.values())
        self.parts = [[place for place, other in differentiable.items() if other == part] for part in parts]
        self._backward: list[_Backward] = []
        if backward:
            whole = backward[-1]
            needed = [spec.name for spec in whole.inputs if spec.name in values or spec.name in results]
            self.saved = [(name in values, values[name] if name in values else results[name]) for name in needed]
            names = {forward.state[name]: ("gradients", name) for name in whole.gradients}
            names |= {name: ("input_gradients", name) for name in whole.input_gradients}
            self.trained = [values[name] for name in names]
            outputs = [spec.name for spec in forward.outputs]
            self._backward = [_Backward(step, needed, outputs, list(names.values()), runners) for step in backward]

    def backward(self, places: frozenset[int]) -> _Backward:
        """Returns the smallest backward pass that takes the gradients of the outputs at these places."""
        return next((backward for backward in self._backward if places <= backward.takes), self._backward[-1])

    @functools.cached_property
    def reached(self) -> list[set[int]]:
        """For each part, which of the trained values get gradients from its outputs."""
        depends = self._backward[-1].depends
        return [{at for at, outputs in enumerate(depends) if not outputs.isdisjoint(part)} for part in self.parts]

    @functools.cached_property
    def groups(self) -> list[list[int]]:
        """The trained values as groups, in the order in which the backward pass computes their gradients."""
        return self._backward[-1].groups()


class _Backward:
    """A backward pass.

    Args:
        step: The backward pass.
        saved: Names of what the forward pass saves, in order; this pass may need only some of it.
        outputs: Names of the module's outputs.
        trained: The values that may get gradients, in order: the field of ``Step`` that has the gradient, and its key.
        runners: Makes the runner of a pass.

    Attributes:
        takes: Places of the outputs whose gradients it takes.
    """

    def __init__(
        self,
        step: Step,
        saved: Sequence[str],
        outputs: Sequence[str],
        trained: Sequence[tuple[str, str]],
        runners: Runners,
    ) -> None:
        self._step, self._runners = step, runners
        places = {name: place for place, name in enumerate(saved)}
        tangents = {name: outputs.index(output) for output, name in step.tangents.items()}
        self.takes = frozenset(tangents.values())
        names = [spec.name for spec in step.inputs]
        self._tangents = [(at, tangents[name]) for at, name in enumerate(names) if name in tangents]
        self._saved = [(at, places[name]) for at, name in enumerate(names) if name in places]
        self._sizes = names.index(SIZES) if SIZES in names else None
        self._count = len(names)
        order = [*step.gradients.values(), *step.input_gradients.values()]
        self._names: list[str | None] = [getattr(step, field).get(key) for field, key in trained]
        # For each trained value: the place of its gradient, and the outputs whose gradients it depends on.
        self._results: list[tuple[int | None, frozenset[int]]] = [
            (None, frozenset())
            if name is None
            else (order.index(name), frozenset(map(outputs.index, step.depends[name])))
            for name in self._names
        ]
        self._trained = [self._names.index(name) for name in order]

    @functools.cached_property
    def _runner(self) -> GraphRunner:
        return self._runners.runner(self._step)

    @property
    def depends(self) -> list[frozenset[int]]:
        """For each trained value, the places of the outputs whose gradients its own depends on."""
        return [depends for _, depends in self._results]

    def groups(self) -> list[list[int]]:
        """Returns the trained values grouped by the stage that computes their gradients, in the stages' order."""
        stage_of = {name: number for number, stage in enumerate(self._runner.stages) for name in stage.outputs}
        groups: dict[int, list[int]] = {}
        for place, name in enumerate(self._names):
            groups.setdefault(stage_of.get(name or "", 0), []).append(place)
        return [groups[number] for number in sorted(groups)]

    def values(
        self, saved: Tensors, gradients: Mapping[int, torch.Tensor], call: SizedPasses, outputs: Kinds
    ) -> list[Any]:
        """Returns the inputs of the pass.

        Args:
            saved: What the forward pass has saved.
            gradients: Gradients by the place of their output.
            call: The call.
            outputs: Shapes and dtypes of all outputs, for zeros in place of gradients that are not given.
        """
        values: list[Any] = [None] * self._count
        for at, place in self._saved:
            values[at] = saved[place]
        for at, place in self._tangents:
            gradient = gradients.get(place)
            if gradient is None:
                shape, dtype = outputs[place]
                gradient = torch.zeros(shape, dtype=dtype)
            values[at] = gradient.contiguous()
        if self._sizes is not None:
            values[self._sizes] = call.sizes
        return values

    def run(self, values: list[Any], outputs: Collection[int], trained: Kinds) -> list[torch.Tensor | None]:
        """Returns the gradients of the trained values; None for those that these outputs do not depend on.

        Args:
            values: The inputs of the pass.
            outputs: Places of the outputs whose gradients autograd has passed.
            trained: Shapes and dtypes of the trained values.
        """
        gradients = self._runner.call(values, lambda: [trained[place] for place in self._trained])
        return [None if at is None or depends.isdisjoint(outputs) else gradients[at] for at, depends in self._results]

    def run_in_stages(
        self, values: list[Any], outputs: Collection[int]
    ) -> Callable[[Sequence[int]], list[torch.Tensor | None]]:
        """Returns a function of places, which runs only as far as the gradients of these trained values need."""
        progress = PartialRun(self._runner, values)

        def take(places: Sequence[int]) -> list[torch.Tensor | None]:
            names = {place: name for place in places if (name := self._names[place]) is not None}
            gradients = dict(zip(names, progress.take(list(names.values())), strict=True))
            return [None if self._results[place][1].isdisjoint(outputs) else gradients[place] for place in places]

        return take


class PartialRun:
    """A run of a graph that advances only as far as the requested results need.

    Args:
        runner: The runner of the graph.
        values: The values of the runner's inputs.
    """

    def __init__(self, runner: GraphRunner, values: Sequence[torch.Tensor]) -> None:
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
            outputs = stage.run(values)
            self._values.update(zip(stage.outputs, outputs, strict=True))
        later = {name for stage in stages[self._next :] for name in stage.inputs}
        return [self._values[name] if name in later else self._values.pop(name) for name in names]


class SizedPasses:
    """Runs the passes for calls with inputs of some shapes.

    Args:
        passes: The graphs.
        shapes: Shapes of the inputs, by name.

    Attributes:
        passes: As given.
        sizes: The tensor for :data:`SIZES`.
        trained: Shapes and dtypes of the trained values, known from the first call on.
        took: Called with the seconds that a backward pass took; None if nobody wants to know.
    """

    took: Callable[[float], None] | None = None

    def __init__(self, passes: Passes, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.passes = passes
        sizes = passes.step.sizes(shapes)
        self.sizes = shaped(sizes.values())
        self._random = [(spec, evaluated(spec.shape, sizes) or ()) for spec in passes.step.random]
        places = {name: place for place, name in enumerate(passes.runner.inputs)}
        self._probabilities = {s.probability: places[s.probability] for s in passes.step.random if s.probability}
        specs = (*passes.step.outputs, *passes.step.saved)
        self._results: list[Kind] = [(evaluated(spec.shape, sizes), getattr(torch, spec.dtype)) for spec in specs]
        self.trained: Kinds = ()

    @property
    def shapes(self) -> list[Sequence[int] | None]:
        """The shapes of the results, None where only the run shows it."""
        return [shape for shape, _ in self._results]

    def __call__(self, values: list[torch.Tensor], check: CheckGradients | None = None) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that the module returns.

        Args:
            values: Parameters, buffers and inputs.
            check: Receives the gradients of the outputs, by their places, and those of the trained values in each
                backward pass, and returns those to use, or raises to discard them.

        Raises:
            ValueBranchError: If the inputs take another branch of the module than the graph; nothing has changed then.
        """
        if not (self._random and self.passes.conditions):
            return self._run(values, check)
        device = self.passes.runners.memory.device
        state = random_state(device)
        try:
            return self._run(values, check)
        except ValueBranchError:  # another graph, or PyTorch, runs instead and must draw the same numbers
            set_random_state(device, state)
            raise

    def _run(self, values: list[torch.Tensor], check: CheckGradients | None) -> tuple[torch.Tensor, ...]:
        """Draws random inputs and runs the forward pass, as a function of autograd if anything is trained."""
        if self._random:
            probabilities = {name: values[place] for name, place in self._probabilities.items()}
            values += self.passes.runner.draw(with_probabilities(self._random, probabilities))
        trained = [values[place] for place in self.passes.trained]
        if not trained:
            return self.forward(values)[0]
        parts, run = self.passes.parts, functools.partial(self.forward, values)
        if len(parts) > 1:
            return self._run_in_parts(parts, run, check, trained)
        outputs: tuple[torch.Tensor, ...]
        # DistributedDataParallel reduces the first gradients while the backward pass computes the others: see _Stages.
        groups = self.passes.groups if reduces_early() and check is None else []
        if len(groups) < 2:
            outputs = _Function.apply(self, run, None, check, *trained)  # type: ignore[no-untyped-call]
            return outputs
        stages, token = _Stages(), torch.empty(0)
        for group in reversed(groups[1:]):
            token = _Later.apply(stages, group, token, *(trained[at] for at in group))  # type: ignore[no-untyped-call]
        first = [trained[at] for at in groups[0]]
        outputs = _First.apply(self, run, stages, groups[0], token, *first)  # type: ignore[no-untyped-call]
        return outputs

    def _run_in_parts(
        self, parts: Sequence[Sequence[int]], run: Run, check: CheckGradients | None, trained: Tensors
    ) -> tuple[torch.Tensor, ...]:
        """Runs the forward pass, as several functions of autograd, each with the outputs of one part."""
        with torch.no_grad():
            outputs, saved = run()
        results = list(outputs)
        for places, reached in zip(parts, self.passes.reached, strict=True):
            # Autograd also visits what a value was computed from if its gradient is None.
            taken = [value if at in reached else value.detach() for at, value in enumerate(trained)]
            of_part = _Function.apply(self, lambda: (outputs, saved), places, check, *taken)  # type: ignore[no-untyped-call]
            for place, output in zip(places, of_part, strict=True):
                results[place] = output
        return tuple(results)

    def forward(self, values: Tensors) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """Runs the forward pass and changes buffers and inputs; returns the outputs, and what the backward pass needs.

        Raises:
            ValueBranchError: If the inputs take another branch of the module than the graph; nothing has changed then.
        """
        passes = self.passes
        try:
            results = passes.runner.call(list(values), lambda: self._kinds_of_results(values))
        except (IndexError, RuntimeError) as error:
            check_failure(passes.step, error)
            raise
        if passes.conditions:
            check_branches(passes.step, {name: results[place] for name, place in passes.conditions.items()})
        saved = [values[place] if is_value else results[place] for is_value, place in passes.saved]
        if passes.updates:
            changed = {place for place, _ in passes.updates}
            for at, (is_value, place) in enumerate(passes.saved):
                if is_value and place in changed:
                    saved[at] = saved[at].clone()  # the backward pass needs the value from before the change
            for place, new in passes.updates:
                values[place].detach().copy_(results[new])
        return tuple(results[: passes.outputs]), saved

    def _kinds_of_results(self, values: Tensors) -> list[Kind]:
        updates = _kinds([values[place] for place, _ in self.passes.updates])
        return [*self._results, *updates, *([((), torch.bool)] * len(self.passes.conditions))]


class CallsInTurns:
    """Runs calls with inputs of some shapes by two pairs of passes in turns; see :class:`Race`.

    A call takes the time of its forward and its backward pass. One without a backward pass is not counted.

    Args:
        own: Calls on the kernels that ran until now.
        rival: Calls on others.
        race: Gets the times.
    """

    def __init__(self, own: SizedPasses, rival: SizedPasses, race: Race) -> None:
        self._calls, self._lane = (own, rival), Lane(race)

    def __call__(self, values: list[torch.Tensor], check: CheckGradients | None = None) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that the module returns; see :class:`SizedPasses`."""
        turn = self._lane.turn
        call = copy.copy(self._calls[turn])  # the backward pass belongs to this call
        start = time.perf_counter()
        outputs = call(values, check)
        forward = time.perf_counter() - start
        call.took = lambda backward: self._lane.end(turn, forward + backward)
        return outputs


class _Function(torch.autograd.Function):
    """A call, or some of its outputs, whose backward pass runs at once."""

    @staticmethod
    def forward(
        ctx: Any,
        call: SizedPasses,
        run: Run,
        places: Sequence[int] | None,
        check: CheckGradients | None,
        *trained: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        call.trained = call.trained or _kinds(trained)
        ctx.check = check
        return _forward(ctx, call, run, places)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        start = time.perf_counter()
        backward, values, gradient_of = _begin(ctx, gradients)
        results = backward.run(values, gradient_of.keys(), ctx.call.trained)
        if ctx.call.took is not None:
            ctx.call.took(time.perf_counter() - start)
        if ctx.check is not None:
            results = ctx.check(gradient_of, results)
        return (None, None, None, None, *results)


@dataclasses.dataclass
class _Stages:
    """A backward pass in stages, each a function of autograd, so that autograd gets each group of gradients early::

        gradients of the outputs -> _First -> token -> _Later -> token -> _Later -> ...
                                      |                  |                  |
                                   groups[0]          groups[1]          groups[2]       gradients of trained values

    The tokens are empty tensors. As each stage's token depends on the next stage, autograd runs the stages in order.
    """

    take: Callable[[Sequence[int]], list[torch.Tensor | None]] | None = None


class _First(torch.autograd.Function):
    """A call, and the first stage of its backward pass; the token's gradient starts the next stage."""

    @staticmethod
    def forward(
        ctx: Any, call: SizedPasses, run: Run, stages: _Stages, group: list[int], *rest: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.stages, ctx.group = stages, group
        return _forward(ctx, call, run)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        backward, values, gradient_of = _begin(ctx, gradients)
        ctx.stages.take = backward.run_in_stages(values, gradient_of.keys())
        return (None, None, None, None, torch.empty(0), *ctx.stages.take(ctx.group))


class _Later(torch.autograd.Function):
    """A later stage of the backward pass; its forward pass only makes a token."""

    @staticmethod
    def forward(ctx: Any, stages: _Stages, group: list[int], *rest: torch.Tensor) -> torch.Tensor:
        ctx.stages, ctx.group = stages, group
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, torch.empty(0), *ctx.stages.take(ctx.group))


def _forward(ctx: Any, call: SizedPasses, run: Run, places: Sequence[int] | None = None) -> tuple[torch.Tensor, ...]:
    """Runs the forward pass of a function of autograd, and saves what its backward pass needs.

    Args:
        ctx: Of the function.
        call: The call.
        run: Runs the forward pass.
        places: The places of the outputs to return; None for all.
    """
    outputs, saved = run()
    ctx.save_for_backward(*saved)
    ctx.identities = [_identity(value) for (given, _), value in zip(call.passes.saved, saved, strict=True) if given]
    ctx.set_materialize_grads(False)  # an output without a gradient gets None, which chooses a smaller backward pass
    ctx.call, ctx.outputs = call, _kinds(outputs)
    ctx.places = range(len(outputs)) if places is None else places
    # Autograd forbids changes in place of views that a function makes; a detached one is none.
    returned = [value.detach() if value._is_view() else value for value in map(outputs.__getitem__, ctx.places)]
    if places is None:
        (differentiable,) = call.passes.parts or ((),)
        if len(differentiable) < len(returned):
            ctx.mark_non_differentiable(*(v for place, v in enumerate(returned) if place not in differentiable))
    return tuple(returned)


def _begin(
    ctx: Any, gradients: Sequence[torch.Tensor | None]
) -> tuple[_Backward, list[Any], Mapping[int, torch.Tensor]]:
    """Returns a backward pass, its inputs, and the gradients that autograd has passed, by the places of the outputs."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "ORTModule can't be differentiated twice: its backward pass is a graph without a backward pass of its own. "
            "Leave out create_graph=True, or call the module inside, model.module, for this step"
        )
    pairs = zip(ctx.places, gradients, strict=True)
    gradient_of = {place: gradient for place, gradient in pairs if gradient is not None}
    backward = ctx.call.passes.backward(frozenset(gradient_of))
    saved = ctx.saved_tensors
    _check_unexchanged(ctx.call.passes, saved, ctx.identities)
    values = backward.values(saved, gradient_of, ctx.call, ctx.outputs)
    # So that the pass can free each tensor after its last use; with retain_graph=True it does nothing.
    ctx.maybe_clear_saved_tensors()
    return backward, values, gradient_of


def _identity(value: torch.Tensor) -> tuple[int, int]:
    return id(value), value.untyped_storage()._cdata


def _check_unexchanged(passes: Passes, saved: Tensors, identities: Sequence[tuple[int, int]]) -> None:
    """Checks that no parameter, buffer or input got another memory since the forward pass.

    Which of both PyTorch's backward pass would read depends on the operator. If autograd, or a hook on what it saves,
    has kept another object, that one is read.
    """
    given = [value for (is_given, _), value in zip(passes.saved, saved, strict=True) if is_given]
    for value, (number, storage) in zip(given, identities, strict=True):
        if id(value) == number and value.untyped_storage()._cdata != storage:
            raise RuntimeError(
                f"a parameter, buffer or input of shape {list(value.shape)} got other memory (v.data = ..., v.set_()) "
                "between the forward and the backward pass, which needs its value: exchange it after backward()"
            )


def _kinds(values: Tensors) -> list[tuple[torch.Size, torch.dtype]]:
    """Returns the shapes and dtypes of tensors."""
    return [(value.shape, value.dtype) for value in values]
