"""Reads onnxblocks, onnxruntime-training's or ours: a loss becomes part of the ONNX model, an optimizer a config."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from ..core.errors import shown
from ..onnx.shapes import known_shapes
from ..optim import AdamConfig, OptimizerConfig, SGDConfig

_PACKAGE = ".onnxblock"


def is_block(value: Any) -> bool:
    """Returns whether a value is an onnxblock."""
    return any(_PACKAGE in kind.__module__ for kind in type(value).__mro__)


def _package(block: Any) -> Any:
    """Returns the onnxblock package of a block. Its global state holds the model to which the block adds nodes."""
    module = next(kind.__module__ for kind in type(block).__mro__ if _PACKAGE in kind.__module__)
    return importlib.import_module(module.partition(_PACKAGE)[0] + _PACKAGE)


def with_loss(
    model: onnx.ModelProto | str | os.PathLike[str], block: Any, inputs: Sequence[str] | None
) -> onnx.ModelProto:
    """Returns a model whose only output is the loss that a block computes.

    Args:
        model: The model, which is not changed.
        block: The block.
        inputs: Names of the values that the block takes; None for all outputs of the model.

    Raises:
        ValueError: If the block returns anything but the name of a value.
    """
    proto = onnx.load(Path(model)) if isinstance(model, (str, os.PathLike)) else model
    sized = ir.from_proto(proto)
    shapes = known_shapes(sized)
    # Blocks copy the shapes of outputs for their labels, whose sizes must have the names that the inputs use.
    for value in sized.graph.outputs:
        value.shape = None if shapes[str(value.name)] is None else ir.Shape(shapes[str(value.name)] or ())
    with _package(block).base(ir.to_proto(sized)) as handle:
        loss = block(*(inputs or [value.name for value in proto.graph.output]))
        built: onnx.ModelProto = handle.model
    if not isinstance(loss, str):
        raise ValueError(
            f"a block for the loss must return the name of one value, but {type(block).__name__} returned {shown(loss)}"
        )
    _fix_constants(built, {entry.name for entry in proto.graph.initializer})
    del built.graph.output[:]
    built.graph.output.append(onnx.helper.make_tensor_value_info(loss, onnx.TensorProto.FLOAT, []))
    return built


def _fix_constants(model: onnx.ModelProto, original_names: Collection[str]) -> None:
    """Turns initializers that onnxruntime-training's blocks have added into constants, so that they are not trained.

    The weights of a block's linear layers stay initializers: they are meant to be trained.
    """
    added = [
        entry for entry in model.graph.initializer if entry.name not in original_names and "linear" not in entry.name
    ]
    for entry in added:
        node = onnx.helper.make_node("Constant", [], [entry.name], f"{entry.name}_node", value=entry)
        model.graph.node.insert(0, node)
        model.graph.initializer.remove(entry)


def optimizer_config(block: Any) -> tuple[OptimizerConfig, float | None]:
    """Returns the config of a block that updates weights, and the limit of the gradient norm, or None.

    Raises:
        ValueError: If it has operators other than AdamW or SGD, and clipping by the norm.
    """
    with _package(block).empty_base() as handle:
        # The block takes two lists: trained and frozen parameters. One trained parameter is enough to read its nodes.
        block(([onnx.helper.make_tensor("weight", onnx.TensorProto.FLOAT, [1], [0.0])], []))
    nodes = {node.op_type: node for node in handle.model.graph.node}
    settings = {
        name: {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
        for name, node in nodes.items()
    }
    limit = settings.pop("InplaceClipGradNorm", {}).get("max_norm")
    if list(settings) == ["SGDOptimizerV2"]:
        return SGDConfig(lr=1e-3), limit
    if list(settings) != ["AdamWOptimizer"]:
        raise ValueError(
            f"the block {type(block).__name__} has the operators {list(nodes)}, but an optimizer must be AdamW or SGD, "
            "with or without ClipGradNorm: give a config of ort_trainer.optim"
        )
    attributes = settings["AdamWOptimizer"]
    config = AdamConfig(
        lr=1e-3,
        alpha=attributes["alpha"],
        beta=attributes["beta"],
        epsilon=attributes["epsilon"],
        lambda_coef=attributes["weight_decay"],
        do_bias_correction=bool(attributes["correct_bias"]),
        weight_decay_mode=AdamConfig.DecayMode(attributes["adam_mode"]),
        max_norm_clip=math.inf,
    )
    return config, limit
