"""``export_adapter``: an adapter for ONNX Runtime's ``LoraAdapter``, and a base that takes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from ..core.atomic import atomic_path, check_target, real_path
from ..step.onnx_file import recorded_weights, save_model
from .lora_nodes import adapter_of, has_adapter, products
from .models import Source, inference_model

if TYPE_CHECKING:
    import flatbuffers

Array = np.ndarray[Any, Any]
_FORMAT_VERSION = 1
_ALIGNMENT = 8
# The names of the dimension in the base that is an adapter's rank.
_RANK = "rank"


def export_adapter(
    source: Source,
    path: str | os.PathLike[str],
    base: str | os.PathLike[str] | None = None,
) -> None:
    """Writes what was trained as a file for ``onnxruntime.LoraAdapter``, and if asked the model without it.

    The base computes what it did before training if no adapter is active, and what the trained model computes with the
    adapter, or any other for the same layers (of the same rank, if peft has made the model)::

        session = onnxruntime.InferenceSession("base.onnx")
        adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
        adapter.Load("style.onnx_adapter")
        options.add_active_adapter(adapter)
        session.run(None, inputs, options)

    This needs onnxruntime 1.20 or newer. The adapter's tensors are optional inputs of the base. Weights of the base
    that were trained as well (``also_train``, or peft's ``modules_to_save``) are such inputs, too, but their values
    without an adapter are the trained ones, as the others are not kept.

    Args:
        source: A trainer of a model with an adapter, or an ONNX model that ``save_as_onnx`` has written; also of a
            PyTorch model with an adapter of peft: everything that was trained is the adapter.
        path: The adapter's file; an existing one is replaced.
        base: The base's file; None to write none. Adapters of one base need only one.

    Raises:
        ValueError: If nothing was trained, or everything.
        FileNotFoundError: If a folder does not exist.
    """
    targets = [Path(target) for target in (path, base) if target is not None]
    if len({real_path(target) for target in targets}) < len(targets):
        raise ValueError(f"the adapter and the base would both be written to {str(path)!r}: give two paths")
    for target in targets:
        check_target(target)
    model = inference_model(source)
    recorded = recorded_weights(model)
    names = [name for name in recorded["trained"] if name in model.graph.initializers]
    has_base = has_adapter(model) or any(name in model.graph.initializers for name in recorded["frozen"])
    if not names or not has_base:
        raise ValueError(
            f"the model has {len(names)} trained weights, and "
            f"{'all are' if names else 'none is'} an adapter's: add an adapter with add_adapter, and train that alone"
        )
    values = [model.graph.initializers[name] for name in names]
    tensors = {str(value.name): _array(value) for value in values}
    any_rank = has_adapter(model)
    if any_rank:
        adapter = adapter_of(model)
        for product in [*products(model, adapter)]:
            tensors[str(product.b.name)] = _array(product.b) * np.asarray(adapter.lora.scale, _array(product.b).dtype)
            # The scale is part of B now, so adapters of every scale fit the base.
            unscaled, scale = product.scaled.inputs
            assert unscaled is not None and scale is not None
            ir.convenience.replace_all_uses_with(product.scaled.outputs[0], unscaled)
            model.graph.remove(product.scaled, safe=True)
            constant = scale.producer()
            if constant is not None and not scale.uses():
                model.graph.remove(constant, safe=True)
    data = _flatbuffer(tensors)
    if base is not None:
        save_model(_with_optional_inputs(model, values, any_rank), Path(base))
    with atomic_path(Path(path)) as temporary:
        temporary.write_bytes(data)


def _array(value: ir.Value) -> Array:
    assert value.const_value is not None
    return value.const_value.numpy()


def _with_optional_inputs(model: ir.Model, values: list[ir.Value], any_rank: bool) -> ir.Model:
    """Makes initializers optional inputs, in place. Low-rank factors become zeros, of the rank 1 if it is open.

    A rank of 0 would do, but not every engine fills a product over no elements with zeros: ONNX Runtime 1.19 leaves
    what lay in memory.
    """
    for value in values:
        part = next((part for part in ("lora_A", "lora_B") if part in str(value.name).split(".")), None)
        if part is not None:
            array = _array(value)
            rank_axis = 0 if part == "lora_A" else 1
            shape = list(array.shape)
            value.shape = ir.Shape([_RANK if any_rank and axis == rank_axis else n for axis, n in enumerate(shape)])
            if any_rank:
                shape[rank_axis] = 1
            value.const_value = ir.tensor(np.zeros(shape, array.dtype), name=value.name)
        model.graph.inputs.append(value)
    # If the rank is open, inferred sizes may be wrong.
    for node in model.graph.all_nodes():
        for output in node.outputs:
            if any_rank and not output.is_graph_output():
                output.shape = None
    model.metadata_props.clear()
    return model


def _flatbuffer(tensors: Mapping[str, Array]) -> bytes:
    """Returns tensors in ONNX Runtime's format for adapters, a flatbuffer (``adapter_schema.fbs`` of ONNX Runtime)::

        table Parameter { name: string; dims: [int64]; data_type: int32; raw_data: [uint8] (force_align: 8); }
        table Adapter { format_version: int; adapter_version: int; model_version: int; parameters: [Parameter]; }

    Types have the numbers of ONNX.
    """
    import flatbuffers

    builder = flatbuffers.Builder(sum(array.nbytes for array in tensors.values()) + 1024)
    parameters = []
    for name, array in tensors.items():
        text = builder.CreateString(name)
        data = _aligned(builder, array.tobytes())
        dims = builder.CreateNumpyVector(np.array(array.shape, np.int64))
        builder.StartObject(4)
        builder.PrependUOffsetTRelativeSlot(0, text, 0)
        builder.PrependUOffsetTRelativeSlot(1, dims, 0)
        builder.PrependInt32Slot(2, ir.DataType.from_numpy(array.dtype).value, 0)
        builder.PrependUOffsetTRelativeSlot(3, data, 0)
        parameters.append(builder.EndObject())
    builder.StartVector(4, len(parameters), 4)
    for parameter in reversed(parameters):
        builder.PrependUOffsetTRelative(parameter)
    listed = builder.EndVector()
    builder.StartObject(4)
    builder.PrependInt32Slot(0, _FORMAT_VERSION, 0)
    builder.PrependInt32Slot(1, 1, 0)
    builder.PrependInt32Slot(2, 1, 0)
    builder.PrependUOffsetTRelativeSlot(3, listed, 0)
    builder.Finish(builder.EndObject(), file_identifier=b"TORT")
    return bytes(builder.Output())


def _aligned(builder: flatbuffers.Builder, data: bytes) -> int:
    """Writes bytes, aligned as the schema asks, and returns their place."""
    builder.StartVector(1, len(data), _ALIGNMENT)
    builder.head = builder.head - len(data)
    builder.Bytes[builder.head : builder.head + len(data)] = data
    return int(builder.EndVector())
