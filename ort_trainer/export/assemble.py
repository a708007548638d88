"""Assembles steps from a flat graph: names of inputs and results, the lowered graphs, and what is known of both.

The graph of a step with a loss stays whole; that of a call is divided, into one graph for the forward pass, and one or
two for the backward pass. If there are two, the first takes only the gradient of the output that is probably
differentiated, the loss; the last takes the gradients of all outputs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..capture.step_module import ExportedStep
from ..core.dims import symbols_of
from ..core.errors import ExportError
from ..graph.divide import Part, depends_on, divide, independent, without
from ..graph.flat_graph import FlatGraph
from ..graph.kernels import Kernels
from ..graph.named_graph import NamedGraph, Sizes, add_sizes, sizes_of
from ..graph.recompute import values_to_recompute
from ..kernels.programs.padding import KEPT_PLACES
from ..options import InputDescription, ModelDescription
from ..step import SIZES, Dim, RandomInput, Step, TensorSpec, dtype_name
from ..step.names import Names
from .origins import origins_of

aten = torch.ops.aten
Node = torch.fx.Node
Named = list[tuple[Node, str]]

_LOSS_SCALE = "__loss_scale_input_name"
# Each costs the lowering of a backward pass.
_MAXIMUM_PARTS = 4


class Assembler:
    """Names every input and result of a flat graph, and lowers it, whole or in parts.

    Nodes are known by the names that they have in the flat graph, inputs and results by the names of graph inputs and
    outputs.

    Args:
        exported: What is exported.
        flat: The flat graph; it is consumed.
        random: Its placeholders of random numbers.
        kernels: What computes it.
        stage: Called with the name of each stage when it begins.
    """

    def __init__(
        self,
        exported: ExportedStep,
        flat: FlatGraph,
        random: Mapping[Node, RandomInput],
        kernels: Kernels,
        stage: Callable[[str], None],
    ) -> None:
        self._exported, self._flat, self._kernels, self._stage = exported, flat, kernels, stage
        description, described_outputs = exported.description, exported.description.output_names
        self._names = names = Names([*description.input_names, *described_outputs, _LOSS_SCALE, SIZES])
        unnamed = len(flat.outputs) - flat.left - len(described_outputs)
        self._left = tuple(names.unique(f"left.{index}") for index in range(flat.left))
        names_of_random = {node.name: names.unique(spec.name) for node, spec in random.items()}
        self._state = {node.name: names.unique(name) for node, name in flat.state.items()}
        self._random_nodes = random
        self._random = {
            node.name: spec._replace(name=names_of_random[node.name], probability=self._state.get(spec.probability, ""))
            for node, spec in random.items()
        }
        self._batch: dict[str, InputDescription] = {
            node.name: description.inputs[index] for node, index in sorted(flat.batch.items(), key=lambda item: item[1])
        }
        of_batch = {node: entry.name for node, entry in self._batch.items()}
        # What every pass may take.
        self._inputs = {**self._state, **of_batch, **{node: spec.name for node, spec in self._random.items()}}
        self._outputs = [*described_outputs, *(names.unique(f"output_{at}") for at in range(unnamed)), *self._left]
        # A gradient without elements changes nothing, and has no memory to bind.
        trained = [name for name, node in flat.gradients.items() if node.meta["val"].numel()]
        self._gradients = {name: names.unique(f"{name}.grad") for name in trained}
        changed = [description.inputs[index].name for index in flat.input_updates]
        self._buffer_updates = {name: names.unique(f"{name}.updated") for name in flat.buffer_updates}
        self._input_updates = {name: names.unique(f"{name}.updated") for name in changed}
        self._conditions = [names.unique(f"condition_{number}") for number in range(len(flat.conditions))]
        differentiated = [description.inputs[index].name for index in flat.input_gradients]
        self._input_gradients = {name: names.unique(f"{name}.grad") for name in differentiated}
        self._tangents = {node.name: names.unique(f"{self._outputs[i]}.grad") for node, i in flat.tangents.items()}

    def step(self) -> Step:
        """Returns the step with a loss, or its forward pass for evaluation.

        Raises:
            ExportError: If the graph can't be lowered, or the outputs don't match the description.
        """
        flat, exported, description = self._flat, self._exported, self._exported.description
        shapes = _described_shapes(description, flat)
        probabilities = {spec.probability for spec in self._random_nodes.values()}  # read by who draws
        used = {node: name for node, name in flat.state.items() if node.users or node.name in probabilities}
        placeholders = {node.name: node for node in (*used, *flat.batch, *self._random_nodes)}
        inputs = [(placeholders[node], name) for node, name in self._inputs.items() if node in placeholders]
        loss_scale = None
        if flat.tangent is not None:
            fake = flat.tangent.meta["val"]
            loss_scale = TensorSpec(_LOSS_SCALE, dtype_name(fake.dtype), tuple(int(size) for size in fake.shape))
            inputs.append((flat.tangent, _LOSS_SCALE))
        gradients = [(flat.gradients[name], output) for name, output in self._gradients.items()]
        results = [*zip(self._forward_nodes(), self._forward_names(), strict=True)]
        results[len(self._outputs) : len(self._outputs)] = gradients
        indices = {entry.input for entry in flat.index_ranges}
        graph = NamedGraph(
            flat.module,
            inputs,
            results,
            flat.constants,
            flat.symbols,
            self._sizes(placeholders),
            {**shapes, **{entry.name: entry.shape for entry in self._batch.values()}},
            unfetched=[place for place, (_, name) in enumerate(results) if name in exported.unfetched],
            checked=[node for node, name in inputs if name in indices],
            separable=not flat.gradients,
        )
        mask = next((placeholders[n] for n, entry in self._batch.items() if entry.name == exported.padding_mask), None)
        self._kernels.rewrite_step(flat, graph, mask)
        training = flat.tangent is not None
        lowered, operators = self._kernels.lower(graph, exported, self._stage)
        return self._forward(
            "training" if training else "evaluation",
            lowered,
            loss=description.loss.name,
            left=self._left,
            state={name: self._state[node.name] for node, name in used.items()},
            gradients=self._gradients,
            loss_scale=loss_scale,
            origins=origins_of(flat, exported.model, operators).to_text() if training else "",
            index_ranges=tuple(entry for entry in flat.index_ranges if training or entry.outputs),
        )

    def call(self) -> tuple[Step, tuple[Step, ...]]:
        """Returns the forward pass of a call, and its backward passes, the one that takes most gradients last.

        There is no backward pass if nothing requires grad.

        Raises:
            ExportError: If a graph can't be lowered.
        """
        flat, exported = self._flat, self._exported
        flat.outputs[:] = map(_without_copy, flat.outputs)
        self._kernels.rewrite_call(flat)
        of_forward = self._forward_nodes()
        of_backward = [flat.gradients[name] for name in self._gradients] + [*flat.input_gradients.values()]
        again = values_to_recompute(exported.recompute, flat, self._random_nodes, exported.model)
        divided = divide(flat.module, of_forward, of_backward, again, sizes=not self._kernels.reads_shapes)
        saved = {node: self._names.unique(f"saved_{index}") for index, node in enumerate(divided.saved)}
        part = divided.forward
        inputs = [(part.inputs[node], name) for node, name in self._inputs.items()]
        results = _named(part.results, [*self._forward_names(), *saved.values()])
        specs = tuple(self._spec(node, name) for node, name in results[len(results) - len(saved) :])
        lowered = self._lowered(part, inputs, results, self._sizes(part.inputs), saved.values())
        # Compiling loops may add conditions on sizes, which are the forward pass' to check.
        parts = self._parts(divided.backward)
        backwards = self._backwards(divided.backward, saved, parts) if of_backward else ()
        forward = self._forward(
            "forward",
            lowered,
            loss="",
            state={name: self._state[node.name] for node, name in flat.state.items()},
            input_updates=self._input_updates,
            differentiable={
                self._outputs[flat.tangents[tangent]]: number for number, part in enumerate(parts) for tangent in part
            },
            saved=specs,
        )
        return forward, backwards

    def _forward_nodes(self) -> list[Node]:
        """The results of a forward pass: outputs, new values, and conditions."""
        flat = self._flat
        return [*flat.outputs, *flat.buffer_updates.values(), *flat.input_updates.values(), *flat.conditions]

    def _forward_names(self) -> list[str]:
        return [*self._outputs, *self._buffer_updates.values(), *self._input_updates.values(), *self._conditions]

    def _forward(self, kind: str, lowered: Mapping[str, Any], **more: Any) -> Step:
        """Returns a step with all that steps and forward passes of calls have in common."""
        flat = self._flat
        guards, frozen = flat.symbols.guards()
        _check_guards(guards)
        places = {node.name: node for node in flat.batch}
        return Step(
            kind=kind,
            inputs=tuple(
                TensorSpec(entry.name, dtype_name(places[node].meta["val"].dtype), entry.shape)
                for node, entry in self._batch.items()
            ),
            outputs=tuple(map(self._spec, flat.outputs, self._outputs)),
            buffer_updates=self._buffer_updates,
            assumptions=dict(zip(self._conditions, map(dataclasses.astuple, flat.assumptions), strict=True)),
            random=tuple(self._random.values()),
            guards=tuple(guards),
            fixed={**frozen, **flat.symbols.fixed},
            **lowered,
            **more,
        )

    def _spec(self, node: Node, name: str) -> TensorSpec:
        fake = node.meta["val"]
        return TensorSpec(name, dtype_name(fake.dtype), self._flat.symbols.shape(fake))

    def _sizes(self, placeholders: Mapping[str, Node]) -> Sizes:
        return sizes_of((placeholders[node], entry.shape) for node, entry in self._batch.items())

    def _parts(self, part: Part) -> list[list[Node]]:
        """Returns the tangents in groups that have backward passes of their own; all in one if there would be many."""
        tangents, of_part = [*self._flat.tangents], part.inputs
        groups = independent(part, [of_part[node.name] for node in tangents if node.name in of_part])
        if not (self._kernels.of_pytorch and 1 < len(groups) <= _MAXIMUM_PARTS):
            return [tangents] if tangents else []
        unused = [node for node in tangents if node.name not in of_part]
        parts = [[node for node in tangents if of_part.get(node.name) in group] for group in groups]
        return [[*unused, *parts[0]], *parts[1:]]

    def _backwards(self, part: Part, saved: Mapping[str, str], parts: Sequence[Sequence[Node]]) -> tuple[Step, ...]:
        """Returns the backward passes.

        Args:
            part: The pass that takes the gradients of all outputs.
            saved: Node of the forward pass -> the graph output that has its value.
            parts: Tangents that may be given without the others.
        """
        flat, tangents = self._flat, [node.name for node in self._flat.tangents]
        smaller: dict[tuple[str, ...], None] = {}
        # For ONNX Runtime the symbolic sizes of zeros would have to be computed.
        if len(tangents) > 1 and self._kernels.of_pytorch:
            sizes = {node.name: flat.outputs[index].meta["val"].numel() for node, index in flat.tangents.items()}
            smaller[(next((tangent for tangent in tangents if sizes[tangent] == 1), tangents[0]),)] = None
            smaller |= dict.fromkeys(tuple(node.name for node in group) for group in parts[len(parts) == 1 :])
        passes = [self._backward(_copied(part), saved, names) for names in smaller]
        return (*passes, self._backward(part, saved, tangents))

    def _backward(self, part: Part, saved: Mapping[str, str], tangent_nodes: Sequence[str]) -> Step:
        flat = self._flat
        output_of = {node.name: self._outputs[index] for node, index in flat.tangents.items()}
        tangents = {part.inputs[node]: node for node in output_of if node in part.inputs}
        absent = [node for node, tangent in tangents.items() if tangent not in tangent_nodes]
        if absent:
            without(part, tangents, absent)
        depends = depends_on(part, tangents)
        kept = dict(zip((node.name for node in self._forward_nodes()), self._forward_names(), strict=True))
        results = _named(part.results, [*self._gradients.values(), *self._input_gradients.values()])
        present = {name for _, name in results}
        gradient_of = {node: self._tangents[node] for node in tangent_nodes if node in part.inputs}
        taken = {**self._inputs, **kept, **saved, **gradient_of}
        inputs = [(node, taken[name]) for name, node in part.inputs.items() if name in taken and node.users]
        specs = [TensorSpec(name, dtype_name(node.meta["val"].dtype), None) for node, name in inputs]
        symbols = [size for entry in self._batch.values() for size in entry.shape if isinstance(size, str)]
        sizes: Sizes = {}
        if symbols and self._kernels.of_pytorch:
            source, sizes = add_sizes(part.module.graph, self._values_of(dict.fromkeys(symbols)))
            inputs.append((source, SIZES))
            specs.append(TensorSpec(SIZES, "float32", (0, *sizes)))
        return Step(
            kind="backward",
            inputs=tuple(specs),
            outputs=(),
            loss="",
            state={},
            gradients={key: name for key, name in self._gradients.items() if name in present},
            input_gradients={key: name for key, name in self._input_gradients.items() if name in present},
            tangents={output_of[node]: name for node, name in gradient_of.items() if part.inputs[node].users},
            depends={
                name: tuple(sorted(output_of[tangents[tangent]] for tangent in depends[node])) for node, name in results
            },
            **self._lowered(part, inputs, results, sizes, saved.values()),
        )

    def _values_of(self, symbols: Iterable[str]) -> dict[str, int | torch.SymInt]:
        """Returns the values of symbolic sizes in the flat graph."""
        places = self._sizes({node.name: node for node in self._flat.batch})
        return {name: places[name][0].meta["val"].shape[places[name][1]] for name in symbols}

    def _lowered(
        self, part: Part, inputs: Named, results: Named, sizes: Sizes, saved: Iterable[str]
    ) -> Mapping[str, Any]:
        """Returns the graph of a pass of a call, as fields of its step."""
        ordered = {*saved}
        graph = NamedGraph(
            part.module,
            inputs,
            results,
            {part.inputs[node.name]: value for node, value in self._flat.constants.items() if node.name in part.inputs},
            self._flat.symbols,
            sizes,
            ordered={node for node, name in (*inputs, *results) if name in ordered},
        )
        return self._kernels.lower(graph, self._exported, self._stage)[0]


def _described_shapes(description: ModelDescription, flat: FlatGraph) -> dict[str, tuple[int | str, ...]]:
    """Returns the described shapes of the outputs, after checking the outputs against them."""
    shapes = {}
    for entry, node in zip(description.outputs, flat.outputs, strict=False):
        fake = node.meta["val"]
        shapes[entry.name] = entry.shape
        if description.has_open_outputs:
            shapes[entry.name] = _in_words(flat.symbols.shape(fake), entry.shape)
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
    return shapes


def _in_words(shape: tuple[Dim, ...] | None, default: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Returns a shape in the form of a model description: sizes, and names of dimensions."""
    if shape is None:
        return default
    plain = {f"dim({symbol!r})": symbol for size in shape for symbol in symbols_of(size)}
    return tuple(
        size if isinstance(size, int) else plain.get(size, name) for size, name in zip(shape, default, strict=False)
    )


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


def _named(nodes: Sequence[Node | None], names: Sequence[str]) -> Named:
    return [(node, name) for node, name in zip(nodes, names, strict=True) if node is not None]


def _without_copy(node: Node) -> Node:
    """Returns what an output is a copy of; see ``CallModule.run``."""
    return node.args[0] if node.target is aten.clone.default else node  # type: ignore[return-value]


def _copied(part: Part) -> Part:
    module = copy.deepcopy(part.module)
    named = {node.name: node for node in module.graph.nodes}
    results = [None if node is None else named[node.name] for node in part.results]
    return Part(module, {name: named[node.name] for name, node in part.inputs.items()}, results)
