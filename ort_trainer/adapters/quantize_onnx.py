"""Quantizes the linear layers of ONNX models."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from ..core.quantized import int4_blocks, int8_rows
from ..step.emitter import Emitter
from ..step.names import Names
from ..step.onnx_file import to_proto
from .linear_layers import LinearLayer, linear_layers, read_by_layers_alone
from .lora_nodes import has_adapter
from .onnx_models import add_initializer, editable, names_in, read_model

_MICROSOFT = "com.microsoft"


def in_onnx(
    source: onnx.ModelProto | str | os.PathLike[str],
    kind: str,
    block: int,
    kept_of: Callable[[Sequence[str]], Collection[str]],
) -> onnx.ModelProto | None:
    """Returns a quantized model; None if it has nothing to quantize.

    Args:
        source: The model, or its path.
        kind: ``int8`` or ``int4``.
        block: The number of weights that share a scale in 4 bits.
        kept_of: Returns which of some layers stay as they are.
    """
    loaded = read_model(source, "an ONNX model, its path, or a torch.nn.Module")
    if has_adapter(loaded.file):
        raise ValueError("the model has an adapter: quantize the base, and add the adapter to the result")
    model = editable(loaded)
    layers: dict[str, list[LinearLayer]] = {}
    for layer in linear_layers(model):
        layers.setdefault(layer.weight, []).append(layer)
    names = names_in(model)
    kept = kept_of([users[0].name for users in layers.values()])
    chosen = [
        weight
        for weight, users in layers.items()
        if users[0].name not in kept and _can_be_quantized(model.graph.initializers[weight], users)
    ]
    for weight in chosen:
        _round(model, layers[weight], kind, block, names)
    if not chosen:
        return None
    common_passes.RemoveUnusedNodesPass()(model)
    return to_proto(model)


def _can_be_quantized(stored: ir.Value, users: list[LinearLayer]) -> bool:
    """Returns whether linear layers alone read a weight, as it is or transposed."""
    plain = all(layer.node.attributes.get_float("alpha", 1.0) == 1.0 for layer in users)
    return stored.dtype == ir.DataType.FLOAT and plain and read_by_layers_alone(stored, users)


def _round(model: ir.Model, layers: list[LinearLayer], kind: str, block: int, names: Names) -> None:
    """Replaces a weight and the products with it."""
    first = layers[0]
    stored = model.graph.initializers[first.weight]
    assert stored.const_value is not None
    weight = stored.const_value.numpy() if first.is_transposed else stored.const_value.numpy().T
    numbers, scale = int8_rows(weight) if kind == "int8" else int4_blocks(weight, block)
    # A Transpose behind DequantizeLinear is one that ONNX Runtime moves, and fails to.
    numbers = numbers.T if kind == "int8" else numbers
    parts = [
        add_initializer(model, names.unique(f"{first.name}.weight.{part}"), tensor)
        for part, tensor in ((kind, numbers), ("scale", scale.reshape(-1)))
    ]
    for layer in layers:
        emit = Emitter(model.opset_imports, names, layer.name)
        x, old = layer.input, layer.node.outputs[0]
        bias = layer.node.inputs[2] if layer.node.op_type == "Gemm" and len(layer.node.inputs) > 2 else None
        if kind == "int8":
            product = emit("MatMul", x, emit("DequantizeLinear", *parts, axis=1))
        else:
            sizes = {"K": layer.in_features, "N": layer.out_features, "bits": 4, "block_size": block}
            model.opset_imports.setdefault(_MICROSOFT, 1)
            product = emit("MatMulNBits", x, *parts, domain=_MICROSOFT, **sizes)
        if bias is not None:
            beta = layer.node.attributes.get_float("beta", 1.0)
            scaled = bias if beta == 1 else emit("Mul", bias, emit.constant(beta, np.float32))
            product = emit("Add", product, scaled)
        product.type, product.shape = old.type, old.shape
        ir.convenience.replace_nodes_and_values(model.graph, layer.node, [layer.node], emit.nodes, [old], [product])
