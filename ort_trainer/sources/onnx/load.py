"""Reads an ONNX model of a forward pass, and takes its weights out."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google.protobuf.message
import numpy as np
import onnx
import onnx.inliner
import onnx.version_converter
import torch
from onnx import TensorProto, numpy_helper

from ...errors import ExportError
from ...graph.onnx_file import WEIGHTS

__all__ = ["OnnxModel", "load_onnx_model"]

_log = logging.getLogger(__name__)
# The lowest operator set that the rewrites know, and the highest that the gradient builder does.
_OPSETS = (18, 21)
_WEIGHT_TYPES = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
# torch.onnx writes constants of the code as initializers too, under names of this kind.
_WITH_WEIGHTS = {"MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN", "LayerNormalization"}
# Inputs that are settings rather than weights: thresholds, scales of images, weights of classes.
_SETTINGS = {
    "Clip": {1, 2},
    "DequantizeLinear": {1, 2},
    "Dropout": {1, 2},
    "NegativeLogLikelihoodLoss": {2},
    "OneHot": {1, 2},
    "Pad": {2},
    "Pow": {1},
    "QuantizeLinear": {1, 2},
    "Resize": {1, 2, 3},
    "RoiAlign": {1},
    "SoftmaxCrossEntropyLoss": {2},
    "Upsample": {1},
}
_TORCH_CONSTANT = re.compile(r"(val|scalar_tensor\w*|_to_copy|full\w*|ones\w*|zeros\w*|arange\w*)(_\d+)?")


@dataclass(frozen=True)
class OnnxModel:
    """A forward pass and its weights, apart.

    Attributes:
        proto: The model, whose weights are inputs of its graph, behind its own inputs.
        inputs: Names of its own inputs.
        parameters: Name -> value of every weight that can be trained.
        buffers: Name -> value of every running statistic of a batch norm.
        frozen: Parameters that the file itself says were not trained.
    """

    proto: onnx.ModelProto
    inputs: tuple[str, ...]
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    frozen: frozenset[str] = frozenset()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs."""
        return tuple(value.name for value in self.proto.graph.output)


def load_onnx_model(source: onnx.ModelProto | str | os.PathLike[str] | bytes) -> OnnxModel:
    """Returns the forward pass and the weights of an ONNX model.

    What is a weight: every floating-point initializer of at least one dimension, except settings (such as the scales of
    a Resize) and those that torch.onnx made of constants in the code; in a file of ``save_as_onnx``, exactly what was a
    parameter. Running statistics of batch norms are buffers.

    Args:
        source: A model, which is not changed; a path, also with external data; or a serialized model.

    Raises:
        FileNotFoundError: If the file, or one with its external data, does not exist.
        ExportError: If it is no ONNX model, or one that can't be read.
    """
    model, folder = _read(source)
    weights = {i.name for i in model.graph.initializer if i.data_type in _WEIGHT_TYPES}
    nodes = _inlined_nodes(model)
    statistics = {name for node in nodes if node.op_type == "BatchNormalization" for name in node.input[3:5]}
    statistics &= weights
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    frozen: set[str] = set()
    if WEIGHTS in metadata:
        try:
            known = json.loads(metadata[WEIGHTS])
            frozen = set(known["frozen"]) & weights
            weights = (set(known["trained"]) & weights) | frozen
        except (KeyError, TypeError, ValueError) as error:
            raise ExportError(f"the model's metadata {WEIGHTS!r} are damaged: {error!r}. Remove them") from error
        statistics -= weights
    else:
        weights = _guess_weights(model, nodes, weights - statistics)
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    kept = []
    for initializer in model.graph.initializer:
        name = initializer.name
        if name in weights or name in statistics:
            (parameters if name in weights else buffers)[name] = _tensor(initializer, folder)
        else:
            if initializer.data_location == TensorProto.EXTERNAL:
                initializer.CopyFrom(numpy_helper.from_array(_array(initializer, folder), name))
            kept.append(initializer)
    initializers = {initializer.name for initializer in model.graph.initializer}
    # Up to IR version 3, initializers were inputs too.
    inputs = [value for value in model.graph.input if value.name not in initializers]
    state = [
        onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(value.numpy().dtype), list(value.shape)
        )
        for name, value in (*parameters.items(), *buffers.items())
    ]
    del model.graph.input[:], model.graph.initializer[:]
    model.graph.input.extend([*inputs, *state])
    model.graph.initializer.extend(kept)
    model.ir_version = min(max(model.ir_version, 8), 10)
    return OnnxModel(
        _of_known_opset(onnx.inliner.inline_local_functions(model)),
        tuple(value.name for value in inputs),
        parameters,
        buffers,
        frozenset(frozen),
    )


def _read(source: onnx.ModelProto | str | os.PathLike[str] | bytes) -> tuple[onnx.ModelProto, str]:
    """Returns a model that may be changed, without external data, and the folder where that is."""
    if isinstance(source, onnx.ModelProto):
        model = onnx.ModelProto()
        model.CopyFrom(source)
        return _checked(model, "the model"), ""
    if isinstance(source, bytes):
        what, data, folder = "the model", source, ""
    else:
        path = Path(source)
        what, data, folder = f"{str(path)!r}", path.read_bytes(), str(path.parent)
    try:
        model = onnx.ModelProto.FromString(data)
    except google.protobuf.message.DecodeError as error:
        raise ExportError(f"{what} is no ONNX model: {error}") from error
    return _checked(model, what), folder


def _checked(model: onnx.ModelProto, what: str) -> onnx.ModelProto:
    if not model.graph.node or not model.opset_import:
        raise ExportError(f"{what} is no ONNX model: it has no nodes, or names no operator set")
    if model.graph.sparse_initializer:
        names = [initializer.values.name for initializer in model.graph.sparse_initializer]
        raise ExportError(f"{what} has sparse initializers, {names}: make them dense")
    return model


def _inlined_nodes(model: onnx.ModelProto) -> Sequence[onnx.NodeProto]:
    """Returns the nodes of a model with its functions taken apart; its weights, which may be large, stay out of it."""
    if not model.functions:
        return list(model.graph.node)
    bare = onnx.ModelProto(ir_version=model.ir_version)
    bare.opset_import.extend(model.opset_import)
    bare.functions.extend(model.functions)
    bare.graph.name = model.graph.name
    bare.graph.node.extend(model.graph.node)
    bare.graph.input.extend(model.graph.input)
    bare.graph.output.extend(model.graph.output)
    return list(onnx.inliner.inline_local_functions(bare).graph.node)


def _guess_weights(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], floats: set[str]) -> set[str]:
    """Returns the initializers that are weights, in a file that does not say."""
    named_as_constants = set()
    if model.producer_name == "pytorch":
        named_as_constants = {name for name in floats if _TORCH_CONSTANT.fullmatch(name)}
        ranks = {i.name: len(i.dims) for i in model.graph.initializer}
        # torch.onnx folds a transposed or joined weight into a constant: as an operand of these it is one.
        named_as_constants -= {name for node in nodes if node.op_type in _WITH_WEIGHTS for name in node.input}
        products = {node.output[0] for node in nodes if node.op_type == "MatMul"}
        sums = [node.input for node in nodes if node.op_type == "Add" and products.intersection(node.input)]
        named_as_constants -= {name for names in sums for name in names if ranks.get(name) == 1}
    numbers = {i.name for i in model.graph.initializer if not i.dims}
    inputs = [(node, position, name) for node in nodes for position, name in enumerate(node.input)]
    settings = {name for node, position, name in inputs if position in _SETTINGS.get(node.op_type, ())}
    settings -= {name for node, position, name in inputs if position not in _SETTINGS.get(node.op_type, ())}
    held = sorted(named_as_constants - numbers - settings)
    if held:
        _log.warning(
            "held constant, because torch.onnx names constants of the code so: %s. If they are weights, export the "
            "model with optimize=False",
            held,
        )
    return floats - numbers - settings - named_as_constants


def _array(initializer: TensorProto, folder: str) -> np.ndarray[Any, Any]:
    if initializer.data_location == TensorProto.EXTERNAL and not folder:
        raise ExportError(
            f"initializer {initializer.name!r} lies in an external file, but only the model itself was given: pass the "
            "path, or load the model with its external data"
        )
    try:
        return numpy_helper.to_array(initializer, folder)
    except Exception as error:
        raise ExportError(f"the external data of {initializer.name!r} can't be read: {error}") from error


def _tensor(initializer: TensorProto, folder: str) -> torch.Tensor:
    if initializer.data_type == TensorProto.BFLOAT16:
        raise ExportError(
            f"weight {initializer.name!r} is bfloat16: give the model fp32 weights, and choose the precision of "
            "training by the option mixed_precision"
        )
    return torch.from_numpy(_array(initializer, folder).copy())


def _of_known_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    (opset,) = [entry for entry in model.opset_import if entry.domain in ("", "ai.onnx")] or [None]
    if opset is None:
        raise ExportError("the model imports no standard ONNX operators")
    lowest, highest = _OPSETS
    if lowest <= opset.version <= highest:
        return model
    try:
        return onnx.version_converter.convert_version(model, min(max(opset.version, lowest), highest))
    except Exception as error:
        raise ExportError(
            f"the model uses operator set {opset.version}, training needs one from {lowest} to {highest}, and ONNX's "
            f"converter can't change it: {error}"
        ) from error
