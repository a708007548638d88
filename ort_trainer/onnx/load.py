"""Loads the ONNX model of a forward pass, and separates its weights."""

from __future__ import annotations

import keyword
import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import google.protobuf.message
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch

from ..core.errors import ExportError, check_file, shown
from ..step.onnx_file import TYPE, WEIGHTS, corruption_reported, recorded_weights
from .classical import name_coefficients, outputs_before_maps, select_features, without_maps
from .embedded import WEIGHT_TYPES, constant_floats, embedded_floats, lift
from .external_data import check_external_data
from .memory import LoadedTensors, check_calls
from .shapes import fixed_sizes, without_negative_sizes
from .values import tensor_of

FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"
"""The key where onnxscript's optimizer records the parameter that an initializer was, such as a transposed weight."""

_log = logging.getLogger(__name__)
# Layers: a constant that one of these takes after its first input is a weight.
_WITH_WEIGHTS = {
    *("MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN"),
    *("BatchNormalization", "GroupNormalization", "LayerNormalization", "RMSNormalization"),
}
# What exporters do to a weight before a layer takes it.
_REARRANGING = {
    *("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze", "QuantizeLinear", "DequantizeLinear"),
}
# Positions of inputs that are settings rather than weights: thresholds, scales, sines of positions, weights of classes.
_SETTINGS = {
    "Clip": {1, 2},
    "DequantizeLinear": {1, 2},
    "Dropout": {1, 2},
    "GroupQueryAttention": {7, 8},
    "MatMulNBits": {2, 3},
    "NegativeLogLikelihoodLoss": {2},
    "OneHot": {1, 2},
    "Pad": {2},
    "Pow": {1},
    "QLinearConv": {1, 4, 6},
    "QLinearMatMul": {1, 4, 6},
    "QuantizeLinear": {1, 2},
    "Resize": {1, 2, 3},
    "RoiAlign": {1},
    "RotaryEmbedding": {1, 2, 3},
    "SoftmaxCrossEntropyLoss": {2},
    "Upsample": {1},
}
# Follows the first four bytes of a file in ORT format, a flatbuffer.
_ORT_FORMAT = b"ORTM"
# The key where torch.onnx (dynamo=True) records whether an initializer was a parameter, a buffer or a constant.
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
# torch.onnx writes constants of the code as initializers too, under such names.
_TORCH_CONSTANT = re.compile(
    r"(val|scalar_tensor\w*|_to_copy|full\w*|ones\w*|zeros\w*|arange\w*)(_\d+)?|.*/Constant(_\d+)?_output_\d+"
)
# What quantizers append to the name of a weight: this package, and ONNX Runtime.
_QUANTIZED = re.compile(r"(\.int[48]|(_DQ)?_Q\d|_quantized)$")
# Up to this IR version, initializers have to be inputs, too, which no batch is meant to replace.
_OF_INPUTS = 3
# ONNX Runtime's optimizer gives such names to constants of functions that it has inlined.
_INLINED_CONSTANT = "_inlfunc_"


@dataclass(frozen=True)
class OnnxModel:
    """A forward pass, separated from its weights.

    Attributes:
        model: The model; its weights are inputs of its graph, after its own inputs.
        inputs: Names of its own inputs.
        optional: Names of inputs for which the file has a value, which a batch may replace.
        fixed: Names of the others for which it has one: of weights, and names that are no identifiers.
        parameters: Name -> value of every weight that can be trained.
        buffers: Name -> value of every running statistic of a batch norm.
        file: The model as it was loaded, before functions were inlined. The weights are inputs here as well.
        order: The names of the file's initializers, in their order, then those of weights from other places.
        frozen: Parameters that the file marks as frozen.
        coefficients: The parameters that the file stores in attributes of nodes: name -> the position of the node
            among those of the graph that are no Constant, and the attribute.
    """

    model: ir.Model
    inputs: tuple[str, ...]
    optional: tuple[str, ...]
    fixed: frozenset[str]
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    file: ir.Model
    order: tuple[str, ...]
    frozen: frozenset[str] = frozenset()
    coefficients: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return tuple(str(value.name) for value in self.model.graph.outputs)


def load_onnx_model(source: onnx.ModelProto | str | os.PathLike[str] | bytes) -> OnnxModel:
    """Returns the forward pass and the weights of an ONNX model.

    Weights are all floating-point initializers of at least one dimension, also those of bodies of If, Loop and Scan,
    except settings (such as the scales of a Resize) and initializers that torch.onnx made from constants in the code;
    floats in Constant nodes that a layer has as operands; and the coefficients of scikit-learn's linear models. Weights
    of bodies and Constant nodes become initializers of the graph. In a file from ``save_as_onnx``, weights are exactly
    the former parameters. Running statistics of batch norms are buffers. An output that maps classes to probabilities
    is replaced by the probabilities.

    Args:
        source: A model, which is not changed; a path, with or without external data; or a serialized model.

    Raises:
        FileNotFoundError: If the file, or a file of its external data, does not exist.
        ExportError: If it is not an ONNX model, can't be read, or asks for files outside its folder.
    """
    proto, folder = _read(source)
    with corruption_reported("the ONNX model", ExportError):
        return _load(proto, folder)


def _load(proto: onnx.ModelProto, folder: Path | None) -> OnnxModel:
    proto, types = without_maps(proto)
    # Two copies that share the memory of their tensors: one to write again node for node, and one to run.
    file, model = ir.from_proto(proto), ir.from_proto(proto)
    for each in (file, model):
        ir.passes.Sequential(common_passes.TopologicalSortPass())(each)  # a circle is a PassError
    _check_values(model)
    _record_origins(proto, file)
    check_calls(model)
    memory = LoadedTensors(model, folder)
    memory.adopt(file)
    memory.adopt(model)
    embedded, in_file = embedded_floats(model), embedded_floats(file)
    constants = {name for name, value in embedded.items() if value.producer() is not None}
    coefficients = name_coefficients(model)
    lift(model, embedded)
    select_features(model)
    outputs_before_maps(model.graph)
    ir.passes.Sequential(
        common_passes.InlinePass(lambda function: _is_of_opset(function, model)),
        common_passes.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common_passes.RemoveUnusedOpsetsPass(),
    )(model)
    graph = model.graph
    without_negative_sizes(model)
    weights = {name for name, value in graph.initializers.items() if value.dtype in WEIGHT_TYPES}
    norms = [node for node in graph.all_nodes() if node.op_type == "BatchNormalization"]
    statistics = {str(value.name) for node in norms for value in node.inputs[3:5] if value is not None} & weights
    # A Constant node may be the scale as well, which no update of the statistics may change.
    statistics -= {name for name in constants if any(i < 3 for _, i in graph.initializers[name].uses())}
    frozen: set[str] = set()
    if WEIGHTS in model.metadata_props:
        recorded = recorded_weights(model)
        frozen = weights.intersection(recorded["frozen"])
        weights = weights.intersection(recorded["trained"]) | frozen
        statistics -= weights
    else:
        weights = _guess_weights(model, weights - statistics, constants)
    # Up to IR version 3, initializers are inputs too.
    inputs = tuple(str(value.name) for value in graph.inputs if not value.is_initializer())
    if len({*inputs}) < len(inputs):
        raise ExportError(f"the ONNX model is damaged: two of its inputs {shown(inputs)} have the same name")
    with_value = [str(v.name) for v in graph.inputs if v.is_initializer() and proto.ir_version > _OF_INPUTS]
    names = [*(name for name in graph.initializers if name in weights)]
    names += [name for name in graph.initializers if name in statistics]
    tensors = {name: tensor_of(_const(graph.initializers[name])) for name in names}
    optional = [name for name in with_value if name not in names and is_argument(name)]
    lift(file, {name: value for name, value in in_file.items() if name in names})
    order = tuple(file.graph.initializers)
    file = _with_inputs(file, [*inputs, *optional], [name for name in names if name not in coefficients])
    for value in file.graph.outputs:
        if value.name in types:
            value.meta[TYPE] = types[value.name]
    return OnnxModel(
        fixed_sizes(_with_inputs(model, [*inputs, *optional], names)),
        inputs,
        tuple(optional),
        frozenset(with_value) - {*optional},
        {name: tensor for name, tensor in tensors.items() if name in weights},
        {name: tensor for name, tensor in tensors.items() if name in statistics},
        file,
        order,
        frozenset(frozen),
        {name: place for name, place in coefficients.items() if name in weights},
    )


def float_name(name: str) -> str:
    """Returns the name that a quantized weight had before a quantizer has renamed it."""
    return _QUANTIZED.sub("", name)


def _record_origins(proto: onnx.ModelProto, file: ir.Model) -> None:
    """Records at quantized weights which parameters they were; ONNX Runtime's quantizers leave that at the old name."""
    records = {
        info.name: entry.value
        for info in proto.graph.value_info
        for entry in info.metadata_props
        if entry.key == FOLDED_FROM
    }
    for name, value in file.graph.initializers.items():
        origin = float_name(name)
        if origin != name and origin in records:
            value.metadata_props.setdefault(FOLDED_FROM, records[origin])


def _check_values(model: ir.Model) -> None:
    """Checks that all values that nodes take and graphs return exist."""
    parts: list[ir.Graph | ir.Function] = [*model.graphs(), *model.functions.values()]
    parts += [graph for function in model.functions.values() for graph in function.subgraphs()]
    for value in (value for part in parts for owner in (*part, part) for value in _used(owner)):
        if value and not (value.producer() or value.is_graph_input() or value.is_initializer()):
            raise ExportError(
                f"the ONNX model is damaged: it uses {shown(value.name)}, which is neither an input, nor stored, nor "
                "computed"
            )


def _used(owner: ir.Node | ir.Graph | ir.Function) -> Sequence[ir.Value | None]:
    """Returns what a node takes, or a graph returns."""
    return owner.inputs if isinstance(owner, ir.Node) else owner.outputs


def is_argument(name: str) -> bool:
    """Returns whether a function of Python can have an argument of this name."""
    return name.isidentifier() and not keyword.iskeyword(name)


def _with_inputs(model: ir.Model, inputs: Collection[str], weights: Sequence[str]) -> ir.Model:
    """Turns weights from initializers into inputs, in place, after the model's own inputs."""
    graph = model.graph
    batch_inputs = [value for value in graph.inputs if value.name in inputs]
    weight_values = [graph.initializers.pop(name) for name in weights]
    for value in weight_values:
        value.const_value = None  # otherwise the graph would keep the weight's memory alive
    graph.inputs.clear()
    graph.inputs.extend([*batch_inputs, *weight_values])
    return model


def _read(source: onnx.ModelProto | str | os.PathLike[str] | bytes) -> tuple[onnx.ModelProto, Path | None]:
    """Returns a model, and the folder of its external data if it came from a file."""
    what, folder = "the model", None
    if isinstance(source, onnx.ModelProto):
        proto = source
    else:
        if not isinstance(source, bytes):
            check_file(source, "ONNX model")
            path = Path(source)
            what, folder, source = f"{str(path)!r}", path.absolute().parent, path.read_bytes()
        if source[4:8] == _ORT_FORMAT:
            raise ExportError(
                f"{what} is in ORT format (.ort), which is for inference and can't be differentiated: use the ONNX "
                "model that it was made from"
            )
        try:
            proto = onnx.ModelProto.FromString(source)
        except google.protobuf.message.DecodeError as error:
            raise ExportError(f"{what} is not an ONNX model: {error}") from error
    if not proto.graph.node or not proto.opset_import:
        raise ExportError(f"{what} is not an ONNX model: it has no nodes or no opset")
    if proto.graph.sparse_initializer:
        names = [initializer.values.name for initializer in proto.graph.sparse_initializer]
        raise ExportError(f"{what} has sparse initializers {names}, which are not supported: make them dense")
    with corruption_reported(what, ExportError):
        check_external_data(proto, folder, what)
    return proto, folder


def _is_of_opset(function: ir.Function, model: ir.Model) -> bool:
    """Returns whether a function imports the same opsets as the model, so that it can be inlined."""
    return all(
        model.opset_imports.get(domain, version) == version for domain, version in function.opset_imports.items()
    )


def _guess_weights(model: ir.Model, floats: set[str], constants: set[str]) -> set[str]:
    """Returns the initializers that are probably weights, for a file without this package's metadata.

    Args:
        model: The model.
        floats: Its floating-point initializers.
        constants: Those of them that stand in Constant nodes in the file.
    """
    weights, kept_constant = set(), []
    in_functions = constant_floats(node for function in model.functions.values() for node in function.all_nodes())
    # Functions were inlined after Constant nodes had become initializers.
    in_functions |= constant_floats(model.graph.all_nodes())
    kept_nodes = [str(value.name) for value in in_functions if _with_weights(value)]
    # If the exporter recorded the kind of some initializers, those without a kind are constants that it folded.
    has_kinds = any(_KIND in value.metadata_props for value in model.graph.initializers.values())
    for name in floats:
        value = model.graph.initializers[name]
        kind = value.metadata_props.get(_KIND)
        if kind is not None:
            if kind == "PARAMETER":
                weights.add(name)
            continue
        uses = value.uses()
        is_setting = uses and all(index in _SETTINGS.get(node.op_type, ()) for node, index in uses)
        if is_setting or value.shape is None or not len(value.shape):
            continue
        by_torch = model.producer_name == "pytorch"
        if name in constants:
            # The tracing exporter of torch.onnx writes Constant nodes for constants in the code, never for parameters.
            if _with_weights(value) and (has_kinds or not by_torch):
                weights.add(name)
            elif _const(value).size > 1 and (_with_weights(value) or not by_torch):
                kept_nodes.append(name)
            continue
        is_torch_constant = by_torch and (has_kinds or _TORCH_CONSTANT.fullmatch(name))
        if (is_torch_constant or name.startswith(_INLINED_CONSTANT)) and not _with_weights(value):
            kept_constant.append(name)
        else:
            weights.add(name)
    if kept_constant:
        _log.warning(
            "held constant, because exporters give such names to constants in the code: %s. If they are weights, "
            "rename them; or, if torch.onnx wrote the file, export the model with optimize=False",
            sorted(kept_constant),
        )
    if kept_nodes:
        _log.warning(
            "held constant, because they stand in Constant nodes, and no layer has them as operands, or a function or "
            "torch.onnx: %s. If they are weights, make them initializers: inline functions, and use "
            "onnx_ir.passes.common.LiftConstantsToInitializersPass",
            sorted(kept_nodes),
        )
    return weights


def _with_weights(value: ir.Value) -> bool:
    """Returns whether a constant belongs to a layer: torch.onnx folds transposed or joined weights into constants."""
    if any(node.op_type in _WITH_WEIGHTS and index > 0 for node, index in value.uses()):
        return True
    if any(
        node.op_type in _REARRANGING and index == 0 and _with_weights(node.outputs[0]) for node, index in value.uses()
    ):
        return True
    sums = [node for node, _ in value.uses() if node.op_type == "Add"]
    added = [other.producer() for node in sums for other in node.inputs if other is not None]
    is_bias = any(node is not None and node.op_type == "MatMul" for node in added)
    return is_bias and value.shape is not None and len(value.shape) == 1


def _const(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None
    return value.const_value
