"""Writes a graph as a standalone ONNX file that includes the weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir
import torch

from ..core.atomic import atomic_path, check_target, explained, replace_all, temporary_folder
from ..core.errors import ExportError, shown
from .contract import Step

WEIGHTS = "ort_trainer.weights"
"""Key of the file's metadata that lists which initializers are trained weights, and which are frozen."""

TYPE = "ort_trainer.type"
"""Key of an output's ``meta`` with an ``onnx.TypeProto`` that onnx_ir has no class for, such as a map."""

# What a damaged graph raises: too few inputs, missing values, attributes of other types, axes beyond the shape.
_OF_DAMAGE = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError)
# protobuf's limit is 2 GiB; the rest of the model needs some of it.
_MAXIMUM_PROTOBUF = (1 << 31) - (1 << 27)


def save_model(model: ir.Model, path: Path, limit: int = _MAXIMUM_PROTOBUF) -> None:
    """Writes a model.

    Args:
        model: The model.
        path: The file; an existing one is replaced.
        limit: Size in bytes above which the weights are written to a second file, ``<path>.data``.

    Raises:
        FileNotFoundError: If the folder does not exist.
    """
    weights = model.graph.initializers.values()
    size = sum(value.const_value.nbytes for value in weights if value.const_value is not None)
    if size <= limit:
        with atomic_path(path) as temporary:
            onnx.save(to_proto(model), temporary)
        return
    check_target(path)  # otherwise an error would show only after the data has been moved
    # The model names its data file, so both are written under their final names in a temporary folder. The data is
    # moved first, so a crash in between never leaves the new model without its data.
    data = f"{path.name}.data"
    with temporary_folder(path.parent, path.name) as folder:
        with explained(path):
            ir.save(model, folder / path.name, external_data=data)
        replace_all([(folder / name, path.with_name(name)) for name in (data, path.name)], like=path)


@contextlib.contextmanager
def corruption_reported(name: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Turns the errors that a damaged model causes in libraries and in our code into one that says so.

    Args:
        name: Name of the model in error messages.
        kind: The error.
    """
    try:
        yield
    except (ir.serde.SerdeError, ir.passes.PassError, *_OF_DAMAGE) as error:
        reason = error.__cause__ or error
        raise kind(f"{name} is damaged: {type(reason).__name__}: {shown(str(reason))}") from error


def recorded_weights(model: ir.Model) -> dict[str, list[str]]:
    """Returns the names that a model's metadata list as ``trained``, ``frozen`` and ``buffers``; none without metadata.

    Raises:
        ExportError: If the metadata are damaged.
    """
    try:
        recorded = json.loads(model.metadata_props.get(WEIGHTS, '{"trained": [], "frozen": []}'))
        names = {"buffers": [], **recorded, "frozen": recorded["frozen"], "trained": recorded["trained"]}
        if not all(isinstance(each, list) and all(isinstance(name, str) for name in each) for each in names.values()):
            raise TypeError("they are not lists of names")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ExportError(f"the model's metadata {WEIGHTS!r} are damaged: {shown(error)}. Remove them") from error
    return names


@corruption_reported("the model")
def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Returns a model as a message, with the types of its outputs that onnx_ir has no class for."""
    proto = ir.to_proto(model)
    for value, message in zip(model.graph.outputs, proto.graph.output, strict=True):
        if TYPE in value.meta:
            message.type.CopyFrom(value.meta[TYPE])
    return proto


def with_weights(
    graph: Step,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    trained: Collection[str],
) -> ir.Model:
    """Returns the model of a graph with exactly its parameters and buffers as initializers.

    The model's metadata lists which initializers are weights, so that the file can be trained further.

    Args:
        graph: An evaluation graph; it is not changed.
        parameters: Parameters by name.
        buffers: Buffers by name.
        trained: Names of the parameters that are trained.
    """
    model = graph.model.clone()
    state = {**parameters, **buffers}
    frozen = [name for name in parameters if name not in trained]
    model.metadata_props[WEIGHTS] = json.dumps({"trained": list(trained), "frozen": frozen, "buffers": list(buffers)})
    _constants_as_nodes(model.graph)
    names = {value: name for name, value in graph.state.items()}
    weights = [value for value in model.graph.inputs if value.name in names]
    for value in weights:
        assert value.name is not None
        value.const_value = ir.tensor(state[names[value.name]].detach().cpu().numpy(), name=value.name)
        model.graph.register_initializer(value)
    kept = [value for value in model.graph.inputs if value.name not in names]
    model.graph.inputs.clear()
    model.graph.inputs.extend(kept)
    return model


def _constants_as_nodes(graph: ir.Graph) -> None:
    """Turns a graph's existing initializers, which are constants in the code, into nodes."""
    for value in list(graph.initializers.values()):
        assert value.name is not None
        if value.is_graph_input() or value.is_graph_output() or value.const_value is None:
            continue
        del graph.initializers[value.name]
        node = ir.node(
            "Constant",
            [],
            {"value": value.const_value},
            outputs=[ir.Value(name=value.name, type=value.type, shape=value.shape)],
        )
        ir.convenience.replace_all_uses_with(value, node.outputs[0])
        graph.insert_before(graph[0], node)
