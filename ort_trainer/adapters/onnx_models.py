"""ONNX models that get other nodes and weights: how they are read, and how a weight is added."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch

from ..core.errors import was_given
from ..onnx.load import OnnxModel, load_onnx_model
from ..onnx.write import with_weights
from ..step.names import Names
from ..step.onnx_file import corruption_reported


def read_model(model: onnx.ModelProto | str | os.PathLike[str], kinds: str = "an ONNX model or its path") -> OnnxModel:
    """Returns an ONNX model that the user has given, or the path of one.

    Args:
        model: What was given.
        kinds: What may be given, for the error.

    Raises:
        TypeError: If it is neither.
        ExportError: If it can't be read.
    """
    if not isinstance(model, (onnx.ModelProto, str, os.PathLike)):
        raise TypeError(f"model must be {kinds}, but {was_given(model)}")
    return load_onnx_model(model)


@corruption_reported("the model")
def editable(
    loaded: OnnxModel,
    trained: Sequence[str] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    outputs: Sequence[str] | None = None,
) -> ir.Model:
    """Returns a copy of a model, without functions.

    Args:
        loaded: The model.
        trained: Names of the weights that are trained; by default, all that are not frozen.
        tensors: Other values of some weights.
        outputs: Outputs of a model in inference form; None for the whole model.
    """
    if trained is None:
        trained = [name for name in loaded.parameters if name not in loaded.frozen]
    model = with_weights(loaded, {**loaded.parameters, **loaded.buffers, **(tensors or {})}, trained, outputs)
    if len(model.functions):
        common_passes.InlinePass()(model)
    return model


def names_in(model: ir.Model) -> Names:
    """Returns the names of a model's values and nodes, to find others."""
    return Names([*ir.convenience.create_value_mapping(model.graph), *(str(n.name) for n in model.graph.all_nodes())])


def add_initializer(model: ir.Model, name: str, tensor: torch.Tensor | np.ndarray[Any, Any]) -> ir.Value:
    """Adds a weight to a model, and returns its value."""
    constant: ir.TensorProtocol
    if isinstance(tensor, torch.Tensor):
        constant = ir.tensor_adapters.TorchTensor(tensor.contiguous(), name=name)
    else:
        constant = ir.tensor(np.ascontiguousarray(tensor), name=name)
    shape = ir.Shape([int(size) for size in tensor.shape])
    value = ir.Value(name=name, type=ir.TensorType(constant.dtype), shape=shape, const_value=constant)
    model.graph.register_initializer(value)
    return value
