"""Assembles the graphs of a call from its joint graph: one for the forward pass, and one or two for the backward pass.

If there are two, the first takes only the gradient of the output that is probably differentiated, the loss; the last
takes the gradients of all outputs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from ...step import SIZES, RandomInput, Step, TensorSpec, dtype_name
from ...step.emitter import Names
from .capture.call import ExportedCall
from .graph.divide import Divided, Part, depends_on, divide, without
from .graph.flat_graph import FlatGraph
from .graph.kernels import Kernels
from .graph.named_graph import NamedGraph, add_sizes, sizes_of
from .graph.recompute import values_to_recompute

__all__ = ["CallAssembler"]

aten = torch.ops.aten
Node = torch.fx.Node
Named = list[tuple[Node, str]]


class CallAssembler:
    """Names every input and result of a joint graph, divides it, and lowers the parts.

    Nodes are known by the names that they have in the joint graph; the parts' inputs and results by graph names.

    Args:
        call: What is exported.
        flat: The joint graph; it is consumed.
        random: Its placeholders of random numbers.
        kernels: What computes the parts.
        stage: Called with the name of each stage when it begins.
    """

    def __init__(
        self,
        call: ExportedCall,
        flat: FlatGraph,
        random: Mapping[Node, RandomInput],
        kernels: Kernels,
        stage: Callable[[str], None],
    ) -> None:
        self._call, self._flat, self._kernels, self._stage = call, flat, kernels, stage
        self._described = {entry.name: entry.shape for entry in call.description.inputs}
        self._batch = {node.name: call.description.inputs[index].name for node, index in flat.batch.items()}
        self._inputs = random
        self._names = names = Names([SIZES, *self._described])
        names_of_random = {node.name: names.unique(spec.name) for node, spec in random.items()}
        self._state = {node.name: names.unique(name) for node, name in flat.state.items()}
        self._random = {
            node.name: spec._replace(name=names_of_random[node.name], probability=self._state.get(spec.probability, ""))
            for node, spec in random.items()
        }
        # What both passes may take.
        self._shared_inputs = {**self._state, **self._batch, **{node: spec.name for node, spec in self._random.items()}}
        self._outputs = [names.unique(f"output_{index}") for index in range(len(flat.outputs))]
        self._conditions = [names.unique(f"condition_{number}") for number in range(len(flat.conditions))]
        inputs = call.description.inputs
        self._updated = {name: names.unique(f"{name}.updated") for name in flat.buffer_updates}
        self._changed = {name: names.unique(f"{name}.updated") for name in (inputs[i].name for i in flat.input_updates)}
        # Node of a tangent -> the output whose gradient it is.
        self._tangents = {node.name: self._outputs[index] for node, index in flat.tangents.items()}
        self._constants = {node.name: value for node, value in flat.constants.items()}
        # What the backward pass may take of the forward pass, in addition to its inputs.
        self._kept: dict[str, str] = {}

    def steps(self) -> tuple[Step, tuple[Step, ...]]:
        """Returns the forward pass, and the backward passes, the one that takes most gradients last.

        There is no backward pass if nothing requires grad.

        Raises:
            ExportError: If a graph can't be lowered.
        """
        flat = self._flat
        trained = [name for name, node in flat.gradients.items() if node.meta["val"].numel()]
        flat.outputs[:] = map(_without_copy, flat.outputs)
        self._kernels.rewrite_call(flat)
        updates = [*flat.buffer_updates.values(), *flat.input_updates.values()]
        of_forward = [*flat.outputs, *updates, *flat.conditions]
        of_backward = [flat.gradients[name] for name in trained] + [*flat.input_gradients.values()]
        again = values_to_recompute(self._call.recompute, flat, self._inputs, self._call.model)
        divided = divide(flat.module, of_forward, of_backward, again, sizes=not self._kernels.reads_shapes)
        self._kept = {node.name: name for node, name in _named(of_forward, self._own_results)}
        self._kept |= {name: self._names.unique(f"saved_{index}") for index, name in enumerate(divided.saved)}
        forward = self._forward(divided)
        return forward, self._backwards(divided.backward, trained, of_forward) if of_backward else ()

    @property
    def _own_results(self) -> list[str]:
        """What the forward pass returns, without what is only saved."""
        return [*self._outputs, *self._updated.values(), *self._changed.values(), *self._conditions]

    def _forward(self, divided: Divided) -> Step:
        flat, part = self._flat, divided.forward
        saved = [self._kept[name] for name in divided.saved]
        results = _named(part.results, [*self._own_results, *saved])
        guards, frozen = flat.symbols.guards()
        step = Step(
            kind="forward",
            inputs=tuple(
                TensorSpec(name, dtype_name(part.inputs[node].meta["val"].dtype), self._described[name])
                for node, name in self._batch.items()
            ),
            outputs=tuple(self._spec(node, name) for node, name in results[: len(self._outputs)]),
            loss="",
            state={name: self._state[node.name] for node, name in flat.state.items()},
            buffer_updates=self._updated,
            input_updates=self._changed,
            assumptions=dict(zip(self._conditions, map(dataclasses.astuple, flat.assumptions), strict=True)),
            saved=tuple(self._spec(node, name) for node, name in results[len(results) - len(saved) :]),
            random=tuple(self._random.values()),
            guards=tuple(guards),
            fixed={**frozen, **flat.symbols.fixed},
        )
        inputs = [(part.inputs[node], name) for node, name in self._shared_inputs.items()]
        sizes = sizes_of((part.inputs[node], self._described[name]) for node, name in self._batch.items())
        return self._lowered(step, part, inputs, results, sizes)

    def _spec(self, node: Node, name: str) -> TensorSpec:
        fake = node.meta["val"]
        return TensorSpec(name, dtype_name(fake.dtype), self._flat.symbols.shape(fake))

    def _backwards(self, part: Part, trained: Sequence[str], outputs: Sequence[Node]) -> tuple[Step, ...]:
        backwards = []
        # For ONNX Runtime the symbolic sizes of zeros would have to be computed.
        if len(self._tangents) > 1 and self._kernels.of_pytorch:
            sizes = dict(zip(self._outputs, (node.meta["val"].numel() for node in outputs), strict=False))
            numbers = [tangent for tangent, output in self._tangents.items() if sizes[output] == 1]
            backwards.append(self._backward(_copied(part), trained, [*numbers, *self._tangents][:1]))
        return (*backwards, self._backward(part, trained, list(self._tangents)))

    def _backward(self, part: Part, trained: Sequence[str], tangent_nodes: Sequence[str]) -> Step:
        tangents = {part.inputs[node]: node for node in self._tangents if node in part.inputs}
        absent = [node for node, tangent in tangents.items() if tangent not in tangent_nodes]
        if absent:
            without(part, tangents, absent)
        depends = depends_on(part, tangents)
        needing = [self._call.description.inputs[index].name for index in self._flat.input_gradients]
        reserved = Names([SIZES, *self._state.values(), *self._described, *self._kept.values()])
        names = [reserved.unique(f"{name}.grad") for name in (*trained, *needing)]
        results = _named(part.results, names)
        present = {name for _, name in results}
        gradient_of = {
            node: reserved.unique(f"{self._tangents[node]}.grad") for node in tangent_nodes if node in part.inputs
        }
        taken = {**self._shared_inputs, **self._kept, **gradient_of}
        inputs = [(node, taken[name]) for name, node in part.inputs.items() if name in taken and node.users]
        dimensions = list(dict.fromkeys(s for shape in self._described.values() for s in shape if isinstance(s, str)))
        sizes: Mapping[str, tuple[Node, int]] = {}
        specs = [TensorSpec(name, dtype_name(node.meta["val"].dtype), None) for node, name in inputs]
        if dimensions and self._kernels.of_pytorch:
            source, sizes = add_sizes(part.module.graph, self._dimensions(dimensions))
            inputs.append((source, SIZES))
            specs.append(TensorSpec(SIZES, "float32", (0, *dimensions)))
        step = Step(
            kind="backward",
            inputs=tuple(specs),
            outputs=(),
            loss="",
            state={},
            gradients={key: name for key, name in zip(trained, names, strict=False) if name in present},
            input_gradients={
                key: name for key, name in zip(needing, names[len(trained) :], strict=True) if name in present
            },
            tangents={self._tangents[node]: name for node, name in gradient_of.items() if part.inputs[node].users},
            depends={
                name: tuple(sorted(self._tangents[tangents[tangent]] for tangent in depends[node]))
                for node, name in results
            },
        )
        return self._lowered(step, part, inputs, results, sizes)

    def _dimensions(self, names: Sequence[str]) -> dict[str, int | torch.SymInt]:
        """Returns the sizes of symbolic dimensions as the graph knows them."""
        places = sizes_of((node, self._described[self._batch[node.name]]) for node in self._flat.batch)
        return {name: places[name][0].meta["val"].shape[places[name][1]] for name in names}

    def _lowered(
        self, step: Step, part: Part, inputs: Named, results: Named, sizes: Mapping[str, tuple[Node, int]]
    ) -> Step:
        saved = {name for name in self._kept.values() if name not in self._own_results}
        graph = NamedGraph(
            part.module,
            inputs,
            results,
            {part.inputs[name]: value for name, value in self._constants.items() if name in part.inputs},
            self._flat.symbols,
            sizes,
            ordered={node for node, name in (*inputs, *results) if name in saved},
        )
        lowered, _ = self._kernels.lower(graph, self._call, self._stage)
        return dataclasses.replace(step, **lowered)


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
