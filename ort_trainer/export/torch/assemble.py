"""Assembles a step from its flat graph: the names of inputs and results, the ONNX model, and what is known of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir
import torch

from ...core.dims import symbols_of
from ...core.errors import ExportError
from ...engine.kernels import FitToKernelsPass, WidenInterfacePass
from ...options import ModelDescription
from ...step import Dim, RandomInput, Step, TensorSpec, dtype_name
from ...step.emitter import Names
from .differentiate import FlatGraph
from .origins import onnx_operators, origins_of
from .programs.build import program_model
from .source_lines import drop_source, onnx_source_line
from .step_module import ExportedStep, canonical_names

__all__ = ["assemble"]

_LOSS_SCALE = "__loss_scale_input_name"


def assemble(
    step: ExportedStep,
    found: FlatGraph,
    random: Mapping[torch.fx.Node, RandomInput],
    training: bool,
    for_kernels: bool,
    stage: Callable[[str], None],
) -> Step:
    """Names every input and result of a flat graph, lowers it to an ONNX model, and writes down what is known of both.

    Args:
        step: What is exported.
        found: The flat graph; it is consumed.
        random: Its placeholders of random numbers.
        training: Whether it has the backward pass.
        for_kernels: Whether its nodes become programs of PyTorch's operators.
        stage: Called with the name of each stage when it begins.

    Raises:
        ExportError: If the graph can't be lowered, or the outputs don't match the description.
    """
    canonical = canonical_names(step.model)
    description = step.description
    names = Names([*description.input_names, *description.output_names, _LOSS_SCALE])
    outputs, shapes = _outputs(step.description, found)
    random = {node: spec._replace(name=names.unique(spec.name)) for node, spec in random.items()}
    state = {node: canonical[_own(name)] for node, name in found.state.items() if node.users}
    state_names = {name: names.unique(name) for name in state.values()}
    # A gradient without elements changes nothing, and has no memory to bind.
    gradients = {canonical[_own(name)]: node for name, node in found.gradients.items() if node.meta["val"].numel()}
    gradient_names = {name: names.unique(f"{name}.grad") for name in gradients}
    updates = {canonical[_own(name)]: node for name, node in found.buffer_updates.items()}
    update_names = {name: names.unique(f"{name}.updated") for name in updates}
    batch = [(node, description.inputs[index]) for node, index in sorted(found.batch.items(), key=lambda item: item[1])]

    inputs = [(node, state_names[name]) for node, name in state.items()]
    inputs += [(node, entry.name) for node, entry in batch]
    inputs += [(node, spec.name) for node, spec in random.items()]
    loss_scale = None
    if found.tangent is not None:
        fake = found.tangent.meta["val"]
        loss_scale = TensorSpec(_LOSS_SCALE, dtype_name(fake.dtype), tuple(int(size) for size in fake.shape))
        inputs.append((found.tangent, _LOSS_SCALE))
    results = list(zip(found.outputs, description.output_names, strict=True))
    results += [(node, gradient_names[name]) for name, node in gradients.items()]
    results += [(node, update_names[name]) for name, node in updates.items()]
    programs: Mapping[str, str] = {}
    operators: Mapping[str, Sequence[torch.fx.Node | None]] = {}
    if for_kernels:
        stage("translate")
        made = program_model(found, inputs, results, batch)
        model, programs, operators = made.model, made.programs, made.operators
    else:
        from .translate import to_onnx  # takes a second; PyTorch's kernels do not need it

        model = to_onnx(found.module, inputs, results, found.constants, step.opset, step.simplified, stage)
        WidenInterfacePass()(model)
        _fit(model, found.outputs[0].meta["val"].device.type)
        if training:
            operators = onnx_operators(model, found.module.graph)
        drop_source(model)
    _set_shapes(model, {**shapes, **{entry.name: entry.shape for _, entry in batch}})
    guards, frozen = found.symbols.guards()
    return Step(
        stored=model,
        kind="training" if training else "evaluation",
        inputs=tuple(TensorSpec(entry.name, dtype_name(node.meta["val"].dtype), entry.shape) for node, entry in batch),
        outputs=outputs,
        loss=description.loss.name,
        state=state_names,
        gradients=gradient_names,
        buffer_updates=update_names,
        loss_scale=loss_scale,
        random=tuple(random.values()),
        guards=tuple(guards),
        fixed={**frozen, **found.symbols.fixed},
        programs=programs,
        origins=origins_of(found, step.model, operators).to_text() if training else "",
        index_ranges=tuple(entry for entry in found.index_ranges if training or entry.outputs),
    )


def _set_shapes(model: ir.Model, described: Mapping[str, Sequence[int | str]]) -> None:
    """Gives batch inputs and outputs the dimension names of the model description, and removes the exporter's names.

    ONNX Runtime infers intermediate shapes itself; unknown names there would only cause warnings.
    """
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.shape is not None and not value.shape.is_static():
                value.shape = None
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.name is not None and value.name in described:
            value.shape = ir.Shape(described[value.name])


def _fit(model: ir.Model, device: str) -> None:
    """Puts casts around nodes for whose types the engine has no kernel."""
    missing = FitToKernelsPass(device, onnx_source_line).call(model).missing
    if missing:
        raise ExportError(
            "ONNX Runtime has no kernel for these operators with these types or wider ones: cast their inputs to "
            "another type.\n  " + "\n  ".join(missing)
        )


def _outputs(
    description: ModelDescription, found: FlatGraph
) -> tuple[tuple[TensorSpec, ...], dict[str, tuple[int | str, ...]]]:
    """Returns the specs of the outputs and their described shapes, after checking them against the description."""
    specs, shapes = [], {}
    for entry, node in zip(description.outputs, found.outputs, strict=True):
        fake = node.meta["val"]
        shape = found.symbols.shape(fake)
        specs.append(TensorSpec(entry.name, dtype_name(fake.dtype), shape))
        shapes[entry.name] = entry.shape
        if description.has_open_outputs:
            shapes[entry.name] = _described(shape, entry.shape)
            continue
        if fake.dim() != len(entry.shape) and not (entry.is_loss and fake.numel() == 1):
            raise ExportError(
                f"output {entry.name!r} has {fake.dim()} dimensions, shape {list(fake.shape)}, but model_desc says "
                f"{len(entry.shape)}: {list(entry.shape)}"
            )
        for axis, (size, described) in enumerate(zip(fake.shape, entry.shape, strict=False)):
            if isinstance(size, int) and isinstance(described, int) and size != described:
                raise ExportError(
                    f"output {entry.name!r} has size {size} in dimension {axis}, but model_desc says {described}: "
                    f"{list(entry.shape)}"
                )
    return tuple(specs), shapes


def _described(shape: tuple[Dim, ...] | None, default: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Returns a shape in the form of a model description: sizes, and names of dimensions."""
    if shape is None:
        return default
    plain = {f"dim({symbol!r})": symbol for size in shape for symbol in symbols_of(size)}
    return tuple(
        size if isinstance(size, int) else plain.get(size, name) for size, name in zip(shape, default, strict=False)
    )


def _own(name: str) -> str:
    """Converts a name in the step module to the name in the user's model."""
    return name.removeprefix("model.")
