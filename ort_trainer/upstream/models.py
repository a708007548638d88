"""Reads the models of onnxruntime-training's artifacts: the forward pass of a step, and the optimizer's settings.

Upstream's training model is a forward pass, which its optimizer has rewritten, and the gradients that it derived. Only
the forward pass is read, in ONNX's own operators; our exporter derives the gradients anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import google.protobuf.message
import onnx
import onnx.version_converter
import onnx_ir as ir

from ..state.state import Array
from ..step.accumulate import BUFFER, RESET
from ..step.contract import IR_VERSION
from ..step.prune import RemoveUnusedPass

_MICROSOFT = "com.microsoft"
_OPSET = 18
# Upstream writes these operators of its own domain into ONNX's domain, in opsets that don't have them.
_MISPLACED = ("LayerNormalization", "SimplifiedLayerNormalization")
_ACCUMULATOR = "InPlaceAccumulatorV2"
# Upstream's operator for training -> ONNX's, of which it is a copy that also returns what the gradient needs; and the
# number of outputs that both have, None for all.
_PLAIN: Mapping[str, tuple[str, int | None]] = {
    "BatchNormInternal": ("BatchNormalization", 3),
    "ConcatTraining": ("Concat", 1),
    "GRUTraining": ("GRU", 2),
    "LSTMTraining": ("LSTM", 3),
    "ReduceSumTraining": ("ReduceSum", None),
    "SoftmaxCrossEntropyLossInternal": ("SoftmaxCrossEntropyLoss", 2),
    "SplitTraining": ("Split", None),
    "Trilu": ("Trilu", None),
}


@dataclass(frozen=True)
class ForwardPass:
    """The forward pass of upstream's training or evaluation model.

    Attributes:
        model: The pass, of the batch and the parameters, in upstream's order.
        outputs: Names of its outputs, the loss first.
        parameters: The parameters and buffers among its inputs, by name.
        trained: Names of the parameters whose gradients upstream's model accumulates.
        gradients: Trained parameter -> a further output, its gradient. Only models that ort_trainer wrote have these.
        updates: Buffer -> a further output, its new value. Only models that ort_trainer wrote have these.
    """

    model: ir.Model
    outputs: tuple[str, ...]
    parameters: Mapping[str, ir.Value]
    trained: tuple[str, ...]
    gradients: Mapping[str, str] = field(default_factory=dict)
    updates: Mapping[str, str] = field(default_factory=dict)


def forward_pass(data: bytes, name: str, kind: str, parameters: Collection[str]) -> ForwardPass:
    """Returns the forward pass of upstream's training or evaluation model.

    The model may also be one that ort_trainer wrote with the flavor ``onnxruntime-training``. Its gradients consist of
    ONNX's operators, so they are kept.

    Args:
        data: The model.
        name: Its name in error messages.
        kind: ``training`` or ``evaluation``.
        parameters: Names in the checkpoint. Inputs of the model with these names are state, the others are the batch.

    Raises:
        ValueError: If it is not such a model.
    """
    model: ir.Model = ir.from_proto(_parsed(data, name))
    graph = model.graph
    state = {str(value.name): value for value in graph.inputs if value.name in parameters}
    gradients, updates = _accumulated(graph, name, state)
    if kind == "training" and not gradients:
        raise ValueError(f"{name} accumulates no gradients: pass the training model of onnxruntime-training")
    if kind != "training" and gradients:
        raise ValueError(f"expected the {kind} model, but {name} is the training model of onnxruntime-training")
    outputs = tuple(str(value.name) for value in graph.outputs)
    trained = tuple(key for key in state if key in gradients)
    # Upstream's generator always calls the gradient of p "p_grad", and ort_trainer never does.
    if all(value.name == f"{key}_grad" for key, value in gradients.items()):
        gradients = {}
    graph.outputs.extend([*gradients.values(), *updates.values()])
    others = {RESET, *map(BUFFER.format, trained)}
    RemoveUnusedPass([str(value.name) for value in graph.inputs if value.name not in others])(model)
    kept = ({key: str(value.name) for key, value in values.items()} for values in (gradients, updates))
    return ForwardPass(_in_standard_operators(model, name), outputs, state, trained, *kept)


def _parsed(data: bytes, name: str) -> onnx.ModelProto:
    """Returns the model in the bytes of a file."""
    try:
        proto: onnx.ModelProto = onnx.ModelProto.FromString(data)
    except google.protobuf.message.DecodeError as error:
        raise ValueError(f"{name} is damaged, truncated or not an ONNX model: {error}") from error
    if not proto.graph.node or not proto.opset_import:
        raise ValueError(f"{name} is damaged, truncated or not an ONNX model: it has no nodes or no opset")
    return proto


_Values = dict[str, ir.Value]


def _accumulated(graph: ir.Graph, name: str, parameters: Collection[str]) -> tuple[_Values, _Values]:
    """Removes the nodes that write to gradient buffers or to buffers of the model, and their outputs, in place.

    Returns:
        The gradient of each trained parameter, and the new value of each overwritten buffer of the model.
    """
    gradients: _Values = {}
    updates: _Values = {}
    for node in [node for node in graph if node.op_type == _ACCUMULATOR]:
        buffer, value = node.inputs[:2]
        assert buffer is not None and value is not None
        key = str(buffer.name).removesuffix(BUFFER.format(""))
        if key not in parameters:
            raise ValueError(f"{name} changes {key!r}, which the checkpoint lacks: use the checkpoint made with it")
        graph.outputs.remove(node.outputs[0])
        graph.remove(node, safe=True)
        (updates if key == buffer.name else gradients)[key] = value
    return gradients, updates


def _in_standard_operators(model: ir.Model, name: str) -> ir.Model:
    """Returns a model with ONNX's operators in place of upstream's copies, in an opset that has these inputs."""
    opset = model.opset_imports.get("", 0)
    for node in model.graph:
        if node.op_type in _MISPLACED and not node.domain and (opset < _OPSET or node.op_type != "LayerNormalization"):
            node.domain = _MICROSOFT
    if opset < _OPSET:
        try:
            model = ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(model), _OPSET))
        except Exception as error:  # the converter is C++, whose errors have no common class
            raise ValueError(f"{name} has opset {opset}, and ONNX can't convert it to {_OPSET}: {error}") from error
    for node in model.graph:
        if node.domain == _MICROSOFT and node.op_type == "LayerNormalization":
            node.domain = ""
        if node.domain == _MICROSOFT and node.op_type in _PLAIN:
            _make_plain(node, name)
    used = {node.domain for node in model.graph.all_nodes()}
    for domain in [domain for domain in model.opset_imports if domain and domain not in used]:
        del model.opset_imports[domain]
    model.ir_version = IR_VERSION
    model.metadata_props.clear()
    return model


def _make_plain(node: ir.Node, name: str) -> None:
    """Makes a node of upstream's domain one of ONNX's, in place."""
    if node.op_type == "SoftmaxCrossEntropyLossInternal":
        ignored = node.inputs[3] if len(node.inputs) > 3 else None
        if ignored is not None:  # upstream's operator has it as an input
            constant = ir.convenience.get_const_tensor(ignored)
            if constant is None:
                raise ValueError(f"{name} computes the label that its loss ignores: make it a constant")
            node.attributes["ignore_index"] = ir.AttrInt64("ignore_index", int(constant.numpy().item()))
        node.resize_inputs(min(len(node.inputs), 3))
        node.attributes.pop("output_type", None)
    if node.op_type == "BatchNormInternal":  # always takes the statistics of the batch
        node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
    node.op_type, count = _PLAIN[node.op_type]
    node.domain = ""
    if count is not None:
        node.resize_outputs(min(len(node.outputs), count))


@dataclass(frozen=True)
class UpdateSettings:
    """What upstream's optimizer model says about the update of all parameters.

    Attributes:
        adam: The settings of AdamW, by the names of ``AdamConfig``; None if the optimizer is SGD.
        limit: Limit of the norm of all gradients; None if there is none.
        fixed_rate: The learning rate in the model, which overrides the runtime's; None if there is none.
    """

    adam: Mapping[str, Any] | None
    limit: float | None
    fixed_rate: Array | None


# Upstream's name of an attribute of AdamWOptimizer -> that of AdamConfig, and upstream's default.
_ADAM = {
    "alpha": ("alpha", 0.9),
    "beta": ("beta", 0.999),
    "epsilon": ("epsilon", 1e-8),
    "weight_decay": ("lambda_coef", 1e-2),
    "correct_bias": ("do_bias_correction", True),
    "adam_mode": ("weight_decay_mode", 0),
}


def update_settings(data: bytes, name: str) -> UpdateSettings:
    """Returns the settings in upstream's optimizer model.

    Args:
        data: The model.
        name: Its name in error messages.

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
    values = {key: attribute.value for key, attribute in optimizer.attributes.items()}
    adam = {ours: type(default)(values.get(theirs, default)) for theirs, (ours, default) in _ADAM.items()}
    rate = optimizer.inputs[0]
    fixed = None if rate is None else ir.convenience.get_const_tensor(rate)
    return UpdateSettings(
        adam if optimizer.op_type == "AdamWOptimizer" else None,
        None if clip is None else float(clip.attributes.get_float("max_norm", 1.0)),
        None if fixed is None else fixed.numpy(),
    )
