"""An ONNX model as a PyTorch module."""

from __future__ import annotations

import inspect
import keyword
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from ...core.errors import ExportError
from .joins import join_nodes
from .load import OnnxModel, load_onnx_model
from .plan import Graph, Step, plan_model
from .registry import Operator, with_mode
from .values import Value, as_tensor, is_known, known, numbers, tensor_of

__all__ = ["Body", "OnnxModule"]

# Larger constants are never sizes; a size that is computed from so many others is not known, but a tensor.
_MOST_KNOWN = 1024


class OnnxModule(nn.Module):
    """An ONNX model, whose nodes are run as PyTorch operators.

    Its parameters are the weights of the model, under their own names; its buffers are the running statistics of batch
    norms.

    Args:
        model: The model, or where it is.
        copy: Whether to leave the tensors of a loaded model alone.

    Attributes:
        names: The name of a parameter or buffer of the module -> its name in the model. They differ only where the
            model's can't be the name of an attribute.
        inputs: The names of the model's inputs.
        outputs: The names of its outputs, except those in ``refused``.
        refused: The outputs that need a node that can't be run with PyTorch, each with the reason.
        wanted: The outputs that ``forward`` returns, as a tuple; None for all of them, by name.

    Raises:
        ExportError: If no output can be computed, as a node can't be run with PyTorch; the message names it.
    """

    def __init__(self, model: OnnxModel | onnx.ModelProto | str | os.PathLike[str] | bytes, copy: bool = True) -> None:
        super().__init__()
        loaded = model if isinstance(model, OnnxModel) else load_onnx_model(model)
        graph = loaded.model.clone()
        join_nodes(graph)
        plan = plan_model(graph)
        self._graph, self._numbers, self._dtypes = plan.graph, plan.inputs, plan.dtypes
        self.inputs, self.outputs, self.refused = loaded.inputs, plan.graph.names, plan.refused
        self.wanted: tuple[str, ...] | None = None
        self.names: dict[str, str] = {}
        self._stored: dict[int, tuple[nn.Module, str]] = {}
        self._constants: dict[int, torch.Tensor] = {}
        self._known: dict[int, np.ndarray[Any, Any]] = {}
        self._statistics = frozenset(plan.inputs[name] for name in loaded.buffers)
        taken: set[int] = set()  # a file may give several weights the same memory, but each is trained on its own

        def own(tensor: torch.Tensor) -> torch.Tensor:
            found = tensor.clone() if copy or tensor.data_ptr() in taken else tensor
            taken.add(found.data_ptr())
            return found

        for name, tensor in loaded.parameters.items():
            # Weights in half precision are kept, and trained, in single precision, and rounded where they are used.
            master = tensor.float() if tensor.dtype in _HALVES else own(tensor)
            self._store(plan.inputs[name], name, nn.Parameter(master, requires_grad=name not in loaded.frozen))
        for name, tensor in loaded.buffers.items():
            self._store(plan.inputs[name], name, own(tensor))
        made: dict[Any, torch.Tensor] = {}
        for number, constant in plan.constants.items():
            value = tensor_of(constant.value, made)
            self._constants[number] = value
            if value.numel() <= _MOST_KNOWN and value.dtype not in _NOT_KNOWN:
                self._known[number] = value.numpy()
        self.forward = _Forward(self, _signature(self.inputs))  # type: ignore[method-assign]

    def forward(self, *args: Value, **inputs: Value) -> dict[str, Value] | tuple[Value, ...]:
        """Runs the model.

        Args:
            args: The first inputs, in order.
            inputs: The others by name, of the model's dtypes.

        Returns:
            The outputs: by name, or as a tuple if only some are wanted.

        Raises:
            TypeError: If an input is missing or unknown.
            ExportError: If a node fails; the message names it.
        """
        given = {**dict(zip(self.inputs, args, strict=False)), **inputs}
        if set(given) != set(self.inputs) or len(args) + len(inputs) != len(given):
            raise TypeError(
                f"the ONNX model takes the inputs {list(self.inputs)}, but was given {len(args)} and {list(inputs)}"
            )
        run = _Run(self, {self._numbers[name]: value for name, value in given.items()})
        values = run.graph(self._graph)
        outputs = {
            name: run.as_tensor(number, value)
            for name, number, value in zip(self.outputs, self._graph.outputs, values, strict=True)
        }
        return outputs if self.wanted is None else tuple(outputs[name] for name in self.wanted)

    def _store(self, number: int, name: str, tensor: torch.Tensor) -> None:
        """Makes a tensor a parameter or buffer, in modules that are named like the parts of its name."""
        parts = name.split(".")
        owner: nn.Module | None = self
        for part in parts[:-1]:
            owner = _inner(owner, part)
        if owner is None or not parts[-1] or hasattr(owner, parts[-1]):
            owner, parts = self, [name.replace(".", "_") or "_"]
            while hasattr(self, parts[-1]):
                parts[-1] += "_"
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(parts[-1], tensor)
        else:
            owner.register_buffer(parts[-1], tensor)
        self._stored[number] = owner, parts[-1]
        self.names[".".join(parts)] = name


_HALVES = (torch.float16, torch.bfloat16)
_NOT_KNOWN = (
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)


class _Forward:
    """``forward`` of one module, with the names of its inputs as signature."""

    def __init__(self, module: OnnxModule, signature: inspect.Signature) -> None:
        self._module, self.__signature__ = module, signature

    def __call__(self, *args: Value, **inputs: Value) -> dict[str, Value] | tuple[Value, ...]:
        return OnnxModule.forward(self._module, *args, **inputs)


def _signature(names: Sequence[str]) -> inspect.Signature:
    if all(name.isidentifier() and not keyword.iskeyword(name) for name in names):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(name, kind) for name in names])
    return inspect.Signature([inspect.Parameter("inputs", inspect.Parameter.VAR_KEYWORD)])


class _Part(nn.Module):
    """Holds tensors whose names begin in the same way."""


def _inner(owner: nn.Module | None, part: str) -> nn.Module | None:
    """Returns the module for a part of a name, which is made if it is new; None if it can't be had."""
    if owner is None or not part:
        return None
    if part not in owner._modules:
        if hasattr(owner, part):
            return None
        owner.add_module(part, _Part())
    return owner._modules[part]


@dataclass(frozen=True)
class Body:
    """A graph in an attribute of a node, as the function of the node's operator sees it.

    Attributes:
        graph: The graph.
        run: The run of the model.
    """

    graph: Graph
    run: _Run

    def __call__(self, *inputs: Value) -> list[Value]:
        """Runs the graph and returns its outputs."""
        self.run.values.update(zip(self.graph.inputs, inputs, strict=False))
        return self.run.graph(self.graph)

    @property
    def outputs(self) -> int:
        """The number of its outputs."""
        return len(self.graph.outputs)

    def dtype(self, output: int) -> torch.dtype | None:
        """Returns the dtype of an output; None if it is unknown."""
        return self.run.module._dtypes.get(self.graph.outputs[output])

    @property
    def updates_statistics(self) -> bool:
        """Whether a node in it updates running statistics in training mode."""
        return any(
            step.inputs[index] in self.run.module._statistics
            for step in self.graph.steps
            for index in step.tensors.updates.values()
            if index < len(step.inputs)
        )

    def outside_tensors(self) -> list[tuple[int, torch.Tensor]]:
        """Returns the tensors around it that its nodes use, each with its number."""
        found = [(number, self.run.value(number)) for number in self.graph.outside]
        return [(number, value) for number, value in found if isinstance(value, torch.Tensor)]

    def with_outside(self, tensors: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Runs it with other tensors around it, and returns the outputs as tensors."""
        body = Body(self.graph, _Run(self.run.module, {**self.run.values, **tensors}))
        return body.tensors(body())

    def tensors(self, values: Sequence[Value]) -> list[torch.Tensor]:
        """Returns its outputs as tensors."""
        return [self.run.as_tensor(n, value) for n, value in zip(self.graph.outputs, values, strict=True)]


class _Run:
    """One run of a model.

    Args:
        module: The module.
        values: The inputs by number.
    """

    def __init__(self, module: OnnxModule, values: dict[int, Value]) -> None:
        self.module, self.values = module, values

    def graph(self, graph: Graph) -> list[Value]:
        """Runs a graph whose inputs are in ``values``, and returns its outputs."""
        for step in graph.steps:
            self._step(step)
            for number in step.last:
                self.values.pop(number, None)
        return [self.value(number) for number in graph.outputs]

    def as_tensor(self, number: int, value: Value) -> Value:
        """Returns a value as a tensor, if it is a known array."""
        if not is_known(value):
            return value
        constant = self.module._constants.get(number)
        return as_tensor(value, self.module._dtypes.get(number)) if constant is None else constant

    def value(self, number: int) -> Value:
        """Returns a value of the model."""
        if number in self.values:
            return self.values[number]
        if number in self.module._known:
            return self.module._known[number]
        if number in self.module._stored:
            stored = getattr(*self.module._stored[number])
            dtype = self.module._dtypes.get(number, stored.dtype)
            return stored if stored.dtype == dtype else stored.to(dtype)
        if number in self.module._constants:
            return self.module._constants[number]
        return None

    def _step(self, step: Step) -> None:
        node = with_mode(step.node, self.module.training)
        inputs = [None if number is None else self.value(number) for number in step.inputs]
        attributes = {k: Body(v, self) if isinstance(v, Graph) else v for k, v in step.attributes.items()}
        results: Any = NotImplemented
        try:
            if step.known is not None and all(value is None or is_known(value) for value in inputs):
                results = self._call(step.known, node, inputs, attributes)
            if results is NotImplemented:
                results = self._call(step.tensors, node, self._taken(step, inputs), attributes)
        except ExportError:
            raise
        except Exception as error:
            shapes = [list(getattr(value, "shape", [])) for value in inputs]
            raise node.error(f"it fails for inputs of the shapes {shapes}: {type(error).__name__}: {error}") from error
        if not isinstance(results, tuple):
            results = (results,)
        for number, value in zip(step.outputs, results, strict=False):
            if number is not None:
                self.values[number] = self._kept(number, value)
        if node.training:
            self._update(step, results)

    def _update(self, step: Step, results: Sequence[Value]) -> None:
        """Writes new running statistics into the buffers."""
        for output, index in step.tensors.updates.items():
            number = step.inputs[index]
            if number in self.module._statistics and output < len(results):
                # Not under no_grad(), which torch.export takes seconds to capture in a model of many norms.
                getattr(*self.module._stored[number]).copy_(results[output].detach())

    def _taken(self, step: Step, inputs: Sequence[Value]) -> list[Value]:
        """Returns the inputs as the function for tensors takes them."""
        with_tensor = any(isinstance(value, torch.Tensor) for value in inputs)
        taken: list[Value] = []
        for i, (number, value) in enumerate(zip(step.inputs, inputs, strict=True)):
            if i in step.tensors.numbers and value is not None:
                taken.append(numbers(value, f"input {i}", step.node))
            elif number is None or not is_known(value) or step.tensors.takes_known(i):
                taken.append(value)
            elif with_tensor and value.ndim == 0 and value.dtype != object and step.tensors.takes_scalar(i):
                taken.append(value.item())
            else:
                taken.append(self.as_tensor(number, value))
        return taken

    def _call(self, chosen: Operator, node: Any, inputs: Sequence[Value], attributes: Mapping[str, Any]) -> Any:
        keywords = {name: value for name, value in attributes.items() if name in chosen.attributes}
        if chosen.takes_node:
            keywords["node"] = node
        return chosen.function(*inputs, *[None] * (_required(chosen) - len(inputs)), **keywords)

    def _kept(self, number: int, value: Value) -> Value:
        """Returns a result, as a known array only if it is small."""
        if isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool, np.generic)):
            value = known(value)
        if is_known(value) and value.size > _MOST_KNOWN:
            return as_tensor(value, self.module._dtypes.get(number))
        return value


def _required(chosen: Operator) -> int:
    return 0 if chosen.inputs is None else chosen.inputs
