"""Compares calls of a module with the same calls in eager PyTorch: the option ``debug.verify_every``."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from ..capture.borrow import BORROWED, borrowed
from ..capture.differences import WHY_DIFFERENT, gradient_floor, not_run, report
from ..capture.eager import (
    SavedTensors,
    coarsest,
    differentiate,
    dropping_as,
    gradient_of,
    put_buffers_back,
    random_state,
    random_state_kept,
    set_random_state,
    shaken,
    with_values,
)
from ..capture.nested import flatten, rebuild
from ..capture.verification import Verification, parts_of, repeating, spare_memory
from ..core.errors import VerificationError
from ..outside.leftovers import numbers_in
from ..outside.places import Place
from ..outside.recorder import Pair, Recorder
from .arguments import clone
from .fallback import running
from .graphs import Call, ExportedGraphs

Named = dict[str, torch.Tensor]


class CallVerifier:
    """Repeats calls in PyTorch, and their backward passes.

    Args:
        every: Which ones: each n-th, or ``"auto"``; see :class:`~.verification.Verification`.
        module: The module.

    Attributes:
        error: What "auto" has found in graphs that were made anew before: PyTorch runs all calls then.
    """

    def __init__(self, every: int | str, module: nn.Module) -> None:
        self._turns, self._module = Verification(every), module
        self._mode = module.training
        self._found: VerificationError | None = None  # in a backward pass
        self.error: VerificationError | None = None

    @property
    def last(self) -> int:
        """The number of the last call that was compared and equal, 0 for none."""
        return self._turns.last

    def handles(self, error: VerificationError, renew: Callable[[], None]) -> bool:
        """Returns whether a call goes on after a difference: with graphs that are made anew, or next time in PyTorch.

        Args:
            error: What differs.
            renew: Has graphs made anew.
        """
        if self._turns.is_automatic and self._turns.has_renewed:
            self.error = error
            return True
        return self._turns.renews(error, renew)

    def run(self, graphs: ExportedGraphs, call: Call, values: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """Returns what the module returns; if it is this call's turn, compares it first.

        Args:
            graphs, call, values: From :meth:`CallGraphs.find`.
            args, kwargs: The arguments of the call.

        Raises:
            VerificationError: If a result differs. Buffers and random state are then as before the call. With "auto",
                also if gradients of an earlier call have differed.
        """
        turns = self._turns
        found, self._found = self._found, None
        if found is not None:
            raise found
        if self._mode is not self._module.training:
            self._mode = self._module.training
            turns.expect()
        if not turns.is_due(graphs.passes.step):
            return graphs.result(call(values), values)
        began, taken, number = time.process_time(), list(values), turns.number  # a copy: the call adds random inputs
        with torch.inference_mode(False):
            eager = _EagerCall(self._module, graphs, values, args, kwargs, number, turns.is_automatic)
        tensors = call(values, functools.partial(self._check_gradients, eager))
        try:
            with torch.inference_mode(False):
                leftovers = graphs.notes.leftovers
                count = len(tensors) - leftovers.tensors
                zero, numbers = torch.zeros(()), numbers_in(graphs.notes.result)  # which are constants of a result
                compared = [zero if at in numbers else value for at, value in enumerate(tensors[:count])]
                compared += [value for at, value in enumerate(tensors[count:]) if at not in leftovers.numbers]
                eager.check(_numbered(compared), taken)
                eager.check_constants(graphs.results(tensors[:count]))
        except VerificationError as error:
            if turns.is_automatic and error.__cause__ is not None:
                turns.give_up(graphs.passes.step, error)
            else:
                eager.put_back(taken)
                raise
        except BaseException:
            eager.put_back(taken)
            raise
        turns.passed(graphs.passes.step, began)
        return graphs.result(tensors, taken)

    def _check_gradients(
        self, eager: _EagerCall, gradients: Mapping[int, torch.Tensor], trained: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Compares the gradients of a backward pass; returns those to use: PyTorch's if "auto" sees others."""
        if not self._turns.is_automatic:
            eager.check_gradients(gradients, trained)
            return trained
        try:
            eager.check_gradients(gradients, trained)
        except VerificationError as error:
            if error.__cause__ is None:
                self._found = error
                return eager.gradients(gradients)
        return trained


class _EagerCall:
    """One call, repeated in PyTorch as often as needed: from the state in which it began, and without side effects.

    The backward pass runs the module once more, because a graph of autograd that is kept until then would hold buffers
    that are put back, and twice the memory.

    Args:
        module: The module.
        graphs: The graphs of the call.
        values: What they take: parameters, buffers, inputs.
        args, kwargs: The arguments.
        number: The number of the call.
        is_thrifty: Whether to leave out backward passes that need much of the memory.
    """

    def __init__(
        self,
        module: nn.Module,
        graphs: ExportedGraphs,
        values: Sequence[torch.Tensor],
        args: Any,
        kwargs: Any,
        number: int,
        is_thrifty: bool,
    ) -> None:
        self._module, self._graphs, self._number, self._is_thrifty = module, graphs, number, is_thrifty
        leaves: Named = {}
        positional = [flatten(f"args.{at}", value, leaves, objects=True) for at, value in enumerate(args)]
        named = {name: flatten(name, value, leaves, objects=True) for name, value in kwargs.items()}
        self._layouts = (positional, named)
        self._inputs = _each_once(leaves, lambda value: clone(value.detach()).requires_grad_(value.requires_grad))
        self._modes = {part: part.training for part in module.modules()}
        self._trainable = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._with_grad = torch.is_grad_enabled()
        self.device = graphs.passes.runners.memory.device
        self._has_gradients, self._sums = True, list[float]()
        kind = self.device.type
        self._autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._state = random_state(self.device)
        step = graphs.passes.step
        self._places = [*step.state, *(entry.name for entry in graphs.description.inputs)]
        self._rounding = self._autocast or coarsest([*module.parameters(), *module.buffers(), *leaves.values()])
        # Later calls may change them before this one's backward pass runs.
        updated = [place for place, _ in graphs.passes.updates if place < len(step.state)]
        self._before = {self._places[place]: values[place].detach().clone() for place in updated}
        self._values = list(values[: len(step.state)])
        self._constants: list[str] = []
        self._met: set[int] = set()  # ids of containers from outside among the results
        # Values outside tensors that the call has changed, from before the call: later runs begin with them.
        self._outside: dict[Place, Any] | None = None

    def run(self, tangents: Mapping[str, torch.Tensor] | None = None, shake: int | None = None) -> Named:
        """Returns the results of a call, or gradients, by their names in messages.

        Args:
            tangents: Gradients of outputs, by the outputs' names, to get those of the trained values; None for the
                results of the call.
            shake: A seed, to change weights and inputs by one rounding; None for no change.
        """
        module, epsilon = self._module, torch.finfo(self._rounding).eps
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers()), **self._before}
        leaves = self._inputs
        if shake is not None:
            leaves = _each_once(
                leaves, lambda value: shaken(value.detach(), epsilon, shake).requires_grad_(value.requires_grad)
            )
        kind, enabled = self.device.type, self._autocast is not None
        recorder = Recorder(Pair(module), (), dict.fromkeys(self._graphs.notes.tables), self._outside)
        memory = spare_memory(self.device) if self._is_thrifty else math.inf
        saved = SavedTensors(memory, module.parameters(), [w for w in module.parameters() if w.requires_grad])
        with (
            BORROWED,
            random_state_kept(self.device, self._state),
            dropping_as(self._graphs.passes.step.random, self.device),
            with_values(module, tensors, epsilon, shake) as held,
            borrowed(module, self._trainable, module.training, self._modes),
            running(module),
            recorder.running(),
            repeating(),
            torch.set_grad_enabled(self._with_grad),
            saved,
        ):
            copies = _each_once(leaves, clone)  # which forward() may change
            positional, named = self._layouts
            arguments = [rebuild(layout, copies) for layout in positional]
            keywords = {name: rebuild(layout, copies) for name, layout in named.items()}
            torch.clear_autocast_cache()  # it may hold casts of earlier weights
            with torch.autocast(kind, self._autocast or torch.float16, enabled=enabled):
                result = module(*arguments, **keywords)
            torch.clear_autocast_cache()
            self._met = {id(part) for part in parts_of(result, recorder.has_met) if recorder.has_met(part)}
            self._constants = _constants_in(result, self._met)
            state = self._state_of_now()
            put_buffers_back(held)
            if self._outside is None:
                self._outside = recorder.effects.replaced()
            # What is left outside is compared as well; the graph returns it after the results.
            outputs = _numbered([*self._graphs.tensors_in(result), *recorder.leave(strict=False)])
            sums = [_sum(value) for value in outputs.values()]
            if tangents is not None:
                # What forward() reads may have changed since the call.
                self._has_gradients = saved.are_complete and (shake is not None or _are_near(sums, self._sums))
                return self._gradients(outputs, leaves, tangents) if self._has_gradients else {}
            self._sums = sums if shake is None else self._sums
            count = len(self._graphs.passes.step.outputs) - len(self._graphs.notes.leftovers.numbers)
            if len(outputs) != count:
                self.refuse(
                    f"forward() returns and leaves {len(outputs)} tensors, and the graph has {count}.",
                    "Nothing has changed.",
                )
            return self._named(outputs, [*state, *copies.values()])

    def check(self, outputs: Named, values: Sequence[torch.Tensor]) -> None:
        """Compares the results of the graph.

        Args:
            outputs: What it returned.
            values: What it took and, in part, changed.

        Raises:
            VerificationError: If one differs.
        """
        theirs, ours = self._reference(), self._named(outputs, values)
        message = report(ours, theirs, self._rounding, lambda seed: self.run(shake=seed))
        if message:
            self.refuse(message, "Buffers and random state are unchanged.")

    def check_constants(self, result: Any) -> None:
        """Compares the numbers and strings among the results.

        Args:
            result: What the graph's call returns.

        Raises:
            VerificationError: If one differs.
        """
        ours = _constants_in(result, self._met)
        if ours != self._constants:
            self.refuse(f"forward() returns the constants {self._constants}, and the graph {ours}.", "Nothing changed.")

    def check_gradients(
        self, gradients: Mapping[int, torch.Tensor], trained_gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Compares the gradients of a backward pass, if there is memory for another, and forward() reads the same.

        Args:
            gradients: Those of the outputs, which it took, by their places.
            trained_gradients: Those of the trained values.

        Raises:
            VerificationError: If one differs.
        """
        tangents = {f"output_{at}": value for at, value in gradients.items()}
        trained = self._trained_names()
        ours = {name: value for name, value in zip(trained, trained_gradients, strict=True) if value is not None}
        theirs = self._reference(tangents)
        if not self._has_gradients:
            return
        floors = dict.fromkeys(trained, gradient_floor(theirs.values(), self._rounding))
        # In fp16, gradients may overflow because of a loss scale that is too high, which the user's loop notices.
        only_finite = trained if self._rounding == torch.float16 else ()
        message = report(ours, theirs, self._rounding, lambda seed: self.run(tangents, seed), floors, only_finite)
        if message:
            self.refuse(message, "The gradients of this call were not added.")

    def gradients(self, gradients: Mapping[int, torch.Tensor]) -> list[torch.Tensor | None]:
        """Returns PyTorch's gradients of the trained values, for those of the outputs by their places."""
        theirs = self._reference({f"output_{at}": value for at, value in gradients.items()})
        return [theirs.get(name) for name in self._trained_names()]

    def put_back(self, values: Sequence[torch.Tensor]) -> None:
        """Undoes what a call has changed: buffers, inputs, and the state of the generator."""
        count, inputs = len(self._values), list(self._inputs.values())
        for place, _ in self._graphs.passes.updates:
            before = self._before[self._places[place]] if place < count else inputs[place - count]
            values[place].detach().copy_(before.detach())
        set_random_state(self.device, self._state)

    def refuse(self, message: str, state: str) -> NoReturn:
        """Raises the error."""
        raise VerificationError(
            f"call {self._number} of {self._module._get_name()} differs from the same call in PyTorch "
            f"(debug.verify_every): {message} {state} {WHY_DIFFERENT}"
        )

    def _reference(self, tangents: Mapping[str, torch.Tensor] | None = None) -> Named:
        """Returns PyTorch's results or gradients; an error that PyTorch raises becomes a ``VerificationError``."""
        try:
            return self.run(tangents)
        except VerificationError:
            raise
        except Exception as error:
            raise not_run(f"call {self._number} of {self._module._get_name()}", error) from error

    def _gradients(self, outputs: Named, leaves: Named, tangents: Mapping[str, torch.Tensor]) -> Named:
        """Returns the gradients of the trained values, by their names in messages."""
        values = [*self._values, *leaves.values()]
        places = zip(self._trained_names(), self._graphs.passes.trained, strict=True)
        targets = {name: values[place] for name, place in places}
        usable = {name: value for name, value in tangents.items() if outputs[name].requires_grad}
        if not usable:
            return {}
        with _without_hooks(self._module):  # autograd calls them, with the graph's gradients
            return differentiate([outputs[name] for name in usable], targets, list(usable.values()))

    def _named(self, outputs: Named, values: Sequence[torch.Tensor]) -> Named:
        """Returns copies of outputs and of changed values, by their names in messages."""
        tensors = {repr(name): value.detach().clone() for name, value in outputs.items()}
        for place, _ in self._graphs.passes.updates:
            tensors[f"the new value of {self._places[place]!r}"] = values[place].detach().clone()
        return tensors

    def _state_of_now(self) -> list[torch.Tensor]:
        """Returns the module's tensors that the graph takes; while it runs in PyTorch, buffers are copies."""
        module = self._module
        now = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        # Tensors from outside are not replaced meanwhile.
        return [now.get(name, value) for name, value in zip(self._places, self._values, strict=False)]

    def _trained_names(self) -> list[str]:
        """Returns the names of the trained values' gradients in messages."""
        count = len(self._values)
        return [
            gradient_of(self._places[place]) if place < count else f"the gradient of input {self._places[place]!r}"
            for place in self._graphs.passes.trained
        ]


def _constants_in(result: Any, met: Container[int]) -> list[str]:
    """Returns the numbers and strings in a result, as text.

    Args:
        result: The result.
        met: The ids of containers from outside, which change after the comparison.
    """

    def constants(layout: Any) -> list[str]:
        if not isinstance(layout, tuple):
            return []
        if layout[:1] == ("value",):
            return [repr(layout[2])] if isinstance(layout[2], (bool, int, float, str)) else []
        return [text for part in layout for text in constants(part)]

    own = [part for part in parts_of(result, lambda part: id(part) in met) if id(part) not in met]
    return constants(flatten("output", own, {}, objects=True))


def _sum(value: torch.Tensor) -> float:
    """Returns a number that tells a result from others."""
    return float((value.detach().abs() if value.is_floating_point() or value.is_complex() else value).sum())


def _are_near(sums: Sequence[float], others: Sequence[float]) -> bool:
    """Returns whether sums differ by rounding at most."""
    return np.allclose(sums, others, rtol=1e-6, equal_nan=True) if len(sums) == len(others) else False


def _each_once(tensors: Mapping[str, torch.Tensor], function: Callable[[torch.Tensor], torch.Tensor]) -> Named:
    """Returns a function's results for tensors; one tensor under two names has one result."""
    results = {id(value): function(value) for value in tensors.values()}
    return {name: results[id(value)] for name, value in tensors.items()}


def _numbered(tensors: Sequence[torch.Tensor]) -> Named:
    """Returns outputs by their names in messages: output_0 and so on."""
    return {f"output_{at}": value for at, value in enumerate(tensors)}


@contextlib.contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Removes the hooks of parameters for a while."""
    hooked: list[tuple[Any, Any]] = [(p, p._backward_hooks) for p in module.parameters() if p._backward_hooks]
    try:
        for parameter, _ in hooked:
            parameter._backward_hooks = None
        yield
    finally:
        for parameter, hooks in hooked:
            parameter._backward_hooks = hooks
