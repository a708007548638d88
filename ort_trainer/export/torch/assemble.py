"""Assembles a step from its flat graph: names of inputs and results, the lowered graph, and what is known of both.

That includes the module of the user's model that each operator belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple

import torch
from torch import nn

from ...core.dims import symbols_of
from ...core.errors import ExportError
from ...options import ModelDescription
from ...step import Dim, RandomInput, Step, TensorSpec, dtype_name
from ...step.emitter import Names
from ...step.origins import LOSS, Origin, Origins
from .capture.step_module import ExportedStep
from .graph.flat_graph import FlatGraph
from .graph.kernels import Kernels
from .graph.named_graph import NamedGraph, sizes_of
from .lower.programs.padding import KEPT_PLACES

__all__ = ["assemble"]

Node = torch.fx.Node

_LOSS_SCALE = "__loss_scale_input_name"


def assemble(
    step: ExportedStep,
    flat: FlatGraph,
    random: Mapping[Node, RandomInput],
    kernels: Kernels,
    stage: Callable[[str], None],
) -> Step:
    """Names every input and result of a flat graph, lowers it, and records what is known of both.

    Args:
        step: What is exported.
        flat: The flat graph; it is consumed.
        random: Its placeholders of random numbers.
        kernels: What computes it.
        stage: Called with the name of each stage when it begins.

    Raises:
        ExportError: If the graph can't be lowered, or the outputs don't match the description.
    """
    description, training = step.description, flat.tangent is not None
    names = Names([*description.input_names, *description.output_names, _LOSS_SCALE])
    outputs, shapes = _outputs(description, flat)
    left = [names.unique(f"left.{index}") for index in range(flat.left)]
    of_left = zip(flat.outputs[len(outputs) :], left, strict=True)
    outputs += tuple(
        TensorSpec(name, dtype_name(node.meta["val"].dtype), flat.symbols.shape(node.meta["val"]))
        for node, name in of_left
    )
    random = {node: spec._replace(name=names.unique(spec.name)) for node, spec in random.items()}
    probabilities = {spec.probability for spec in random.values()}  # read by who draws, if not by the graph
    state = {node: name for node, name in flat.state.items() if node.users or node.name in probabilities}
    state_names = {name: names.unique(name) for name in state.values()}
    named = {node.name: state_names[name] for node, name in state.items()}
    random = {node: spec._replace(probability=named.get(spec.probability, "")) for node, spec in random.items()}
    # A gradient without elements changes nothing, and has no memory to bind.
    gradients = {name: node for name, node in flat.gradients.items() if node.meta["val"].numel()}
    gradient_names = {name: names.unique(f"{name}.grad") for name in gradients}
    update_names = {name: names.unique(f"{name}.updated") for name in flat.buffer_updates}
    batch = [(node, description.inputs[index]) for node, index in sorted(flat.batch.items(), key=lambda item: item[1])]

    inputs = [(node, state_names[name]) for node, name in state.items()]
    inputs += [(node, entry.name) for node, entry in batch]
    inputs += [(node, spec.name) for node, spec in random.items()]
    loss_scale = None
    if flat.tangent is not None:
        fake = flat.tangent.meta["val"]
        loss_scale = TensorSpec(_LOSS_SCALE, dtype_name(fake.dtype), tuple(int(size) for size in fake.shape))
        inputs.append((flat.tangent, _LOSS_SCALE))
    conditions = {names.unique(f"condition_{number}"): node for number, node in enumerate(flat.conditions)}
    results = list(zip(flat.outputs, (spec.name for spec in outputs), strict=True))
    results += [(node, gradient_names[name]) for name, node in gradients.items()]
    results += [(node, update_names[name]) for name, node in flat.buffer_updates.items()]
    results += [(node, name) for name, node in conditions.items()]
    indices = {entry.input for entry in flat.index_ranges}
    graph = NamedGraph(
        flat.module,
        inputs,
        results,
        flat.constants,
        flat.symbols,
        sizes_of((node, entry.shape) for node, entry in batch),
        {**shapes, **{entry.name: entry.shape for _, entry in batch}},
        unfetched=[place for place, (_, name) in enumerate(results) if name in step.unfetched],
        checked=[node for node, name in inputs if name in indices],
        separable=not flat.gradients,
    )
    mask = next((node for node, entry in batch if entry.name == step.padding_mask), None)
    kernels.rewrite_step(flat, graph, mask)
    lowered, operators = kernels.lower(graph, step, stage)
    guards, frozen = flat.symbols.guards()
    _check_guards(guards)
    return Step(
        kind="training" if training else "evaluation",
        inputs=tuple(TensorSpec(entry.name, dtype_name(node.meta["val"].dtype), entry.shape) for node, entry in batch),
        outputs=outputs,
        left=tuple(left),
        loss=description.loss.name,
        state=state_names,
        gradients=gradient_names,
        buffer_updates=update_names,
        assumptions=dict(zip(conditions, map(astuple, flat.assumptions), strict=True)),
        loss_scale=loss_scale,
        random=tuple(random.values()),
        guards=tuple(guards),
        fixed={**frozen, **flat.symbols.fixed},
        **lowered,
        origins=_origins(flat, step.model, operators).to_text() if training else "",
        index_ranges=tuple(entry for entry in flat.index_ranges if training or entry.outputs),
    )


def _outputs(
    description: ModelDescription, flat: FlatGraph
) -> tuple[tuple[TensorSpec, ...], dict[str, tuple[int | str, ...]]]:
    """Returns the specs of the outputs and their described shapes, after checking them against the description."""
    specs, shapes = [], {}
    for entry, node in zip(description.outputs, flat.outputs, strict=False):
        fake = node.meta["val"]
        shape = flat.symbols.shape(fake)
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


def _origins(flat: FlatGraph, model: nn.Module, nodes: Mapping[str, Sequence[Node | None]]) -> Origins:
    """Returns where the nodes of a graph come from.

    PyTorch records with every operator the module that called it, and with a backward operator the module of the
    forward operator whose gradient it computes.

    Args:
        flat: The captured step, in its final form.
        model: The user's model.
        nodes: Name of a node -> the operators that it computes; None for an unknown one.
    """
    places = _places(flat)
    kinds = {path: type(part).__name__ for path, part in model.named_modules(remove_duplicate=False)}
    for node in flat.module.graph.nodes:  # the loss function's own modules are not the model's
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            kinds.setdefault(_path(path), "" if not path else str(kind).rpartition(".")[2])
    wanted = {name: [None if node is None else places.get(node) for node in several] for name, several in nodes.items()}
    return Origins.of(wanted, list(kinds.items()))


def _places(flat: FlatGraph) -> dict[Node, Origin]:
    operators = [node for node in flat.module.graph.nodes if node.op == "call_function"]
    first = next((index for index, node in enumerate(operators) if _starts_backward(node, flat)), len(operators))
    # By their order: PyTorch's metadata may put the replacement of a backward operator in the forward pass.
    backward = set(operators[first:])
    places: dict[Node, Origin] = {}
    for node in operators:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if stack:
            places[node] = Origin(_path(list(stack.values())[-1][0]), node in backward)
        else:  # a sum of gradients from several operators belongs where they are
            _place_beside(node, node.all_input_nodes, places, node in backward)
    for node in reversed(operators):
        if node not in places:  # a view added by a rewrite belongs where it is used
            _place_beside(node, node.users, places, node in backward)
    return places


def _starts_backward(node: Node, flat: FlatGraph) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward" or flat.tangent in node.all_input_nodes


def _place_beside(node: Node, others: Iterable[Node], places: dict[Node, Origin], backward: bool) -> None:
    """Places an operator in the innermost module that contains the others."""
    paths = [places[other].module for other in others if other in places]
    if paths:
        places[node] = Origin(_common(paths), backward)


def _check_guards(guards: Iterable[str]) -> None:
    """Checks that no condition is about the number of kept places, which is only known when a step runs.

    Raises:
        ExportError: If one is.
    """
    wrong = [guard for guard in guards if KEPT_PLACES in symbols_of(guard)]
    if wrong:
        raise ExportError(
            f"the graph is valid only if {wrong[0]}, but with utils.remove_padding that depends on each batch: set "
            "utils.kernels to 'auto', or leave out utils.remove_padding"
        )


def _path(path: str) -> str:
    """Converts the path of a module in the step module to its path in the user's model."""
    part, _, rest = path.partition(".")
    if part == "model":
        return rest
    return f"{LOSS}.{rest}" if rest else LOSS


def _common(paths: Sequence[str]) -> str:
    parts = [path.split(".") for path in paths]
    shared = []
    for several in zip(*parts, strict=False):
        if len(set(several)) > 1:
            break
        shared.append(several[0])
    return ".".join(shared)
