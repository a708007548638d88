"""Finds the linear layers of an ONNX model, and the paths that they had in the code."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..core.sealed import digest
from ..onnx.load import FOLDED_FROM, float_name
from ..step.names import Names
from ..step.onnx_file import corruption_reported

_STANDARD = ("", "ai.onnx")
# The key where torch.onnx (dynamo=True) records the paths of the modules around a node, outermost first.
_SCOPES = "pkg.torch.onnx.name_scopes"
# A str in the Python lists that exporters record.
_STRING = re.compile(r"'([^'\\]*)'|\"([^\"\\]*)\"")
# Nodes that lead from a stored weight to the matrix of a product.
_OF_WEIGHTS = ("Transpose", "Cast", "Identity", "QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer, ``y = x W + b``.

    Attributes:
        name: Its path, such as ``encoder.layer.0.attention.self.query``.
        weight: The name of the initializer that stores W.
        node: The node of the product.
        output: Its output; the sum, if a bias is added to the product.
        in_features: The size of the last dimension of x.
        out_features: The size of the last dimension of y.
        dtype: The type of x.
        scales: The scales and zero points by which W is quantized.
        is_quantized: Whether the initializer stores integers, or is rounded to integers.
        is_transposed: Whether it has the shape (out, in).
    """

    name: str
    weight: str
    node: ir.Node
    output: ir.Value
    in_features: int
    out_features: int
    dtype: ir.DataType
    scales: tuple[ir.Value, ...]
    is_quantized: bool
    is_transposed: bool

    def fingerprint(self, graph: ir.Graph) -> str:
        """Returns a digest of W, which is the same whether the initializer stores it transposed or not."""
        stored, *scales = (value.const_value for value in (graph.initializers[self.weight], *self.scales))
        assert stored is not None
        weight = stored.numpy() if self.is_transposed else stored.numpy().T
        arrays = [weight, *(scale.numpy().reshape(-1) for scale in scales if scale is not None)]
        return digest(
            ("", (array.dtype.name, array.shape, np.frombuffer(array.tobytes(), np.uint8))) for array in arrays
        )

    @property
    def input(self) -> ir.Value:
        """x."""
        value = self.node.inputs[0]
        assert value is not None
        return value


@corruption_reported("the model")
def linear_layers(model: ir.Model, without: Collection[str] = ()) -> list[LinearLayer]:
    """Returns the linear layers of a model's graph, in order; layers that share a weight have the same name.

    Args:
        model: The model.
        without: Weights whose products are no layers.
    """
    layers: list[LinearLayer] = []
    names: dict[str, str] = {}
    unused = Names(())
    for node in model.graph:
        stored = _stored(node, model.graph)
        if stored is None or stored[0].name in without:
            continue
        initializer, is_transposed, dtype, sizes, scales = stored
        weight = str(initializer.name)
        added = _added_bias(node.outputs[0])
        if weight not in names:
            bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else added and added[1]
            # torch.onnx merges equal initializers, so a bias of several nodes may have another layer's name.
            bias_name = str(bias.name) if bias is not None and len(bias.uses()) == 1 else ""
            names[weight] = unused.unique(_path(node, initializer, bias_name))
        layers.append(
            LinearLayer(
                names[weight],
                weight,
                node,
                node.outputs[0] if added is None else added[0],
                *sizes,
                dtype,
                scales,
                bool(scales) or not _is_float(initializer),
                is_transposed,
            )
        )
    return layers


def _stored(
    node: ir.Node, graph: ir.Graph
) -> tuple[ir.Value, bool, ir.DataType, tuple[int, int], tuple[ir.Value, ...]] | None:
    """Returns the stored weight of a product, whether it is transposed, the type of x, the sizes (in, out), and scales.

    None if the node is no product with a weight of two dimensions.
    """
    if node.op_type == "MatMulNBits" and node.domain == "com.microsoft":
        packed, scales = node.inputs[1], node.inputs[2]
        if packed is None or scales is None or packed.const_value is None or scales.const_value is None:
            return None
        sizes = node.attributes.get_int("K", 0), node.attributes.get_int("N", 0)
        return packed, True, scales.const_value.dtype, sizes, _present(node.inputs[2:])
    if node.domain not in _STANDARD or node.op_type not in ("MatMul", "Gemm"):
        return None
    if node.attributes.get_int("transA", 0) or node.inputs[0] is None or node.inputs[0].is_initializer():
        return None
    is_transposed = bool(node.attributes.get_int("transB", 0))
    value, dtype = node.inputs[1], None
    of_scales: tuple[ir.Value, ...] = ()
    while value is not None and value.const_value is None:
        maker = value.producer()
        if maker is None or maker.op_type not in _OF_WEIGHTS or maker.domain not in _STANDARD:
            return None
        if maker.op_type == "Transpose":
            if list(maker.attributes.get_ints("perm", [1, 0])) != [1, 0]:
                return None
            is_transposed = not is_transposed
        if dtype is None:
            dtype = _type_of_result(maker)
        of_scales += _present(maker.inputs[1:])
        value = maker.inputs[0]
    if value is None or value.const_value is None or value.name not in graph.initializers:
        return None
    shape = value.const_value.shape.numpy()
    if len(shape) != 2:
        return None
    sizes = (shape[1], shape[0]) if is_transposed else (shape[0], shape[1])
    return value, is_transposed, dtype or value.const_value.dtype, sizes, of_scales


def _present(values: Sequence[ir.Value | None]) -> tuple[ir.Value, ...]:
    return tuple(value for value in values if value is not None)


def _type_of_result(node: ir.Node) -> ir.DataType | None:
    """Returns the type of a float that a Cast or DequantizeLinear makes; None for nodes that keep the type."""
    if node.op_type == "Cast":
        return ir.DataType(node.attributes.get_int("to", 0))
    if node.op_type == "DequantizeLinear":
        wanted = node.attributes.get_int("output_dtype", 0)
        scale = node.inputs[1]
        return ir.DataType(wanted) if wanted else None if scale is None else scale.dtype
    return None


def _added_bias(product: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Returns the sum and the bias, if all that a product is used for is to add an initializer of one dimension."""
    if product.is_graph_output() or len(product.uses()) != 1:
        return None
    ((node, place),) = product.uses()
    if node.op_type != "Add" or node.domain not in _STANDARD:
        return None
    bias = node.inputs[1 - place]
    is_bias = bias is not None and bias.const_value is not None and len(bias.const_value.shape) == 1
    return (node.outputs[0], bias) if is_bias and bias is not None else None


def _path(node: ir.Node, weight: ir.Value, bias: str) -> str:
    """Returns the path of a layer: from its weights' names, from where exporters record it, or from the node's name."""
    name = float_name(str(weight.name))
    path = _without_last(name)
    if path:
        return path
    # The last scope is the node itself.
    paths = [scope for scope in _strings(node.metadata_props.get(_SCOPES, ""))[:-1] if scope]
    if paths:
        return paths[-1]
    recorded = _strings(weight.metadata_props.get(FOLDED_FROM, ""))
    path = _without_last(recorded[0] if len(recorded) == 1 else "") or _without_last(float_name(bias))
    if path:
        return path
    folders = str(node.name or "").strip("/").split("/")
    return ".".join(folders[:-1]) if len(folders) > 1 else name


def _strings(text: str) -> list[str]:
    """Returns the strings in the representation of a list."""
    return ["".join(quoted) for quoted in _STRING.findall(text)]


def _without_last(name: str) -> str:
    """Returns the path of the layer whose weight or bias has a name; empty if the name does not say it."""
    path, _, last = name.rpartition(".")
    return path if last in ("weight", "kernel", "bias") else ""


def read_by_layers_alone(stored: ir.Value, layers: Sequence[LinearLayer]) -> bool:
    """Returns whether nothing but some layers reads a weight, as it is or transposed."""
    readers = {node for node, _ in stored.uses()}
    readers |= {node for made in readers if made.op_type == "Transpose" for node, _ in made.outputs[0].uses()}
    others = {node for node in readers - {layer.node for layer in layers} if node.op_type != "Transpose"}
    turned = [made.outputs[0] for made in readers if made.op_type == "Transpose"]
    return not others and not any(value.is_graph_output() for value in (stored, *turned))


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()
