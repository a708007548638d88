"""The forward and backward pass of a call, as a function of autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..core.dims import evaluate
from ..engine.runner import GraphRunner, Kind
from ..engine.torch_memory import TorchMemory
from ..step import SIZES, Step

__all__ = ["Call", "Passes"]

Tensors = Sequence[torch.Tensor]
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
        found = [getattr(step, field).get(key) for field, key in trained]
        # Of each trained value: its place among the results, and the outputs that its gradient depends on.
        self._results = [
            None if name is None else (order.index(name), frozenset(map(outputs.index, step.depends[name])))
            for name in found
        ]
        self._trained = [found.index(name) for name in order]

    @functools.cached_property
    def _runner(self) -> GraphRunner:
        return self._load(self._step)

    def run(
        self, saved: Tensors, gradients: Mapping[int, torch.Tensor], call: Call, outputs: Kinds, trained: Kinds
    ) -> list[torch.Tensor | None]:
        """Returns the gradients of the trained values; None for those that no given gradient reaches.

        Args:
            saved: What the forward pass has saved.
            gradients: Gradients by the place of their output.
            call: The call.
            outputs: Shapes and dtypes of all outputs, for zeros in place of gradients that are not given.
            trained: Shapes and dtypes of the trained values.
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
        found = self._runner.call(values, lambda: [trained[place] for place in self._trained])
        return [
            None if result is None or result[1].isdisjoint(gradients) else found[result[0]] for result in self._results
        ]


class Call:
    """A call with inputs of some shapes: runs the passes.

    Args:
        passes: The graphs.
        shapes: Shapes of the inputs, by name.

    Attributes:
        passes: As given.
        sizes: The tensor for :data:`SIZES`.
    """

    def __init__(self, passes: Passes, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.passes = passes
        sizes = passes.step.sizes(shapes)
        self.sizes = torch.empty((0, *sizes.values()))
        self._random = [(spec, tuple(evaluate(size, sizes) for size in spec.shape)) for spec in passes.step.random]
        self._results: list[Kind] = [
            (
                None if spec.shape is None else tuple(evaluate(size, sizes) for size in spec.shape),
                getattr(torch, spec.dtype),
            )
            for spec in (*passes.step.outputs, *passes.step.saved)
        ]

    def __call__(self, values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Returns the tensors that the module returns.

        Args:
            values: Parameters, buffers and inputs.
        """
        if self._random:
            values += self.passes.memory.draw(self._random, None)
        trained = [values[place] for place in self.passes.trained]
        if not trained:
            return self.forward(values)[0]
        found: tuple[torch.Tensor, ...] = _Function.apply(self, values, *trained)  # type: ignore[no-untyped-call]
        return found

    def forward(self, values: Tensors) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """Runs the forward pass; returns the outputs, and what the backward pass needs."""
        passes = self.passes
        found = passes.runner.call(list(values), lambda: self._kinds(values))
        for place, new in passes.updates:
            values[place].detach().copy_(found[new])
        saved = [values[place] if is_value else found[place] for is_value, place in passes.saved]
        return tuple(found[: passes.outputs]), saved

    def _kinds(self, values: Tensors) -> list[Kind]:
        """Returns the kinds of all results."""
        return [*self._results, *_kinds([values[place] for place, _ in self.passes.updates])]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, values: Tensors, *trained: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, saved = call.forward(values)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.call = call
        differentiable = call.passes.differentiable
        if len(differentiable) < len(outputs):
            fixed = [value for place, value in enumerate(outputs) if place not in differentiable]
            ctx.mark_non_differentiable(*fixed)
        ctx.outputs, ctx.trained = _kinds(outputs), _kinds(trained)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "ORTModule can't be differentiated twice: its backward pass is a graph without a backward pass of its "
                "own. Leave out create_graph=True, or call the module inside, model.module, for this step"
            )
        saved, call = ctx.saved_tensors, ctx.call
        given = {place: gradient for place, gradient in enumerate(gradients) if gradient is not None}
        backward = call.passes.backward(frozenset(given))
        return (None, None, *backward.run(saved, given, call, ctx.outputs, ctx.trained))


def _kinds(values: Tensors) -> list[tuple[torch.Size, torch.dtype]]:
    return [(value.shape, value.dtype) for value in values]
