"""Converts the models of onnxruntime-training's artifacts to steps and updates of standard ONNX operators.

Upstream's models change bound tensors in place: a training model adds gradients to buffers, and an optimizer model is
one operator on sequences of tensors. Here all state enters as inputs and leaves as outputs, by the contract of
:mod:`ort_trainer.step`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import google.protobuf.message
import numpy as np
import onnx
import onnx.version_converter
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from ..core.foreign import UPSTREAM
from ..core.indices import IndexRange
from ..core.optimizer_keys import UPDATE_COUNT
from ..step.accumulate import ACCUMULATED, BUFFER, RESET, accumulate
from ..step.arithmetic import one_minus_power
from ..step.contract import IR_VERSION, METADATA, OptimizerModel, Slot, Step, TensorSpec, to_metadata
from ..step.emitter import Emitter, infer_node
from ..step.names import Names
from . import recurrent  # noqa: F401 - its operators join the table
from .operators import OPERATORS, RENAMED, Nodes, Tensor

_MICROSOFT = "com.microsoft"
_OPSET = 18
# Upstream writes these operators of its own domain into ONNX's domain.
_MISPLACED = ("AveragePoolGrad", "MaxPoolGrad", "LayerNormalization", "SimplifiedLayerNormalization")
_ACCUMULATOR = "InPlaceAccumulatorV2"
_EPSILON = 1e-6
"""Upstream clips gradients by the factor max_norm / (norm + epsilon)."""


class Parameter(Protocol):
    """A trained parameter: anything with a type and a shape."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""


class _Tensor(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def to_bytes(model: ir.Model, description: Step | OptimizerModel) -> bytes:
    """Returns a model as a file, with its description in the metadata."""
    model.metadata_props[METADATA] = to_metadata(description)
    return bytes(ir.to_proto(model).SerializeToString())


def step_model(data: bytes, name: str, kind: str, parameters: Collection[str]) -> tuple[ir.Model, Step]:
    """Converts upstream's training or evaluation model to a step: the graph and its description.

    Args:
        data: The model.
        name: Its name in error messages.
        kind: ``training`` or ``evaluation``.
        parameters: Names in the checkpoint. Inputs of the model with these names are state, the others are the batch.

    Raises:
        ValueError: If it is not such a model, or has unsupported operators.
    """
    model = _converted(_parsed(data, name), name)
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    accumulators = [node for node in graph if node.op_type == _ACCUMULATOR]
    flags = {node.outputs[0].name for node in accumulators}
    outputs = [str(value.name) for value in graph.outputs if value.name not in flags]
    updates = _statistics(graph, parameters)
    if kind == "training":
        if not accumulators:
            raise ValueError(f"{name} accumulates no gradients: pass the training model of onnxruntime-training")
    elif accumulators:
        raise ValueError(f"expected the {kind} model, but {name} is the training model of onnxruntime-training")
    else:
        updates = {}
    graph.outputs.extend(value for value in updates.values() if value not in graph.outputs)
    ranges = tuple(dict.fromkeys(_index_ranges(graph, inputs)))
    updated = {parameter: str(value.name) for parameter, value in updates.items()}
    _lower(model, name)
    state = {parameter: parameter for parameter in parameters if parameter in inputs}
    results, buffers, reset = _accumulate(model, name, {key: inputs[key] for key in state}, updated)
    named = {str(value.name): value for value in graph.outputs}
    graph.outputs.clear()
    graph.outputs.extend([*(named[key] for key in outputs), *results.values(), *(named[v] for v in updated.values())])
    for parameter, output in updated.items():
        named[output].shape, named[output].type = inputs[parameter].shape, inputs[parameter].type
    internal = {*state, *(str(value.name) for value in buffers.values()), reset}
    specs = tuple(_spec(value, name) for key, value in inputs.items() if key not in internal)
    sizes = {size for spec in specs for size in spec.shape or ()}
    step = Step(
        kind=kind,
        export=UPSTREAM,
        inputs=specs,
        outputs=tuple(_output(named[key], sizes) for key in outputs),
        loss=outputs[0] if outputs else "",
        state=state,
        gradients={parameter: str(value.name) for parameter, value in results.items()},
        sums={parameter: str(value.name) for parameter, value in buffers.items()},
        buffer_updates=updated,
        reset=reset,
        index_ranges=ranges,
    )
    return _finished(model), step


def _parsed(data: bytes, name: str) -> onnx.ModelProto:
    """Returns the model in the bytes of a file."""
    try:
        proto: onnx.ModelProto = onnx.ModelProto.FromString(data)
    except google.protobuf.message.DecodeError as error:
        raise ValueError(f"{name} is damaged, truncated or not an ONNX model: {error}") from error
    if not proto.graph.node or not proto.opset_import:
        raise ValueError(f"{name} is damaged, truncated or not an ONNX model: it has no nodes or no opset")
    return proto


def _converted(proto: onnx.ModelProto, name: str) -> ir.Model:
    """Returns the model in the opset in which ``operators.py`` is written, with the types that upstream declared.

    Operators that upstream writes into ONNX's domain are moved out of it before ONNX's converter sees them. Declared
    types are restored afterwards, where the converted model has none.
    """
    declared_types = {value.name: value.type for value in proto.graph.value_info}
    opset = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 0)
    for node in proto.graph.node:
        if node.op_type in _MISPLACED and (opset < _OPSET or node.op_type != "LayerNormalization"):
            node.domain = _MICROSOFT
    if opset < _OPSET:
        try:
            proto = onnx.version_converter.convert_version(proto, _OPSET)
        except Exception as error:  # the converter is C++, whose errors have no common class
            raise ValueError(f"{name} has opset {opset}, and ONNX can't convert it to {_OPSET}: {error}") from error
    for node in proto.graph.node:
        if node.op_type == "LayerNormalization":
            node.domain = ""
    model: ir.Model = ir.from_proto(proto)
    for value in ir.convenience.create_value_mapping(model.graph).values():
        if value.name in declared_types and value.type is None:
            value.type = ir.serde.deserialize_type_proto_for_type(declared_types[value.name])
            value.shape = ir.serde.deserialize_type_proto_for_shape(declared_types[value.name])
    return model


def _statistics(graph: ir.Graph, parameters: Collection[str]) -> dict[str, ir.Value]:
    """Returns the running statistics that a training step changes: name -> new value.

    A norm that is used twice updates its statistics twice; the second node is rewired to read the first's results.
    """
    latest: dict[str, ir.Value] = {}
    for node in graph:
        if node.op_type == "BatchNormInternal":
            for place, (old, new) in enumerate(zip(node.inputs[3:5], node.outputs[1:3], strict=False), 3):
                if old is not None and old.name in parameters and new.name:
                    name = str(old.name)
                    if name in latest:
                        node.replace_input_with(place, latest[name])
                    latest[name] = new
    return latest


def _index_ranges(graph: ir.Graph, inputs: Mapping[str, ir.Value]) -> Iterator[IndexRange]:
    """Yields the ranges that embeddings and losses require of integer inputs of the model."""
    for node in graph:
        if len(node.inputs) < 2 or node.inputs[0] is None or node.inputs[1] is None:
            continue
        data, indices = node.inputs[:2]
        assert data is not None and indices is not None
        if indices is not inputs.get(str(indices.name)) or data.shape is None:
            continue
        entry = None
        if node.op_type == "Gather":
            size = data.shape[node.attributes.get_int("axis", 0)]
            entry = IndexRange(str(indices.name), 0, from_end=True, operator=node.op_type)
        elif node.op_type.startswith("SoftmaxCrossEntropyLoss") and "Grad" not in node.op_type:
            size = data.shape[1]
            ignored = node.attributes.get_int("ignore_index", None)  # type: ignore[arg-type]
            if len(node.inputs) > 3 and node.inputs[3] is not None:  # upstream's operator has it as an input
                constant = ir.convenience.get_const_tensor(node.inputs[3])
                if constant is None:
                    continue
                ignored = int(constant.numpy().item())
            entry = IndexRange(str(indices.name), 0, ignored=ignored, operator=node.op_type)
        if entry is not None and isinstance(size, int):
            yield entry._replace(size=size)


def _lower(model: ir.Model, name: str) -> None:
    """Replaces upstream's operators by ONNX's, in place, and infers missing types of values.

    Raises:
        ValueError: If an operator is not supported; the message names all of them.
    """
    graph = model.graph
    values = ir.convenience.create_value_mapping(graph)
    names = Names(values)
    missing = []
    for node in list(graph):
        if node.domain == _MICROSOFT and node.op_type in RENAMED:
            node.op_type, node.domain = RENAMED[node.op_type], ""
        if node.domain in ("", "ai.onnx"):
            _infer_missing_types(node, model)
        elif node.op_type in OPERATORS:
            try:
                _replace(graph, node, names, values)
            except (TypeError, ValueError) as error:  # an attribute or input that the function does not support
                missing.append(f"{node.op_type} ({error})")
        elif node.op_type != _ACCUMULATOR:
            missing.append(f"{node.domain}::{node.op_type}")
    if missing:
        raise ValueError(
            f"{name} has operators of onnxruntime-training that ort_trainer can't run: {sorted(set(missing))}. Export "
            "the model that it was made from with ort_trainer.artifacts.generate_artifacts()"
        )


def _infer_missing_types(node: ir.Node, model: ir.Model) -> None:
    """Infers the types of a node's outputs, if any is unknown."""
    if any(value.name and value.shape is None for value in node.outputs):
        infer_node(node, model.opset_imports)


def _replace(graph: ir.Graph, node: ir.Node, names: Names, values: Mapping[str, ir.Value]) -> None:
    """Replaces a node of upstream's domain by the nodes that its function in ``operators.py`` writes."""
    emit = Emitter({"": _OPSET}, names, node.name or node.op_type)
    op = Nodes(emit)
    inputs = [None if value is None else Tensor(op, value) for value in node.inputs]
    if node.op_type == "AveragePoolGrad":  # upstream's node takes the sizes from its output, which is named after x
        source = str(node.outputs[0].name).rpartition("_grad")[0]
        if source not in values:
            raise ValueError(f"the value {source!r} is missing")
        inputs.append(Tensor(op, values[source]))
    outputs = OPERATORS[node.op_type](op, *inputs, **{key: attr.value for key, attr in node.attributes.items()})
    results = [tensor.value for tensor in ([outputs] if isinstance(outputs, Tensor) else outputs)]
    pairs = [(old, new) for old, new in zip(node.outputs, results, strict=False) if old.name]
    for old, new in pairs:
        if new.shape is None:
            new.shape, new.type = old.shape, old.type or new.type
    ir.convenience.replace_nodes_and_values(
        graph, node, [node], emit.nodes, [old for old, _ in pairs], [new for _, new in pairs]
    )


def _accumulate(
    model: ir.Model, name: str, parameters: Mapping[str, ir.Value], updated: dict[str, str]
) -> tuple[dict[str, ir.Value], dict[str, ir.Value], str]:
    """Replaces upstream's in-place accumulators of gradients by nodes that return the new sums.

    Returns:
        The new sums and the earlier sums by parameter, and the name of the input that resets them.
    """
    graph = model.graph
    names = Names(ir.convenience.create_value_mapping(graph))
    results: dict[str, ir.Value] = {}
    buffers: dict[str, ir.Value] = {}
    gradients: dict[str, ir.Value] = {}
    reset: ir.Value | None = None
    for node in [node for node in graph if node.op_type == _ACCUMULATOR]:
        buffer, value, overwrite = node.inputs[0], node.inputs[1], node.inputs[2]
        assert buffer is not None and value is not None and overwrite is not None
        parameter = str(buffer.name).removesuffix(BUFFER.format(""))
        if parameter not in parameters:
            raise ValueError(
                f"{name} changes {parameter!r}, which the checkpoint lacks: use the checkpoint made with it"
            )
        graph.outputs.remove(node.outputs[0])
        graph.remove(node, safe=True)
        if parameter == buffer.name:  # a buffer of the model, overwritten
            if value.name in updated.values():
                continue
            graph.outputs.append(value)
            updated[parameter] = str(value.name)
            continue
        reset = overwrite
        like, out = parameters[parameter], names.unique(ACCUMULATED.format(parameter))
        result = ir.Value(name=out, type=like.type, shape=like.shape)
        gradients[parameter], buffers[parameter], results[parameter] = value, buffer, result
    if reset is not None:
        graph.extend(accumulate(reset, gradients, buffers, results, names))
    return results, buffers, RESET if reset is None else str(reset.name)


def _spec(value: ir.Value, name: str) -> TensorSpec:
    """Describes an input; unnamed sizes are named after it."""
    if value.shape is None or value.dtype is None:
        raise ValueError(f"{name} does not declare the shape of its input {value.name!r}: export it with all shapes")
    shape = [
        size if isinstance(size, int) else str(size.value or f"{value.name}_{axis}")
        for axis, size in enumerate(value.shape)
    ]
    return TensorSpec(str(value.name), str(value.dtype.numpy().name), tuple(shape))


def _output(value: ir.Value, sizes: set[int | str]) -> TensorSpec:
    """Describes an output; without a shape, if it depends on sizes that no input has."""
    dtype = ir.DataType.FLOAT if value.dtype is None else value.dtype
    shape: tuple[int | str, ...] | None = None
    if value.shape is not None and all(isinstance(size, int) or size.value in sizes for size in value.shape):
        shape = tuple(size if isinstance(size, int) else f"dim({size.value!r})" for size in value.shape)
    return TensorSpec(str(value.name), str(dtype.numpy().name), shape)


def optimizer_model(data: bytes, name: str, parameters: Mapping[str, Parameter]) -> tuple[ir.Model, OptimizerModel]:
    """Converts upstream's optimizer model to one that updates every trained parameter.

    Args:
        data: The model.
        name: Its name in error messages.
        parameters: The trained parameters, which upstream's model takes as a sequence.

    Raises:
        ValueError: If it is not such a model, or its optimizer is neither AdamW nor SGD.
    """
    model: ir.Model = ir.from_proto(_parsed(data, name))
    nodes = {node.op_type: node for node in model.graph}
    optimizer = nodes.pop("AdamWOptimizer", None) or nodes.pop("SGDOptimizerV2", None)
    clip = nodes.pop("InplaceClipGradNorm", None)
    if optimizer is None or nodes:
        raise ValueError(
            f"{name} is no optimizer model of onnxruntime-training with AdamW or SGD: it has the operators "
            f"{sorted({node.op_type for node in model.graph})}"
        )
    writer = _Update(optimizer, clip)
    for parameter, spec in parameters.items():
        writer.add(parameter, spec)
    return writer.finish()


class _Update:
    """Writes the update of all parameters.

    Args:
        optimizer: Upstream's operator.
        clip: Upstream's operator that clips the norm of the gradients, or None.
    """

    def __init__(self, optimizer: ir.Node, clip: ir.Node | None) -> None:
        self._attributes = {key: attribute.value for key, attribute in optimizer.attributes.items()}
        self._adam = optimizer.op_type == "AdamWOptimizer"
        self._mode = int(self._attributes.get("adam_mode", 0))
        self._limit = None if clip is None else float(clip.attributes.get_float("max_norm", 1.0))
        self._names = Names([])
        self._op = Nodes(Emitter({"": _OPSET}, self._names, "optimizer"))
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._weights: dict[str, tuple[Tensor, Tensor]] = {}
        self._specs: dict[str, Parameter] = {}
        self._state: dict[str, Slot] = {}
        self._rate = self._input("learning_rate", _Tensor(np.dtype(np.float32), (1,)))
        # A constant learning rate in the model overrides the runtime's.
        rate = optimizer.inputs[0]
        fixed = None if rate is None else ir.convenience.get_const_tensor(rate)
        used = self._rate if fixed is None else self._op.constant(fixed.numpy())
        self._used_rate = self._op.Reshape(used, self._op.ints())  # a scalar broadcasts to parameters of any shape

    def add(self, parameter: str, spec: Parameter) -> None:
        """Adds a parameter."""
        self._specs[parameter] = spec
        self._weights[parameter] = (
            self._input(parameter, spec),
            self._input(f"{parameter}_grad", spec),
        )

    def finish(self) -> tuple[ir.Model, OptimizerModel]:
        """Returns the model and its description."""
        op, gradients = self._op, {name: gradient for name, (_, gradient) in self._weights.items()}
        if self._limit is not None and gradients:
            squares = [op.ReduceSumSquare(gradient, keepdims=0) for gradient in gradients.values()]
            factor = op.Min(op.Reciprocal(op.Sqrt(op.Sum(*squares)) + _EPSILON) * self._limit, 1.0)
            gradients = {name: gradient * factor for name, gradient in gradients.items()}
        factors = self._factors() if self._adam else None
        results = {}
        for name, (weight, _) in self._weights.items():
            if factors is None:
                new = weight - self._used_rate * gradients[name]
            else:
                new = self._adam_update(name, weight, gradients[name], factors)
            results[name] = self._output(new, weight)
        graph = ir.Graph(self._inputs, self._outputs, nodes=op.emit.nodes, opset_imports={"": _OPSET}, name="optimizer")
        description = OptimizerModel(
            export=UPSTREAM,
            name="AdamOptimizer" if self._adam else "SGDOptimizer",
            weights={name: (str(weight.value.name), results[name]) for name, (weight, _) in self._weights.items()},
            gradients={name: str(gradient.value.name) for name, (_, gradient) in self._weights.items()},
            state=self._state,
            learning_rate=str(self._rate.value.name),
        )
        return _finished(ir.Model(graph, ir_version=IR_VERSION)), description

    def _count(self) -> Tensor:
        """Returns the number of this update, counted from 1, as a scalar.

        The state keeps the number of the next update. It is computed from the new count, because the engine writes the
        new count into the old one's memory.
        """
        old = self._input(UPDATE_COUNT, _Tensor(np.dtype(np.int64), (1,)))
        new = old + 1
        self._keep(UPDATE_COUNT, old, new, initial=1.0)
        return self._op.Reshape(new - 1, self._op.ints())

    def _factors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns what all parameters share: the factors of weight decay and step, and the divisor of the squares.

        With step t: mode 0 is PyTorch's AdamW, which divides the squares by 1 - beta^t. Mode 1 is Transformers', which
        multiplies the step by sqrt(1 - beta^t) instead. Both divide the step by 1 - alpha^t.
        """
        op, attributes, rate = self._op, self._attributes, self._used_rate
        decay = rate * float(attributes.get("weight_decay", 1e-2))
        count = self._count()
        if not attributes.get("correct_bias", 1):
            return decay, rate, None
        first, second = (Tensor(op, one_minus_power(op.emit, base, count.value)) for base in self._decays())
        if self._mode == 0:
            return decay, rate / first, second
        return decay, rate * op.Sqrt(second) / first, None

    def _decays(self) -> tuple[float, float]:
        """Returns the decays of the first and of the second moment."""
        return float(self._attributes.get("alpha", 0.9)), float(self._attributes.get("beta", 0.999))

    def _adam_update(
        self, name: str, weight: Tensor, gradient: Tensor, factors: tuple[Tensor, Tensor, Tensor | None]
    ) -> Tensor:
        """Returns the new weight; mode 0 applies the weight decay before the step, mode 1 after it."""
        decay, step, divisor = factors
        alpha, beta = self._decays()
        first, second = (self._input(f"{name}.{slot}", self._specs[name]) for slot in ("Moment_1", "Moment_2"))
        mean = first * alpha + gradient * (1 - alpha)
        square = second * beta + gradient * gradient * (1 - beta)
        self._keep(f"{name}.Moment_1", first, mean)
        self._keep(f"{name}.Moment_2", second, square)
        if self._mode == 0:
            weight = weight - weight * decay
        root = self._op.Sqrt(square if divisor is None else square / divisor)
        weight = weight - step * mean / (root + float(self._attributes.get("epsilon", 1e-8)))
        return weight if self._mode == 0 else weight - weight * decay

    def _input(self, name: str, like: Parameter) -> Tensor:
        kind = ir.TensorType(ir.DataType.from_numpy(like.dtype))
        value = ir.Value(name=self._names.unique(name), type=kind, shape=ir.Shape(like.shape))
        self._inputs.append(value)
        return Tensor(self._op, value)

    def _keep(self, key: str, old: Tensor, new: Tensor, initial: float = 0.0) -> None:
        """Makes a pair of old and new value a slot of the optimizer's state."""
        assert old.value.dtype is not None and old.value.shape is not None
        dtype, shape = str(old.value.dtype.numpy().name), tuple(old.value.shape.numpy())
        self._state[key] = Slot(str(old.value.name), self._output(new, old), dtype, shape, initial)

    def _output(self, new: Tensor, old: Tensor) -> str:
        name = self._names.unique(f"{old.value.name}.updated")
        new.value.name, new.value.type, new.value.shape = name, old.value.type, old.value.shape
        self._outputs.append(new.value)
        return name


def _finished(model: ir.Model) -> ir.Model:
    """Removes unused nodes, other domains and metadata from a model, in place, and returns it."""
    common_passes.RemoveUnusedNodesPass()(model)
    for domain in [domain for domain in model.opset_imports if domain not in ("", "ai.onnx")]:
        del model.opset_imports[domain]
    model.ir_version = IR_VERSION
    model.metadata_props.clear()
    return model
