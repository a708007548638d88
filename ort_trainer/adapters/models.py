"""``add_adapter`` and ``merge_adapter``: models with an adapter, and models that have taken it in."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, overload

import onnx
import onnx_ir as ir
import torch
from torch import nn

from ..core.errors import shown
from ..onnx.source import OnnxSource
from ..step.onnx_file import to_proto
from ..train.onnx_files import current_model
from ..trainer import ORTTrainer
from .linear_layers import read_by_layers_alone
from .lora import LoRA
from .lora_nodes import adapted_layers, adapter_of, add_lora, products, without_products
from .onnx_models import add_initializer, editable, names_in, read_model

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

Source = ORTTrainer | onnx.ModelProto | str | os.PathLike[str]
"""A trainer, an ONNX model or the path of one."""
_KINDS = "a trainer, an ONNX model or its path"


@overload
def add_adapter(model: onnx.ModelProto | str | os.PathLike[str], config: LoRA) -> onnx.ModelProto: ...
@overload
def add_adapter(model: nn.Module, config: LoRA | PeftConfig) -> PeftModel: ...
def add_adapter(model: Any, config: Any) -> Any:
    """Returns a model with an adapter, of which a trainer trains the adapter alone.

    An ONNX model gets new nodes beside its linear layers (MatMul, Gemm and MatMulNBits with a weight, which may be
    quantized), and new initializers ``<layer>.lora_A.weight`` of shape (rank, in) and ``<layer>.lora_B.weight`` of
    shape (out, rank). Layers that share a weight share the adapter. Functions are inlined.

    A PyTorch model becomes a ``peft.PeftModel``, in place, as by ``peft.get_peft_model``.

    Args:
        model: An ONNX model, which is not changed, the path of one, or a PyTorch model.
        config: A :class:`LoRA`; for a PyTorch model, also any config object of peft.

    Returns:
        The model, for :class:`~ort_trainer.ORTTrainer`.

    Raises:
        ValueError: If the targets match no layer, the rank is beyond the size of a layer, or the model has an adapter.
        ExportError: If the ONNX model can't be read.
        ModuleNotFoundError: If a PyTorch model is given and peft is not installed.
        TypeError: If an argument has the wrong type.
    """
    if isinstance(model, nn.Module):
        return _with_peft(model, config)
    loaded = read_model(model, "an ONNX model, its path, or a torch.nn.Module")
    if not isinstance(config, LoRA):
        raise TypeError(f"an ONNX model takes a LoRA(...), but {shown(config)} was given")
    return to_proto(add_lora(loaded, config))


def _with_peft(model: nn.Module, config: LoRA | PeftConfig) -> PeftModel:
    """Returns a PyTorch model with an adapter of peft."""
    try:
        import peft
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "adapters of PyTorch models are those of peft, which is not installed: pip install peft"
        ) from None
    if isinstance(model, peft.PeftModel):
        raise ValueError("the model has an adapter already: use its own add_adapter(name, config) for another one")
    if isinstance(config, LoRA):
        parameters = dict(model.named_parameters())
        unknown = [name for name in config.also_train if name not in parameters]
        if unknown:
            raise ValueError(f"also_train names {unknown}, but the model has no such parameters")
        whole = {name.rpartition(".")[0] for name in config.also_train}
        partly = [name for name in parameters if name.rpartition(".")[0] in whole and name not in config.also_train]
        if partly or "" in whole:
            raise ValueError(f"peft trains whole modules beside an adapter: also_train must name {partly} as well")
        sizes = {
            name: (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else tuple(layer.weight.shape)  # type: ignore[union-attr,arg-type]
            for name, layer in model.named_modules()
            if _is_linear(layer) and name not in whole
        }
        chosen = config.chosen(sizes)
        config = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]
            lora_dropout=config.dropout,
            target_modules="|".join(map(re.escape, chosen)),  # exactly these: names would match ends of paths, too
            modules_to_save=sorted(whole) or None,
        )
    return peft.get_peft_model(model, config)


def _is_linear(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer, or one of transformers' with a transposed weight."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def inference_model(source: Source) -> ir.Model:
    """Returns the model of a trainer with its current weights, or of a file, in inference form and without the loss."""
    if isinstance(source, ORTTrainer):
        return current_model(source.loop, source.model_desc.inference_names(), for_inference=True)
    loaded = read_model(source, _KINDS)
    return editable(loaded, outputs=loaded.outputs)


def stored_model(source: Source) -> ir.Model:
    """Returns the ONNX model that a trainer was given, with its current weights, or a file; nodes keep their modes.

    Raises:
        ValueError: If the trainer's model is of PyTorch.
    """
    if not isinstance(source, ORTTrainer):
        return editable(read_model(source, _KINDS))
    if not isinstance(source.loop.source, OnnxSource):
        raise ValueError("the trainer's model is of PyTorch: save its adapter with its own save_pretrained(folder)")
    return current_model(source.loop, ())


def merge_adapter(source: Source) -> onnx.ModelProto:
    """Returns an ONNX model that has taken its adapter in: each W becomes ``W + alpha / rank * (B A)^T``.

    It has the base's nodes in inference form, and runs as fast as the base. A peft model in PyTorch has
    ``merge_and_unload`` for this.

    Args:
        source: A trainer of a model from :func:`add_adapter`, or a file that it has saved.

    Raises:
        ValueError: If the model has no adapter, or an adapted weight is quantized: the sum would have to be rounded.
    """
    model = inference_model(source)
    adapter = adapter_of(model)
    found = list(products(model, adapter))
    names = names_in(model)
    layers = adapted_layers(model, adapter, found)
    for product in {product.layer: product for product in found}.values():
        of_name = layers.get(product.layer, [])
        if not of_name:
            raise ValueError(f"the model's metadata name an adapter of {product.layer!r}, but it has no such layer")
        layer = of_name[0]
        factors = {each.node.attributes.get_float("alpha", 1.0) for each in of_name}
        if len(factors) > 1 or 0 in factors:
            raise ValueError(f"the Gemm of {layer.name!r} has an alpha that merging can't undo: use export_adapter")
        if layer.is_quantized:
            raise ValueError(
                f"the weight of {layer.name!r} is quantized, and can't take the adapter in without another rounding: "
                "use export_adapter, and keep base and adapter apart"
            )
        stored = model.graph.initializers[layer.weight]
        assert stored.const_value is not None and product.a.const_value is not None
        assert product.b.const_value is not None
        a, b = (_float32(value.const_value) for value in (product.a, product.b))
        change = adapter.lora.scale / factors.pop() * (b @ a)
        weight = _float32(stored.const_value) + (change if layer.is_transposed else change.T)
        dtype = ir.tensor_adapters.to_torch_dtype(stored.const_value.dtype)
        if read_by_layers_alone(stored, of_name):
            stored.const_value = ir.tensor_adapters.TorchTensor(weight.to(dtype).contiguous(), name=layer.weight)
            continue
        for each in of_name:  # others, such as an embedding, keep the weight
            wants_transposed = bool(each.node.attributes.get_int("transB", 0))
            turned = weight if each.is_transposed == wants_transposed else weight.T
            name = names.unique(f"{layer.name}.merged.weight")
            each.node.replace_input_with(1, add_initializer(model, name, turned.to(dtype)))
    without_products(model, found)
    return to_proto(model)


def _float32(tensor: Any) -> torch.Tensor:
    return torch.from_numpy(tensor.numpy().astype("float32"))
