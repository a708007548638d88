"""Low-rank adapters as nodes of an ONNX model: adds, finds and removes them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch

from ..core.errors import ExportError, shown
from ..core.unknown import nearest
from ..onnx.load import OnnxModel
from ..step.emitter import Emitter
from ..step.names import Names
from ..step.onnx_file import WEIGHTS, recorded_weights
from .linear_layers import LinearLayer, linear_layers
from .lora import LoRA
from .onnx_models import add_initializer, editable, names_in

_KEY = "ort_trainer.adapter"
# Products whose operands are integers, or that are one node with others.
_WITHOUT_LAYERS = {
    *("MatMulInteger", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QAttention"),
    *("Attention", "FusedMatMul", "FusedGemm", "GemmFastGelu"),
}
# Before, a Dropout has no input that says whether it trains.
_DROPOUT_OPSET = 12


@dataclass(frozen=True)
class Adapter:
    """What the metadata of an adapted model say.

    Attributes:
        lora: The settings.
        layers: The paths of the adapted layers.
        trained: The weights of the base that are trained as well.
    """

    lora: LoRA
    layers: tuple[str, ...]
    trained: tuple[str, ...]

    @property
    def factors(self) -> list[str]:
        """The names of A and B of each layer."""
        return [f"{layer}.lora_{part}.weight" for layer in self.layers for part in "AB"]

    @property
    def tensors(self) -> list[str]:
        """The names of all that is trained."""
        return [*self.factors, *self.trained]


def has_adapter(model: ir.Model) -> bool:
    """Returns whether :func:`add_lora` has added an adapter."""
    return _KEY in model.metadata_props


def adapter_of(model: ir.Model) -> Adapter:
    """Returns what an adapted model says of its adapter.

    Raises:
        ValueError: If it has none, or its metadata are damaged.
    """
    if not has_adapter(model):
        raise ValueError("the model has no adapter of ort_trainer.adapters: add one with add_adapter(model, LoRA(...))")
    try:
        entries = json.loads(model.metadata_props[_KEY])
        layers, trained = (tuple(dict.fromkeys(map(str.__str__, entries[key]))) for key in ("layers", "trained"))
        return Adapter(LoRA(**entries["lora"]), layers, trained)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"the metadata {_KEY!r} of the model are damaged ({shown(error)}): add the adapter to its base again, or "
            "load it with load_adapter"
        ) from error


def add_lora(
    loaded: OnnxModel, lora: LoRA, tensors: Mapping[str, torch.Tensor] | None = None, exactly: Sequence[str] = ()
) -> ir.Model:
    """Returns a model with an adapter, whose metadata say that only the adapter is trained.

    Args:
        loaded: The base; it is not changed.
        lora: The settings.
        tensors: The adapter's tensors by name. By default, new ones: A is drawn as the weight of a new
            ``torch.nn.Linear``, from torch's default generator, and B is zeros.
        exactly: The paths of the layers to adapt, instead of the settings' targets.

    Raises:
        ValueError: If the base has an adapter, or the settings do not fit it.
    """
    if has_adapter(loaded.file):
        raise ValueError("the model has an adapter already: make one model of both with merge_adapter(model) first")
    trained = [_known(name, loaded) for name in lora.also_train]
    stored = {name: _stored(tensors, name, loaded.parameters[name].shape) for name in trained if tensors is not None}
    model = editable(loaded, trained, stored)
    layers = linear_layers(model)
    chosen = dict.fromkeys(exactly or _chosen(lora, layers, model))
    adapted = [layer for layer in layers if layer.name in chosen]
    names = names_in(model)
    for name in chosen:
        of_name = [layer for layer in adapted if layer.name == name]
        _add(model, name, of_name, lora, tensors, names)
    adapter = Adapter(lora, tuple(chosen), tuple(trained))
    model.metadata_props[_KEY] = json.dumps(dataclasses.asdict(adapter))
    model.metadata_props[WEIGHTS] = json.dumps({**recorded_weights(model), "trained": adapter.tensors})
    return model


def _known(name: str, loaded: OnnxModel) -> str:
    """Returns the name of a weight that can be trained.

    Raises:
        ValueError: If there is no such weight, or it is quantized.
    """
    if name in loaded.parameters:
        return name
    if name in loaded.order:
        raise ValueError(
            f"also_train names {name!r}, which can't be trained: it holds integers, such as quantized weights, or a "
            "constant. Leave it out, and add an adapter to its layer"
        )
    near = nearest(name, loaded.parameters, 3)
    raise ValueError(f"also_train names {name!r}, but the model has no such weight: the nearest are {near}")


def _chosen(lora: LoRA, layers: Sequence[LinearLayer], model: ir.Model) -> list[str]:
    """Returns the paths of the layers that get an adapter."""
    counts = Counter(node.op_type for node in model.graph if node.op_type in _WITHOUT_LAYERS)
    nodes = ", ".join(f"{count} {op_type}" for op_type, count in counts.items())
    remark = nodes and (
        f"It has nodes that can't get an adapter, because they are quantized to integers or fused: {nodes}. Add the "
        "adapter before that is done, or quantize with ort_trainer.quantize, or in QDQ format. "
    )
    sizes = {layer.name: (layer.in_features, layer.out_features) for layer in layers}
    return lora.chosen(sizes, {layer.name: (str(layer.node.name), layer.weight) for layer in layers}, remark)


def _add(
    model: ir.Model,
    name: str,
    layers: Sequence[LinearLayer],
    lora: LoRA,
    tensors: Mapping[str, torch.Tensor] | None,
    names: Names,
) -> None:
    """Adds the nodes of one adapter to the layers that share a weight."""
    first = layers[0]
    shapes = {"A": (lora.rank, first.in_features), "B": (first.out_features, lora.rank)}
    values: dict[str, ir.Value] = {}
    for part, shape in shapes.items():
        full = names.unique(f"{name}.lora_{part}.weight")
        if full != f"{name}.lora_{part}.weight":
            raise ValueError(f"the model already has a tensor {name}.lora_{part}.weight: rename it")
        tensor = initial_factor(part, shape) if tensors is None else _stored(tensors, full, shape)
        values[part] = add_initializer(model, full, tensor.to(ir.tensor_adapters.to_torch_dtype(first.dtype)))
    for layer in layers:
        emit = Emitter(model.opset_imports, names, f"{name}.lora")
        x = layer.input
        if lora.dropout:
            opset = model.opset_imports.get("", 0)
            if opset < _DROPOUT_OPSET:
                raise ExportError(
                    f"dropout needs ONNX's opset {_DROPOUT_OPSET} or newer, but the model imports {opset}: convert it "
                    "with onnx.version_converter, or use LoRA(dropout=0)"
                )
            x = emit("Dropout", x, emit.constant(lora.dropout, np.float32), emit.constant(True, np.bool_))
        for value in values.values():
            x = emit("MatMul", x, emit("Transpose", value, perm=[1, 0]))
        scale = emit.constant(lora.scale, layer.dtype.numpy())
        product = emit("Mul", x, scale)
        old = layer.output
        total = emit("Add", old, product)
        total.type, total.shape = old.type, old.shape
        old_name, old.name = old.name, names.unique(f"{name}.base")
        node = old.producer()
        assert node is not None
        users = [use for use in old.uses() if use.node is not total.producer()]
        for user, place in users:
            user.replace_input_with(place, total)
        for place, output in enumerate(model.graph.outputs):
            if output is old:
                model.graph.outputs[place] = total
        total.name = old_name
        model.graph.insert_after(node, emit.nodes)


def _stored(tensors: Mapping[str, torch.Tensor], name: str, shape: Sequence[int]) -> torch.Tensor:
    """Returns a tensor of a stored adapter.

    Raises:
        ValueError: If it is missing, or has another shape than the base needs.
    """
    if name not in tensors:
        raise ValueError(f"the adapter lacks the tensor {name!r}: its files are not complete")
    if tensors[name].shape != tuple(shape):
        raise ValueError(
            f"the adapter is of another base: {name!r} has the shape {list(tensors[name].shape)}, but the model needs "
            f"{list(shape)}"
        )
    return tensors[name]


def initial_factor(part: str, shape: Sequence[int]) -> torch.Tensor:
    """Returns the first A or B, as peft draws them."""
    if part == "B":
        return torch.zeros(shape)
    tensor = torch.empty(shape)
    torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5))
    return tensor


@dataclass(frozen=True)
class Product:
    """The nodes of an adapter at one layer.

    Attributes:
        layer: The path of the layer.
        a, b: A and B.
        scaled: The node that multiplies the product by the scale.
        total: The node that adds it to the layer's output.
    """

    layer: str
    a: ir.Value
    b: ir.Value
    scaled: ir.Node
    total: ir.Node


def products(model: ir.Model, adapter: Adapter) -> Iterator[Product]:
    """Yields the nodes of an adapter, which :func:`add_lora` has added.

    Raises:
        ValueError: If another program has changed them.
    """
    for layer in adapter.layers:
        a, b = (model.graph.initializers.get(f"{layer}.lora_{part}.weight") for part in "AB")
        if a is None or b is None:
            raise ValueError(f"the model's metadata name an adapter of {layer!r}, but its tensors are missing")
        for turned in dict.fromkeys(node for node, _ in b.uses()):
            for product in dict.fromkeys(node for node, _ in turned.outputs[0].uses()):
                nodes = [product]
                for op_type in ("Mul", "Add"):
                    users = [node for node, _ in nodes[-1].outputs[0].uses()]
                    if [node.op_type for node in users] != [op_type] or None in users[0].inputs:
                        raise ValueError(f"the nodes of the adapter of {layer!r} were changed by another program")
                    nodes += users
                yield Product(layer, a, b, nodes[1], nodes[2])


def adapted_layers(model: ir.Model, adapter: Adapter, found: Iterable[Product]) -> dict[str, list[LinearLayer]]:
    """Returns the layers that products were added to: path of the adapter -> the layers that share it.

    Raises:
        ValueError: If another program has changed them.
    """
    of_output: dict[ir.Value | None, LinearLayer] = {
        layer.output: layer for layer in linear_layers(model, without=adapter.factors)
    }
    layers: dict[str, list[LinearLayer]] = {}
    for product in found:
        base = product.total.inputs[0]
        if base not in of_output:
            raise ValueError(f"the layer {product.layer!r} beside an adapter was changed by another program")
        layers.setdefault(product.layer, []).append(of_output[base])
    return layers


def without_products(model: ir.Model, found: Sequence[Product]) -> None:
    """Removes the nodes and tensors of an adapter, in place."""
    for product in found:
        base, total = product.total.inputs[0], product.total.outputs[0]
        assert base is not None
        name = total.name
        ir.convenience.replace_all_uses_with(total, base, replace_graph_outputs=True)
        total.name, base.name = base.name, name
    common_passes.RemoveUnusedNodesPass()(model)
    model.metadata_props.pop(_KEY, None)
