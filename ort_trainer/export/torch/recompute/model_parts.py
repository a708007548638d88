"""Finds the parts of a model that options name: layers, attention dropouts and GELUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ....core.errors import ExportError, IdleOptionError
from ....step import RandomInput
from .joint_graph import PASSED, JointGraph, Node

__all__ = ["attention_dropouts", "gelus", "layers"]

aten = torch.ops.aten


_GELU = ("aten.gelu.default", "aten.gelu_backward.default")
_SOFTMAX = (aten._softmax.default, aten._log_softmax.default)


def layers(graph: JointGraph, model: nn.Module, count: int) -> dict[Node, str]:
    """Returns the nodes of the layers to recompute, each with its layer.

    Layers are several modules of one class, each with submodules, in a ``ModuleList`` or ``Sequential``. If they are
    nested, the outermost ones count.
    """
    paths: set[str] = set()
    for name, container in model.named_modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)) and not any(_within(name, path) for path in paths):
            classes = Counter(type(part) for part in container.children())
            for part_name, part in container.named_children():
                if classes[type(part)] > 1 and next(part.children(), None) is not None:
                    paths.add(f"{name}.{part_name}" if name else part_name)
    layer_of: dict[Node, str] = {}
    for node in graph.candidates:
        for key, (path, _) in _module_stack(node).items():
            if path.removeprefix("model.") in paths:
                layer_of[node] = key
                break
    # A layer that is called twice counts twice; nodes that only gradients need come late, so their order means nothing.
    layers = list(dict.fromkeys(key for node, key in layer_of.items() if node in graph.forward))
    if not layers:
        raise IdleOptionError(
            "graph_transformer.transformer_layer_recompute",
            "the graph has no layers. Layers are several modules of one "
            "class, each with submodules, in a torch.nn.ModuleList or Sequential (a custom autograd.Function next to "
            "them hides them). Leave the option out, or use torch.utils.checkpoint in forward(), which is recomputed "
            "too",
        )
    if count > len(layers):
        raise ExportError(
            f"graph_transformer.number_recompute_layers is {count}, but the graph has {len(layers)} layers: give at "
            f"most {len(layers)}, or 0 for all but the last"
        )
    chosen = {*layers[: count or -1]}
    if not chosen:
        raise IdleOptionError(
            "graph_transformer.transformer_layer_recompute",
            "by default all layers but the last are recomputed, and "
            "the graph has only one: leave the option out, or set graph_transformer.number_recompute_layers to 1",
        )
    return {node: key for node, key in layer_of.items() if key in chosen}


def attention_dropouts(graph: JointGraph, random: Mapping[Node, RandomInput]) -> dict[Node, Node]:
    """Returns the dropouts of softmax results and the nodes that pass them on, each with its dropout."""
    masks = {node for node in graph.random if node not in random or random[node].kind == "bernoulli"}
    found: dict[Node, Node] = {}
    for node in graph.candidates:
        if node.target is aten.mul.Tensor and node in graph.forward:
            given = [source for source in node.all_input_nodes if source not in masks]
            if len(given) == 1 and masks & {*node.all_input_nodes} and _is_softmax(given[0]):
                found[node] = node
        elif node.target in PASSED and node.all_input_nodes[0] in found:
            found[node] = found[node.all_input_nodes[0]]
    if not found:
        raise IdleOptionError(
            "graph_transformer.attn_dropout_recompute",
            "the training graph has no dropout on the result of a softmax "
            "(dropout with p=0 does not count): leave the option out",
        )
    return found


def _is_softmax(node: Node) -> bool:
    while node.target in PASSED or node.target is aten.where.self:
        # where() is the part of a softmax that handles fully masked rows.
        node = node.args[2 if node.target is aten.where.self else 0]  # type: ignore[assignment]
    return node.target in _SOFTMAX


def gelus(graph: JointGraph) -> dict[Node, Any]:
    """Returns the nodes of GELU activations, each with its activation: PyTorch's operator, or a module of that name.

    Nodes that pass the result on to the next product belong to it, including dropout: gradients need the product's
    input.
    """
    found: dict[Node, Any] = {}
    for node in graph.candidates:
        modules = [key for key, (_, kind) in _module_stack(node).items() if "gelu" in _class_name(kind).lower()]
        if modules:
            found[node] = modules[-1]
        elif str(node.meta.get("original_aten")) in _GELU:  # a copy of the operator, so compare names
            found[node] = node.meta.get("seq_nr")
        elif node.target in PASSED or (node.target is aten.mul.Tensor and graph.random & {*node.all_input_nodes}):
            source = next((source for source in node.all_input_nodes if source in found), None)
            if source is not None:
                found[node] = found[source]
    if not found:
        raise IdleOptionError(
            "graph_transformer.gelu_recompute",
            "the training graph has no GELU, neither torch.nn.functional.gelu nor a "
            "module with gelu in the name of its class: leave the option out",
        )
    return found


def _module_stack(node: Node) -> Mapping[str, tuple[str, Any]]:
    return node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}


def _class_name(kind: Any) -> str:
    return str(kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]


def _within(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")
