"""An ONNX model as a PyTorch module."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from ..core.errors import ExportError
from ..step.onnx_file import corruption_reported
from .joins import join_nodes
from .load import OnnxModel, is_argument, load_onnx_model
from .node_table import Node, Operator, with_mode
from .plan import Graph, PlannedNode, plan_model
from .values import NOT_IN_NUMPY, Rounded, Value, as_tensor, is_known, known_array, numbers, tensor_of

# Operators that only move elements of their first input: if these are quantized numbers, a gradient passes through.
_MOVING = {
    *("Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Pad", "Reshape", "Slice"),
    *("SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
}
# Shapes and axes have few elements. A larger constant or result is a tensor, not a known array.
_MOST_KNOWN = 1024


class OnnxModule(nn.Module):
    """An ONNX model, whose nodes are run as PyTorch operators.

    Its parameters are the weights of the model, under the model's names; its buffers are the running statistics of
    batch norms.

    Args:
        model: The model, or where it is.
        copy: Whether parameters and buffers are copies, so that training leaves the loaded model unchanged.

    Attributes:
        names: Name of a parameter or buffer of the module -> its name in the model. They differ only where the model's
            name can't be an attribute.
        inputs: The names of the model's inputs.
        optional: The names of inputs for which the model has a value.
        outputs: The names of its outputs, except those in ``refused``.
        refused: The outputs that PyTorch can't compute, because they need an unsupported node, each with the reason.
        wanted: The outputs that ``forward`` returns, as a tuple; None for all of them, by name.

    Raises:
        ExportError: If PyTorch can compute no output; the message names an unsupported node.
    """

    @corruption_reported("the ONNX model", ExportError)
    def __init__(self, model: OnnxModel | onnx.ModelProto | str | os.PathLike[str] | bytes, copy: bool = True) -> None:
        super().__init__()
        loaded = model if isinstance(model, OnnxModel) else load_onnx_model(model)
        graph = loaded.model.clone()
        join_nodes(graph)
        plan = plan_model(graph)
        self._graph, self._numbers, self._dtypes = plan.graph, plan.inputs, plan.dtypes
        self.inputs, self.optional = loaded.inputs, loaded.optional
        self.outputs, self.refused = plan.graph.names, plan.refused
        self.wanted: tuple[str, ...] | None = None
        self.names: dict[str, str] = {}
        self._stored: dict[int, tuple[nn.Module, str]] = {}
        self._constants: dict[int, torch.Tensor] = {}
        self._known_constants: dict[int, np.ndarray[Any, Any]] = {}
        self._statistics = frozenset(plan.inputs[name] for name in loaded.buffers)
        # A file may store several weights in the same memory, but each is trained separately.
        addresses: set[int] = set()

        def unshared(tensor: torch.Tensor) -> torch.Tensor:
            separate = tensor.clone() if copy or tensor.data_ptr() in addresses else tensor
            addresses.add(separate.data_ptr())
            return separate

        for name, tensor in loaded.parameters.items():
            # Weights in half precision have master copies in float32, which are rounded where the graph uses them.
            master = tensor.float() if tensor.dtype in _HALVES else unshared(tensor)
            self._store(plan.inputs[name], name, nn.Parameter(master, requires_grad=name not in loaded.frozen))
        for name, tensor in loaded.buffers.items():
            self._store(plan.inputs[name], name, unshared(tensor))
        flat_tensors: dict[Any, torch.Tensor] = {}
        for number, constant in plan.constants.items():
            value = tensor_of(constant, flat_tensors)
            self._constants[number] = value
            if value.numel() <= _MOST_KNOWN and value.dtype not in NOT_IN_NUMPY:
                self._known_constants[number] = value.numpy()
        self.forward = _Forward(self, _signature(self.inputs, self.optional))  # type: ignore[method-assign]

    def forward(self, *args: Value, **inputs: Value) -> dict[str, Value] | tuple[Value, ...]:
        """Runs the model.

        Args:
            args: The first inputs, in order.
            inputs: The others by name, of the model's dtypes; optional ones may be left out.

        Returns:
            The outputs: by name, or as a tuple if only some are wanted.

        Raises:
            TypeError: If an input is missing or unknown.
            ExportError: If a node fails; the message names it.
        """
        values_by_name = {**dict(zip(self.inputs, args, strict=False)), **inputs}
        # The lengths differ if there are too many positional arguments, or an input is passed twice.
        twice = len(args) + len(inputs) != len(values_by_name)
        if twice or set(values_by_name) - set(self.optional) != set(self.inputs):
            raise TypeError(
                f"the ONNX model takes the inputs {list(self.inputs)}, but was given {len(args)} and {list(inputs)}"
            )
        run = _Run(self, {self._numbers[name]: value for name, value in values_by_name.items()})
        values = run.graph(self._graph)
        outputs = {
            name: run.as_tensor(number, value)
            for name, number, value in zip(self.outputs, self._graph.outputs, values, strict=True)
        }
        return outputs if self.wanted is None else tuple(outputs[name] for name in self.wanted)

    @property
    def large_constants(self) -> dict[str, torch.Tensor]:
        """The constants with at least two dimensions, such as quantized weights, by the order in the model."""
        return {f"constant {number}": value for number, value in self._constants.items() if value.dim() > 1}

    def _store(self, number: int, name: str, tensor: torch.Tensor) -> None:
        """Registers a tensor as a parameter or buffer: ``a.b.weight`` in the submodule ``a.b``.

        If a part of the name is no valid or free attribute, it is registered here, with underscores for the dots.
        """
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


class _Forward:
    """``forward`` of one module, whose signature has the names of the model's inputs."""

    def __init__(self, module: OnnxModule, signature: inspect.Signature) -> None:
        self._module, self.__signature__ = module, signature

    def __call__(self, *args: Value, **inputs: Value) -> dict[str, Value] | tuple[Value, ...]:
        return OnnxModule.forward(self._module, *args, **inputs)


def _signature(names: Sequence[str], optional: Sequence[str]) -> inspect.Signature:
    """Returns a signature with these parameters; only ``**inputs`` if a name is no identifier."""
    if all(map(is_argument, names)):
        required = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        others = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in optional]
        return inspect.Signature([*required, *others])
    return inspect.Signature([inspect.Parameter("inputs", inspect.Parameter.VAR_KEYWORD)])


class _Part(nn.Module):
    """Holds the tensors whose names share a prefix."""


def _inner(owner: nn.Module | None, part: str) -> nn.Module | None:
    """Returns the submodule for a part of a name, creating it if needed; None if the name is taken or empty."""
    if owner is None or not part:
        return None
    if part not in owner._modules:
        if hasattr(owner, part):
            return None
        owner.add_module(part, _Part())
    return owner._modules[part]


@dataclass(frozen=True)
class Body:
    """A graph in an attribute of a node, as the function of the operator receives it.

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
            for index in step.for_tensors.updates.values()
            if index < len(step.inputs)
        )

    def outside_tensors(self) -> list[tuple[int, torch.Tensor]]:
        """Returns the tensors of enclosing graphs that its nodes use, each with its number."""
        outside = [(number, self.run.value(number)) for number in self.graph.outside]
        return [(number, value) for number, value in outside if isinstance(value, torch.Tensor)]

    def with_outside(self, tensors: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Runs it with replaced tensors of enclosing graphs, and returns the outputs as tensors."""
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
        """Returns a value as a tensor, if it is a known array or quantized numbers."""
        if not is_known(value):
            return value.tensor if isinstance(value, Rounded) else value
        constant = self.module._constants.get(number)
        return as_tensor(value, self.module._dtypes.get(number)) if constant is None else constant

    def value(self, number: int) -> Value:
        """Returns a value of the model."""
        if number in self.values:
            return self.values[number]
        if number in self.module._known_constants:
            return self.module._known_constants[number]
        if number in self.module._stored:
            stored = getattr(*self.module._stored[number])
            dtype = self.module._dtypes.get(number, stored.dtype)
            return stored if stored.dtype == dtype else stored.to(dtype)
        if number in self.module._constants:
            return self.module._constants[number]
        return None

    def _step(self, step: PlannedNode) -> None:
        """Runs a node: on known arrays if all inputs are known and the operator can, otherwise on tensors."""
        node = with_mode(step.node, self.module.training)
        inputs = [None if number is None else self.value(number) for number in step.inputs]
        attributes = {k: Body(v, self) if isinstance(v, Graph) else v for k, v in step.attributes.items()}
        results: Any = NotImplemented
        moved = _moved_type(step.node, inputs)
        if moved is not None:
            inputs = [value.values if isinstance(value, Rounded) else value for value in inputs]
        elif not step.for_tensors.takes_rounded:
            inputs = [value.tensor if isinstance(value, Rounded) else value for value in inputs]
        try:
            if step.for_known is not None and all(value is None or is_known(value) for value in inputs):
                results = self._call(step.for_known, node, inputs, attributes)
            if results is NotImplemented:
                results = self._call(step.for_tensors, node, self._taken(step, inputs), attributes)
        except ExportError:
            raise
        except Exception as error:
            shapes = [list(getattr(value, "shape", [])) for value in inputs]
            raise node.error(f"it fails for inputs of the shapes {shapes}: {type(error).__name__}: {error}") from error
        if not isinstance(results, tuple):
            results = (results,)
        if moved is not None:
            results = tuple(Rounded(value, moved) if value.is_floating_point() else value for value in results)
        for number, value in zip(step.outputs, results, strict=False):
            if number is not None:
                self.values[number] = self._kept(number, value)
        if node.training:
            self._update(step, results)

    def _update(self, step: PlannedNode, results: Sequence[Value]) -> None:
        """Writes new running statistics into the buffers."""
        for output, index in step.for_tensors.updates.items():
            number = step.inputs[index]
            if number in self.module._statistics and output < len(results):
                # Not under no_grad(), which torch.export takes seconds to capture in a model of many norms.
                getattr(*self.module._stored[number]).copy_(results[output].detach())

    def _taken(self, step: PlannedNode, inputs: Sequence[Value]) -> list[Value]:
        """Returns the inputs in the forms that the function for tensors takes: tensors, known arrays or numbers."""
        with_tensor = any(isinstance(value, torch.Tensor) for value in inputs)
        taken: list[Value] = []
        for i, (number, value) in enumerate(zip(step.inputs, inputs, strict=True)):
            if i in step.for_tensors.numbers and value is not None:
                taken.append(numbers(value, f"input {i}", step.node))
            elif number is None or not is_known(value) or step.for_tensors.takes_known(i):
                taken.append(value)
            elif with_tensor and value.ndim == 0 and value.dtype != object and step.for_tensors.takes_scalar(i):
                taken.append(value.item())
            else:
                taken.append(self.as_tensor(number, value))
        return taken

    def _call(self, chosen: Operator, node: Any, inputs: Sequence[Value], attributes: Mapping[str, Any]) -> Any:
        """Calls the function of an operator, with None for the inputs that the node omits."""
        keywords = {name: value for name, value in attributes.items() if name in chosen.attributes}
        if chosen.takes_node:
            keywords["node"] = node
        return chosen.function(*inputs, *[None] * (len(chosen.inputs or ()) - len(inputs)), **keywords)

    def _kept(self, number: int, value: Value) -> Value:
        """Returns a result in the form in which it is stored: numbers as a known array, but a large one as a tensor."""
        if isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool, np.generic)):
            value = known_array(value)
        if is_known(value) and value.size > _MOST_KNOWN:
            return as_tensor(value, self.module._dtypes.get(number))
        return value


def _moved_type(node: Node, inputs: Sequence[Value]) -> torch.dtype | None:
    """Returns the type of the quantized numbers that a node moves; None if it does anything else."""
    data = inputs if node.op_type == "Concat" else inputs[:1]
    if node.domain or node.op_type not in _MOVING or not all(isinstance(value, Rounded) for value in data):
        return None
    return data[0].dtype if data else None
