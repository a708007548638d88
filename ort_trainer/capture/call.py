"""A call of a module alone, whose forward and backward pass become graphs of their own: what is exported."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..options import InputDescription, ModelDescription
from ..outside.places import Access
from .nested import Layout, flatten, rebuild
from .step_module import ExportedStep, StepModule


class CallDescription(ModelDescription):
    """The inputs of a call; its outputs are whatever tensors the module returns.

    Args:
        inputs: Name of an input -> its sizes, and names of dimensions whose size may change from call to call.
    """

    def __init__(self, inputs: Mapping[str, Sequence[int | str]]) -> None:
        self.inputs = tuple(InputDescription(name, tuple(shape)) for name, shape in inputs.items())
        self.outputs = ()
        self.inferred, self.corrected = True, False

    def covers(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Returns whether fixed sizes are those of the inputs, and dimensions of one name have one size."""
        return self.covering(shapes).inputs == self.inputs

    def covering(self, shapes: Mapping[str, tuple[int, ...]]) -> CallDescription:
        """Returns a description that also covers inputs of these shapes, with the same numbers of dimensions.

        Fixed sizes that differ become symbolic. If dimensions of one name have several sizes, each gets its own name::

            x ["n", 4], y ["n"]  for shapes x (3, 5), y (2,)  ->  x ["x_0", "x_1"], y ["y_0"]
        """
        described = {entry.name: entry.shape for entry in self.inputs}
        wider = {
            name: [
                f"{name}_{axis}" if isinstance(size, int) and size != shapes[name][axis] else size
                for axis, size in enumerate(shape)
            ]
            for name, shape in described.items()
        }
        sizes: dict[str, set[int]] = {}
        for name, shape in wider.items():
            for size, actual in zip(shape, shapes[name], strict=True):
                if isinstance(size, str):
                    sizes.setdefault(size, set()).add(actual)
        shared = {symbol for symbol, actual_sizes in sizes.items() if len(actual_sizes) > 1}
        return CallDescription(
            {
                name: [f"{name}_{axis}" if size in shared else size for axis, size in enumerate(shape)]
                for name, shape in wider.items()
            }
        )


@dataclasses.dataclass(frozen=True)
class Entries:
    """The entries of a dict among a call's arguments that the call sets and removes.

    Attributes:
        place: The position or the name of the argument.
        keys: The keys of the entries that it sets.
        removed: The keys of those that it removes.
    """

    place: int | str
    keys: tuple[Any, ...]
    removed: tuple[Any, ...]

    def dict_in(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
        """Returns the dict among the arguments of a call."""
        found: dict[Any, Any] = args[self.place] if isinstance(self.place, int) else kwargs[self.place]
        return found


def with_entries(
    result: Any, filled: Sequence[Entries], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Returns a call's result, or None if it is a dict that the call fills, and the entries that it sets in each."""
    dicts = [entries.dict_in(args, kwargs) for entries in filled]
    own = None if any(result is part for part in dicts) else result
    return own, *({key: part[key] for key in entries.keys} for entries, part in zip(filled, dicts, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportedCall(ExportedStep):
    """What is exported for a call; of the fields of a step, ``loss_fn`` and what belongs to it are unused.

    Attributes:
        args: Layouts of the positional arguments.
        kwargs: Layouts of the keyword arguments.
        requires_grad: Names of the inputs that require grad.
        arguments: Numbers among the arguments that change from call to call, by name.
        filled: The entries of dicts among the arguments that the call sets and removes.
    """

    args: tuple[Layout, ...]
    kwargs: Mapping[str, Layout]
    requires_grad: frozenset[str]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    filled: tuple[Entries, ...] = ()

    def module(self) -> CallModule:
        """Returns the call as a function of flat tensors."""
        return CallModule(self)

    def as_leaves(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns inputs without their history, which require grad if those of the call do."""
        named = zip(self.description.input_names, inputs, strict=True)
        return [value.detach().requires_grad_(name in self.requires_grad) for name, value in named]


class _Arguments(dict[str, Any]):
    """A class of its own, as torch.export empties plain containers that it finds in modules."""


class CallModule(StepModule):
    """A call as a function: input tensors in, all tensors that the module returns out, as they are."""

    hooks_of_parameters = True

    def __init__(self, call: ExportedCall) -> None:
        super().__init__(call)
        self._args, self._kwargs, self._filled = call.args, call.kwargs, call.filled
        self.arguments = _Arguments(call.arguments)
        self.recorder.numbers |= {(Access("get", "arguments"), Access("key", name)) for name in call.arguments}

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the module."""
        tensors = {**dict(zip(self._names, inputs, strict=True)), **self.arguments}
        args = [rebuild(layout, tensors) for layout in self._args]
        kwargs = {name: rebuild(layout, tensors) for name, layout in self._kwargs.items()}
        result = self.model(*args, **kwargs)
        if self._filled:
            result = with_entries(result, self._filled, args, kwargs)
        try:
            return self.results(self.recorder.written(result))
        except TypeError:  # of a class that only exists in a function, for example
            self.recorder.result = None
        leaves: dict[str, torch.Tensor] = {}
        flatten("output", result, leaves, objects=True)
        return tuple(map(self.result, leaves.values()))

    @staticmethod
    def result(tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor as a result.

        AOTAutograd handles outputs that share memory in its own run-time wrapper; copies, which are dropped from the
        graph, keep it from that.
        """
        return tensor.clone()
