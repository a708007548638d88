"""Blocks of one node, and the model that blocks add to."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import onnx

from ...core.errors import shown

__all__ = [
    *("Abs", "Add", "Block", "Cast", "Clip", "Constant", "Div", "InputLike", "LabelEncoder", "Linear", "Log", "Mul"),
    *("Neg", "PassThrough", "Pow", "ReduceMean", "ReduceSum", "SequenceConstruct", "Sigmoid", "Sub", "base"),
    "empty_base",
]

_MICROSOFT = "com.microsoft"


class Handle:
    """The model that blocks add to; :func:`base` yields it.

    Attributes:
        model: The model, with all that blocks have added.
        names: The names in use.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.names = {
            *(value.name for values in (model.graph.input, model.graph.initializer) for value in values),
            *(name for node in model.graph.node for name in node.output),
        }

    def name(self, hint: str) -> str:
        """Returns an unused name."""
        number = 0
        while f"onnx::{hint}::{number}" in self.names:
            number += 1
        self.names.add(f"onnx::{hint}::{number}")
        return f"onnx::{hint}::{number}"

    def has(self, name: str) -> bool:
        """Returns whether the model has a value of this name."""
        return name in self.names


_current: ContextVar[Handle | None] = ContextVar("base", default=None)


@contextlib.contextmanager
def base(model: onnx.ModelProto) -> Iterator[Handle]:
    """A context in which blocks add to a copy of a model.

    Args:
        model: The model, which is not changed.

    Raises:
        RuntimeError: If this is inside another such context.
    """
    if _current.get() is not None:
        raise RuntimeError("blocks have a model already: leave its context (onnxblock.base) first")
    before = _current.set(Handle(copy.deepcopy(model)))
    try:
        handle = _current.get()
        assert handle is not None
        yield handle
    finally:
        _current.reset(before)


@contextlib.contextmanager
def empty_base(opset_version: int = 18) -> Iterator[Handle]:
    """A context in which blocks add to a new model without nodes."""
    imports = [onnx.helper.make_opsetid("", opset_version), onnx.helper.make_opsetid(_MICROSOFT, 1)]
    graph = onnx.helper.make_graph([], "graph", [], [])
    with base(onnx.helper.make_model(graph, opset_imports=imports)) as handle:
        yield handle


class Block(ABC):
    """A piece of a graph. Subclasses write :meth:`build`; a call adds the piece, and returns its output's name."""

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Adds the piece: takes and returns names of values."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Adds the piece, and returns the name of its output."""
        return self.build(*args, **kwargs)

    @property
    def base(self) -> onnx.ModelProto:
        """The model that blocks add to."""
        return self._handle.model

    @property
    def _handle(self) -> Handle:
        handle = _current.get()
        if handle is None:
            raise RuntimeError("there is no model to add to: use 'with onnxblock.base(model):'")
        return handle

    def _add(self, op_type: str, names: Sequence[str], domain: str = "", outputs: int = 1, **attributes: Any) -> str:
        """Adds a node, and returns the name of its first output."""
        results = [self._handle.name(op_type.lower()) for _ in range(outputs)]
        attributes = {key: value for key, value in attributes.items() if value is not None}
        self.base.graph.node.append(
            onnx.helper.make_node(op_type, list(names), results, results[0] + "_node", domain=domain, **attributes)
        )
        return results[0]

    def _keep(self, hint: str, value: Any) -> str:
        """Adds a constant, and returns its name. (An initializer could be taken for a weight, and be trained.)"""
        name = self._handle.name(hint)
        tensor = onnx.numpy_helper.from_array(np.asarray(value), name)
        self.base.graph.node.append(onnx.helper.make_node("Constant", [], [name], name + "_node", value=tensor))
        return name


class _Node(Block):
    """A node of the block's own name, which takes values."""

    def __init__(self, **attributes: Any) -> None:
        self._attributes = attributes

    def build(self, *names: str) -> str:
        return self._add(type(self).__name__, names, **self._attributes)


def _node(name: str, doc: str) -> type[_Node]:
    """Returns the class of a node without attributes."""
    return type(name, (_Node,), {"__doc__": doc, "__module__": __name__})


Add = _node("Add", "The sum of two values.")
Sub = _node("Sub", "The difference of two values.")
Mul = _node("Mul", "The product of two values.")
Div = _node("Div", "The quotient of two values.")
Sigmoid = _node("Sigmoid", "1 / (1 + exp(-x)).")
Log = _node("Log", "The natural logarithm.")
Neg = _node("Neg", "The negative.")
Abs = _node("Abs", "The absolute value.")
SequenceConstruct = _node("SequenceConstruct", "A sequence of several values.")


class _Reduction(_Node):
    def __init__(self, keepdims: bool = True) -> None:
        super().__init__(keepdims=int(keepdims))


class ReduceMean(_Reduction):
    """The mean of all elements."""


class ReduceSum(_Reduction):
    """The sum of all elements."""


class Cast(_Node):
    """The value in another element type, an ``onnx.TensorProto.DataType``."""

    def __init__(self, to: int) -> None:
        super().__init__(to=to)


class LabelEncoder(Block):
    """A table from keys to values, as ai.onnx.ml's operator takes it."""

    def __init__(self, **attributes: Any) -> None:
        self._attributes = attributes

    def build(self, name: str) -> str:
        """Looks a value up."""
        if not any(entry.domain == "ai.onnx.ml" for entry in self.base.opset_import):
            self.base.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 2))
        return self._add("LabelEncoder", [name], domain="ai.onnx.ml", **self._attributes)


class Pow(Block):
    """A power with a constant exponent."""

    def __init__(self, exponent: float) -> None:
        self._exponent = exponent

    def build(self, name: str) -> str:
        """Raises a value to the power."""
        return self._add("Pow", [name, self._keep("exponent", np.float32(self._exponent))])


class Constant(Block):
    """A float32 number."""

    def __init__(self, value_float: float) -> None:
        self._value = value_float

    def build(self) -> str:
        """Adds the number."""
        return self._keep("constant", np.full(1, self._value, np.float32))


class Clip(Block):
    """A value within limits, of which either may be None."""

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        self._limits = (clip_min, clip_max)

    def build(self, name: str) -> str:
        """Limits a value."""
        limits = ["" if limit is None else self._keep("limit", np.float32(limit)) for limit in self._limits]
        return self._add("Clip", [name, *limits])


class PassThrough(Block):
    """The values themselves."""

    def __init__(self, **_: Any) -> None: ...

    def build(self, *names: str) -> Any:
        """Returns the names."""
        return names[0] if len(names) == 1 else names


class InputLike(Block):
    """A new input of the model, with the type and shape of one of its inputs or outputs."""

    def __init__(self, like: str) -> None:
        self._like = like

    def build(self, name: str | None = None) -> str:
        """Adds the input, and returns its name."""
        graph = self.base.graph
        values = {value.name: value for value in (*graph.value_info, *graph.output, *graph.input)}
        if self._like not in values:
            raise LookupError(f"the model has no input or output {self._like!r}, only {shown(list(values))}")
        chosen = name or self._handle.name("input")
        added = graph.input.add()
        added.CopyFrom(values[self._like])
        added.name = chosen
        self._handle.names.add(chosen)
        return chosen


class Linear(Block):
    """alpha x W + beta b, with new weights drawn as ``torch.nn.Linear`` draws them."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, alpha: float = 1.0, beta: float = 1.0
    ) -> None:
        self._sizes, self._bias = (in_features, out_features), bias
        self._factors: dict[str, Any] = {"alpha": alpha, "beta": beta}

    def build(self, name: str) -> str:
        """Applies the layer."""
        bound = self._sizes[0] ** -0.5
        shapes = {"linear.weight": self._sizes, **({"linear.bias": self._sizes[1:]} if self._bias else {})}
        draw = np.random.default_rng().uniform
        weights = [self._handle.name(hint) for hint in shapes]
        for weight, shape in zip(weights, shapes.values(), strict=True):
            value = draw(-bound, bound, shape).astype(np.float32)
            self.base.graph.initializer.append(onnx.numpy_helper.from_array(value, weight))
        return self._add("Gemm", [name, *weights], **self._factors)
