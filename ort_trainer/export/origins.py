"""Where the nodes of a graph come from: the module of the user's model that each operator belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ..graph.flat_graph import FlatGraph
from ..step.origins import LOSS, Origin, Origins

Node = torch.fx.Node


def origins_of(flat: FlatGraph, model: nn.Module, nodes: Mapping[str, Sequence[Node | None]]) -> Origins:
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
