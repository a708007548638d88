"""``GradientGraphBuilder`` for a stock ONNX Runtime, which lacks onnxruntime-training's class."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch
from torch import nn

from ..capture.call import CallDescription, ExportedCall
from ..core.atomic import atomic_path
from ..core.errors import ExportError, shown
from ..export.builder import GraphBuilder
from ..onnx.describe import describe_onnx, input_dtypes
from ..onnx.load import load_onnx_model
from ..onnx.module import OnnxModule
from ..step import Step, TensorSpec
from ..step.onnx_file import to_proto
from ..step.prune import prune


class GradientGraphBuilder:
    """Adds gradients to an ONNX model, in ONNX's own operators.

    The result has the model's inputs and outputs, and an output ``<name>_grad`` for each weight: the gradient of the
    sum of the differentiated outputs, each times its factor ``<output>_grad``. The factor of the loss is an
    initializer, 1. Those of other outputs are inputs: if it is not fed, that of a scalar is 1, and that of an output
    from which another one is computed is 0; any other must be fed.

    Args:
        model: The serialized model.
        outputs: Names of the outputs to differentiate.
        weights: Names of the inputs and initializers whose gradients are computed.
        loss: The name of the loss, one of ``outputs``; "" if there is none.

    Raises:
        ValueError: If a name is unknown, or its tensor is not floating-point.
        ExportError: If the model can't be read.
    """

    def __init__(self, model: bytes, outputs: Collection[str], weights: Collection[str], loss: str) -> None:
        load_onnx_model(model)  # raises what is wrong with it
        self._file = ir.from_proto(onnx.ModelProto.FromString(model))
        common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(self._file)
        graph = self._file.graph
        self._outputs = _checked("outputs", outputs, graph.outputs)
        self._weights = _checked("weights", weights, [*graph.inputs, *graph.initializers.values()])
        self._loss = loss
        self._result: onnx.ModelProto | None = None
        if loss and loss not in self._outputs:
            raise ValueError(f"the loss {loss!r} must be one of the outputs to differentiate, {self._outputs}")

    def build(self) -> None:
        """Differentiates the model.

        Raises:
            ValueError: If the outputs do not depend on one of the weights.
            ExportError: If the model can't be differentiated.
            NotImplementedError: If it draws random numbers, which a graph of ONNX's operators gets as inputs.
        """
        file = self._file.clone()
        order = [value.name for value in file.graph.inputs]
        # What is differentiated is an input for now, so that initializers and inputs are treated alike.
        initial = _as_inputs(file.graph, self._weights)
        loaded = load_onnx_model(to_proto(file))
        module = OnnxModule(loaded, copy=False)
        for name, reason in module.refused.items():
            raise ExportError(f"the output {name!r} can't be computed: {reason}")
        inputs = describe_onnx(loaded, None, {}, module.outputs[0]).inputs
        dtypes = input_dtypes(loaded)
        sizes = {entry.name: [size if isinstance(size, int) else 2 for size in entry.shape] for entry in inputs}
        forward, backward = _passes(
            _Differentiated(module, self._outputs),
            {entry.name: entry.shape for entry in inputs},
            {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in sizes.items()},
            inputs=self._weights,
        )
        without = [name for name in self._weights if name not in backward.input_gradients]
        if without:
            raise ValueError(f"the outputs {self._outputs} do not depend on the weights {without}: leave these out")
        for spec, output in zip(forward.outputs, module.outputs, strict=True):
            factor = self._default(output, spec) if spec.name in backward.tangents else None
            if factor is not None:
                initial[f"{output}_grad"] = _factor(factor, spec)
        initial |= {
            module.names[name]: ir.tensor_adapters.TorchTensor(tensor) for name, tensor in module.state_dict().items()
        }
        model = _joined(forward, backward, module.outputs, module.names)
        known = {value.name for value in model.graph.inputs}
        for value in list(file.graph.inputs):
            if value.name not in known:  # nothing reads it
                file.graph.inputs.remove(value)
                model.graph.inputs.append(value)
        factors = [f"{name}_grad" for name in self._outputs if name != self._loss]
        for value in model.graph.inputs:
            if value.name in factors and value.name in initial:  # of one element, which the graph expands
                value.shape = ir.Shape([None] * len(initial[value.name].shape))
        results = [*module.outputs, *(f"{name}_grad" for name in self._weights)]
        self._result = _with_inputs(model, [*order, *factors], initial, results)

    def _default(self, output: str, spec: TensorSpec) -> float | None:
        """Returns the initial factor of an output; None if it must be fed."""
        if output == self._loss:
            return 1.0
        value = next(value for value in self._file.graph.outputs if value.name == output)
        if _results_of(value).intersection(self._outputs):
            return 0.0
        return 1.0 if set(spec.shape or ()) <= {1} else None

    def get_model(self) -> bytes:
        """Returns the model with gradients, serialized."""
        return bytes(self._built().SerializeToString())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model with gradients; replaces an existing file."""
        with atomic_path(Path(path)) as temporary:
            onnx.save(self._built(), temporary)

    def _built(self) -> onnx.ModelProto:
        if self._result is None:
            raise RuntimeError("there are no gradients yet: call build() first")
        return self._result


def export_gradient_graph(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    example_input: torch.Tensor,
    example_labels: torch.Tensor,
    gradient_graph_path: str | os.PathLike[str],
    opset_version: int = 12,
) -> None:
    """Writes an ONNX model of a PyTorch model, its loss and the gradients of its parameters.

    It has the inputs ``input``, ``labels`` and the parameters by name, and the outputs ``output``, ``loss`` and
    ``<parameter>_grad`` for each parameter that requires grad. The first dimension of ``input`` and ``labels`` is free.

    Args:
        model: The model, of one tensor.
        loss_fn: (output, labels) -> scalar loss.
        example_input: An input.
        example_labels: Its labels.
        gradient_graph_path: The file; an existing one is replaced.
        opset_version: The opset; 18 if it is lower.

    Raises:
        ExportError: If the model can't be exported.
        ValueError: If the loss depends on no parameter that requires grad.
        NotImplementedError: If the model draws random numbers: call ``model.eval()``, or train with ORTTrainer.
    """
    sample = {"input": example_input.detach(), "labels": example_labels}
    shapes = {name: ["batch_size", *value.shape[1:]][: value.dim()] for name, value in sample.items()}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    forward, backward = _passes(_WithLoss(model, loss_fn), shapes, sample, trainable=[f"model.{n}" for n in trained])
    state = model.state_dict()
    joined = _joined(forward, backward, ["output", "loss"], {name: name for name in state})
    parameters = [name for name, _ in model.named_parameters()]
    initial: dict[str, ir.TensorProtocol] = {}
    initial |= {
        name: ir.tensor_adapters.TorchTensor(tensor) for name, tensor in state.items() if name not in parameters
    }
    initial["loss_grad"] = _factor(1.0, forward.outputs[1])
    results = ["output", "loss", *(f"{name}_grad" for name in trained)]
    with atomic_path(Path(gradient_graph_path)) as temporary:
        onnx.save(_with_inputs(joined, ["input", "labels", *parameters], initial, results), temporary)


class _WithLoss(nn.Module):
    """A model and its loss, of which only the loss has a gradient."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model, self._loss_fn = model, loss_fn

    def forward(self, model_input: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.model(model_input)
        return output.detach(), self._loss_fn(output, labels)


class _Differentiated(nn.Module):
    """A model of which only some outputs have gradients."""

    def __init__(self, model: OnnxModule, outputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self._outputs = model, outputs

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.model(*inputs)
        return tuple(value if name in self._outputs else value.detach() for name, value in outputs.items())


def _checked(kind: str, names: Collection[str], values: Iterable[ir.Value]) -> list[str]:
    """Returns names in order, after checking that they are those of floating-point tensors."""
    if isinstance(names, str) or not names:
        raise ValueError(f"{kind} must be a set of one or more names, but {shown(names)} was given")
    dtypes = {str(value.name): value.dtype for value in values}
    unknown = sorted(name for name in names if name not in dtypes)
    if unknown:
        raise ValueError(f"the model has no {kind} {unknown}: choose from {list(dtypes)}")
    others = [name for name in sorted(names) if not (dtypes[name] or ir.DataType.UNDEFINED).is_floating_point()]
    if others:
        raise ValueError(f"{others} in {kind} are not floating-point, so they have no gradient: leave them out")
    return sorted(names)


def _as_inputs(graph: ir.Graph, names: Iterable[str]) -> dict[str, ir.TensorProtocol]:
    """Turns initializers into inputs, in place, and returns their values."""
    values = {}
    for name in names:
        value = graph.initializers.pop(name, None)
        if value is not None and value.const_value is not None:
            values[name], value.const_value = value.const_value, None
            if not value.is_graph_input():
                graph.inputs.append(value)
    return values


def _factor(value: float, spec: TensorSpec) -> ir.TensorProtocol:
    """Returns a factor of an output: one element, in as many dimensions."""
    return ir.tensor(np.full([1] * len(spec.shape or ()), value, spec.dtype))


def _results_of(value: ir.Value) -> set[str]:
    """Returns the names of all values that are computed from one."""
    reached = [value]
    for each in reached:
        reached += [result for node, _ in each.uses() for result in node.outputs if result not in reached]
    return {str(each.name) for each in reached[1:]}


def _passes(
    module: nn.Module,
    shapes: Mapping[str, Sequence[int | str]],
    sample: Mapping[str, torch.Tensor],
    inputs: Iterable[str] = (),
    trainable: Iterable[str] = (),
) -> tuple[Step, Step]:
    """Returns the forward pass of a module, in ONNX's operators, and its backward pass for some inputs and parameters.

    Raises:
        ExportError: If the module can't be exported.
        ValueError: If its results depend on none of these.
        NotImplementedError: If it draws random numbers.
    """
    call = ExportedCall(
        model=module,
        description=CallDescription(shapes),
        loss_fn=None,
        trainable=frozenset(trainable),
        modes={part: part.training for part in module.modules()},
        args=tuple(("tensor", name) for name in shapes),
        kwargs={},
        requires_grad=frozenset(inputs),
    )
    forward, backward = GraphBuilder(call).build_call(sample)
    if not backward:
        raise ValueError(f"no output depends on {[*inputs, *trainable]}: there is no gradient")
    if forward.random:
        raise NotImplementedError(
            "the model draws random numbers, which only onnxruntime-training's graphs do by themselves: set the "
            "ratio of Dropout to 0, or train the model with ORTTrainer"
        )
    forward.unchecked()  # warns of branches
    return forward, backward[-1]


def _joined(forward: Step, backward: Step, outputs: Sequence[str], state: Mapping[str, str]) -> ir.Model:
    """Returns one model of both passes, whose state consists of inputs.

    Args:
        forward: The forward pass, of a module with the attribute ``model``.
        backward: The backward pass. Gradients of outputs are expanded to the sizes of these.
        outputs: The names of the outputs.
        state: Name of a parameter or buffer of ``model`` -> the name of its input.
    """
    names = dict(zip((spec.name for spec in forward.outputs), outputs, strict=True))
    names |= {to: f"{names[output]}_grad" for output, to in backward.tangents.items()}
    names |= {to: f"{name}_grad" for name, to in backward.input_gradients.items()}
    names |= {to: f"{state[name.removeprefix('model.')]}_grad" for name, to in backward.gradients.items()}
    names |= {to: state[name.removeprefix("model.")] for name, to in forward.state.items()}
    model, graph = forward.model.clone(), backward.model.clone().graph
    values = ir.convenience.create_value_mapping(model.graph)
    nodes, inputs, results = list(graph), list(graph.inputs), list(graph.outputs)
    initializers = list(graph.initializers.values())
    graph.inputs.clear()
    graph.outputs.clear()
    graph.initializers.clear()
    graph.remove(nodes)
    for output, tangent in backward.tangents.items():
        value = next(value for value in inputs if value.name == tangent)
        shape = ir.node("Shape", [values[output]])
        expanded = ir.node("Expand", [value, shape.outputs[0]])
        ir.convenience.replace_all_uses_with(value, expanded.outputs[0])
        expanded.replace_input_with(0, value)
        model.graph.extend([shape, expanded])
    for value in inputs:
        if value.name in values:
            ir.convenience.replace_all_uses_with(value, values[value.name])
        else:
            model.graph.inputs.append(value)
    for value in initializers:
        value.name = f"gradients.{value.name}"
        model.graph.register_initializer(value)
    model.graph.extend(nodes)
    model.graph.outputs.extend(results)
    symbols = {
        size: ir.SymbolicDim(described)
        for spec in forward.inputs
        if spec.name in values
        for described, size in zip(spec.shape or (), values[spec.name].shape or (), strict=True)
        if isinstance(described, str)
    }
    for value in [*model.graph.inputs, *model.graph.outputs]:
        value.name = names.get(str(value.name), value.name)
        value.shape = ir.Shape([symbols.get(size, size) for size in value.shape or ()])
    common_passes.NameFixPass()(model)
    return model


def _with_inputs(
    model: ir.Model, inputs: Sequence[str], initial: Mapping[str, ir.TensorProtocol], outputs: Sequence[str]
) -> onnx.ModelProto:
    """Returns a model with these inputs and outputs, in order; other inputs become initializers.

    Args:
        model: The model, which is changed.
        inputs: Names of inputs; those that it does not have are left out.
        initial: The values of initializers, and of inputs that need not be fed.
        outputs: Names of outputs.
    """
    values = {str(value.name): value for value in model.graph.inputs}
    model.graph.inputs.clear()
    model.graph.inputs.extend(values[name] for name in inputs if name in values)
    for name in values.keys() & initial.keys():
        values[name].const_value = initial[name]
        model.graph.register_initializer(values[name])
    return to_proto(prune(model, outputs, inputs))
