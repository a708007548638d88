"""The forward and backward pass of a call, as a function of autograd."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..core.errors import ValueBranchError
from ..engine.programs.runner import ProgramRunner, Progress
from ..engine.runner import GraphRunner, Kind, check_branches, evaluated, with_probabilities
from ..engine.torch_memory import TorchMemory, shaped
from ..export.torch.capture.eager import random_state, set_random_state
from ..step import SIZES, Step

__all__ = ["Call", "Passes"]

_DDP: Any = torch.nn.parallel.DistributedDataParallel
Tensors = Sequence[torch.Tensor]
CheckGradients = Callable[[Sequence[torch.Tensor | None], Sequence[torch.Tensor | None]], None]
Kinds = Sequence[tuple[torch.Size, torch.dtype]]


class Passes:
    """The graphs of a call. Parameters, buffers and inputs are *values*, in the order of the forward pass's inputs.

    Args:
        forward: The forward pass.
        backward: The backward passes, the one that takes most gradients last; none if nothing requires grad.
        load: Makes the runner of a pass.
        memory: The memory of all tensors.

    Attributes:
        step: The forward pass.
        memory: As given.
        runner: The forward pass's runner.
        outputs: The number of tensors that the module returns.
        saved: What the backward pass needs: whether it is a value, otherwise a result of the forward pass; its place.
        trained: Places of the values that get gradients.
        differentiable: Places of the outputs that have gradients.
        updates: The place of each value that the call changes, and of its new value among the results.
        conditions: Name of a condition -> its place among the results.
    """

    def __init__(
        self, forward: Step, backward: Sequence[Step], load: Callable[[Step], GraphRunner], memory: TorchMemory
    ) -> None:
        self.step, self.memory = forward, memory
        self.runner = load(forward)
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
        self.differentiable: list[int] = []
        self._backward: list[_Backward] = []
        if backward:
            whole = backward[-1]
            needed = [spec.name for spec in whole.inputs if spec.name in values or spec.name in results]
            self.saved = [(name in values, values[name] if name in values else results[name]) for name in needed]
            names = {forward.state[name]: ("gradients", name) for name in whole.gradients}
            names |= {name: ("input_gradients", name) for name in whole.input_gradients}
            self.trained = [values[name] for name in names]
            self.differentiable = [results[name] for name in whole.tangents]
            outputs = [spec.name for spec in forward.outputs]
            self._backward = [_Backward(step, needed, outputs, list(names.values()), load) for step in backward]

    def backward(self, given: frozenset[int]) -> _Backward:
        """Returns the smallest backward pass that takes the gradients of some outputs."""
        return next(backward for backward in self._backward if given <= backward.takes)

    @functools.cached_property
    def groups(self) -> list[list[int]]:
        """The trained values in the order in which the backward pass computes their gradients, as groups."""
        return self._backward[-1].groups()


class _Backward:
    """A backward pass.

    Args:
        step: The backward pass.
        saved: Names of what it may need of the forward pass, in the order in which it is given.
        outputs: Names of the module's outputs.
        trained: The values that may get gradients, in order: the field of a step that has the gradient, and the key.
        load: Makes the runner of a pass.

    Attributes:
        takes: Places of the outputs whose gradients it takes.
    """

    def __init__(
        self,
        step: Step,
        saved: Sequence[str],
        outputs: Sequence[str],
        trained: Sequence[tuple[str, str]],
        load: Callable[[Step], GraphRunner],
    ) -> None:
        self._step, self._load = step, load
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
        # Of each trained value: the place of its gradient, and the outputs that it depends on.
        self._results: list[tuple[int | None, frozenset[int]]] = [
            (None, frozenset())
            if name is None
            else (order.index(name), frozenset(map(outputs.index, step.depends[name])))
            for name in self._names
        ]
        self._trained = [self._names.index(name) for name in order]

    @functools.cached_property
    def _runner(self) -> GraphRunner:
        return self._load(self._step)

    def groups(self) -> list[list[int]]:
        """Returns the trained values, grouped by the program that computes their gradients, in the order of these."""
        if not isinstance(self._runner, ProgramRunner):
            return [list(range(len(self._results)))]
        made = {name: number for number, stage in enumerate(self._runner.stages) for name in stage.outputs}
        found: dict[int, list[int]] = {}
        for place, name in enumerate(self._names):
            found.setdefault(made.get(name or "", 0), []).append(place)
        return [found[number] for number in sorted(found)]

    def values(self, saved: Tensors, gradients: Mapping[int, torch.Tensor], call: Call, outputs: Kinds) -> list[Any]:
        """Returns what the pass takes.

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

    def run(self, values: list[Any], given: Collection[int], trained: Kinds) -> list[torch.Tensor | None]:
        """Returns the gradients of the trained values; None for those that no given gradient reaches.

        Args:
            values: What the pass takes.
            given: Places of the outputs whose gradients are given.
            trained: Shapes and dtypes of the trained values.
        """
        found = self._runner.call(values, lambda: [trained[place] for place in self._trained])
        return [None if at is None or depends.isdisjoint(given) else found[at] for at, depends in self._results]

    def run_in_stages(
        self, values: list[Any], given: Collection[int]
    ) -> Callable[[Sequence[int]], list[torch.Tensor | None]]:
        """Returns a function that returns the gradients of some trained values, and runs only as far as they need."""
        assert isinstance(self._runner, ProgramRunner)
        progress = Progress(self._runner, values)

        def take(places: Sequence[int]) -> list[torch.Tensor | None]:
            names = {place: name for place in places if (name := self._names[place]) is not None}
            found = dict(zip(names, progress.take(list(names.values())), strict=True))
            return [None if self._results[place][1].isdisjoint(given) else found[place] for place in places]

        return take


class Call:
    """A call with inputs of some shapes: runs the passes.

    Args:
        passes: The graphs.
        shapes: Shapes of the inputs, by name.

    Attributes:
        passes: As given.
        sizes: The tensor for :data:`SIZES`.
        trained: Shapes and dtypes of the trained values, known from the first call on.
    """

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

    def __call__(self, values: list[torch.Tensor], check: CheckGradients | None = None) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that the module returns.

        Args:
            values: Parameters, buffers and inputs.
            check: Receives the gradients of the outputs and of the trained values in each backward pass, and raises to
                discard them.

        Raises:
            ValueBranchError: If the inputs take another branch of the module than the graph; nothing has changed then.
        """
        if not (self._random and self.passes.conditions):
            return self._run(values, check)
        device = self.passes.memory.device
        state = random_state(device)
        try:
            return self._run(values, check)
        except ValueBranchError:  # what runs instead draws the numbers again
            set_random_state(device, state)
            raise

    def _run(self, values: list[torch.Tensor], check: CheckGradients | None) -> tuple[torch.Tensor, ...]:
        if self._random:
            probabilities = {name: values[place] for name, place in self._probabilities.items()}
            drawn = self.passes.memory.draw(with_probabilities(self._random, probabilities), None)
            if isinstance(self.passes.runner, ProgramRunner):  # which takes bfloat16, unlike ONNX Runtime
                pairs = zip(drawn, self._random, strict=True)
                drawn = [value.to(getattr(torch, spec.dtype)) for value, (spec, _) in pairs]
            values += drawn
        trained = [values[place] for place in self.passes.trained]
        if not trained:
            return self.forward(values)[0]
        found: tuple[torch.Tensor, ...]
        if check is not None:
            found = _Checked.apply(self, values, check, *trained)  # type: ignore[no-untyped-call]
            return found
        # Inside DistributedDataParallel, gradients are handed on while the backward pass runs.
        groups = [] if _DDP._active_ddp_module is None else self.passes.groups
        if len(groups) < 2:
            found = _Function.apply(self, values, *trained)  # type: ignore[no-untyped-call]
            return found
        stages, token = _Stages(), torch.empty(0)
        for group in reversed(groups[1:]):
            token = _Later.apply(stages, group, token, *(trained[at] for at in group))  # type: ignore[no-untyped-call]
        first = [trained[at] for at in groups[0]]
        found = _First.apply(self, values, stages, groups[0], token, *first)  # type: ignore[no-untyped-call]
        return found

    def forward(self, values: Tensors) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """Runs the forward pass; returns the outputs, and what the backward pass needs.

        Raises:
            ValueBranchError: If the inputs take another branch of the module than the graph; nothing has changed then.
        """
        passes = self.passes
        found = passes.runner.call(list(values), lambda: self._kinds(values))
        if passes.conditions:
            check_branches(passes.step, {name: found[place] for name, place in passes.conditions.items()})
        saved = [values[place] if is_value else found[place] for is_value, place in passes.saved]
        if passes.updates:
            changed = {place for place, _ in passes.updates}
            for at, (is_value, place) in enumerate(passes.saved):
                if is_value and place in changed:
                    saved[at] = saved[at].clone()  # the backward pass reads what was there before
            for place, new in passes.updates:
                values[place].detach().copy_(found[new])
        return tuple(found[: passes.outputs]), saved

    def _kinds(self, values: Tensors) -> list[Kind]:
        """Returns the kinds of all results."""
        updates = _kinds([values[place] for place, _ in self.passes.updates])
        return [*self._results, *updates, *([((), torch.bool)] * len(self.passes.conditions))]


class _Function(torch.autograd.Function):
    """A call whose backward pass runs at once."""

    @staticmethod
    def forward(ctx: Any, call: Call, values: Tensors, *trained: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call.trained = call.trained or _kinds(trained)
        return _forward(ctx, call, values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        backward, values, given = _begin(ctx, gradients)
        return (None, None, *backward.run(values, given, ctx.call.trained))


class _Checked(torch.autograd.Function):
    """A call whose gradients are checked before autograd gets them."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, values: Tensors, check: CheckGradients, *trained: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.check = check
        return _Function.forward(ctx, call, values, *trained)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        found = _Function.backward(ctx, *gradients)[2:]
        ctx.check(gradients, found)
        return (None, None, None, *found)


@dataclasses.dataclass
class _Stages:
    """A backward pass that runs in stages, each of which is a function of autograd: it gets the gradients early."""

    take: Callable[[Sequence[int]], list[torch.Tensor | None]] | None = None


class _First(torch.autograd.Function):
    """A call, and the first stage of its backward pass; the gradient of the token lets the next stage run."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, values: Tensors, stages: _Stages, group: list[int], *rest: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.stages, ctx.group = stages, group
        return _forward(ctx, call, values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        backward, values, given = _begin(ctx, gradients)
        ctx.stages.take = backward.run_in_stages(values, given)
        return (None, None, None, None, torch.empty(0), *ctx.stages.take(ctx.group))


class _Later(torch.autograd.Function):
    """A later stage."""

    @staticmethod
    def forward(ctx: Any, stages: _Stages, group: list[int], *rest: torch.Tensor) -> torch.Tensor:
        ctx.stages, ctx.group = stages, group
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, torch.empty(0), *ctx.stages.take(ctx.group))


def _forward(ctx: Any, call: Call, values: Tensors) -> tuple[torch.Tensor, ...]:
    outputs, saved = call.forward(values)
    ctx.save_for_backward(*saved)
    ctx.set_materialize_grads(False)
    ctx.call, ctx.outputs = call, _kinds(outputs)
    differentiable = call.passes.differentiable
    if len(differentiable) < len(outputs):
        fixed = [value for place, value in enumerate(outputs) if place not in differentiable]
        ctx.mark_non_differentiable(*fixed)
    return outputs


def _begin(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[_Backward, list[Any], Collection[int]]:
    """Returns a backward pass, what it takes, and the places of the outputs whose gradients are given."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "ORTModule can't be differentiated twice: its backward pass is a graph without a backward pass of its own. "
            "Leave out create_graph=True, or call the module inside, model.module, for this step"
        )
    given = {place: gradient for place, gradient in enumerate(gradients) if gradient is not None}
    backward = ctx.call.passes.backward(frozenset(given))
    values = backward.values(ctx.saved_tensors, given, ctx.call, ctx.outputs)
    ctx.maybe_clear_saved_tensors()  # unless the graph is retained, so that the pass frees what it has read
    return backward, values, given.keys()


def _kinds(values: Tensors) -> list[tuple[torch.Size, torch.dtype]]:
    return [(value.shape, value.dtype) for value in values]
