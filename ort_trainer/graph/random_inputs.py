"""Takes random numbers out of the graph: every random operator becomes an input that the session samples.

ONNX Runtime's own random operators keep their state inside the runtime, where it can be neither read nor restored, so a
resumed run would sample other numbers. Here the session samples them with its own ``torch.Generator``, in the order of
PyTorch, so they are reproducible from a seed, and the generator's state is saved in a checkpoint. Dropout masks are
those that PyTorch samples for the same seed, or are sampled in a faster way (:class:`Draws`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..core.errors import ExportError
from ..fx.explain import source_line
from ..fx.operator_table import random_operators
from ..fx.symbols import SymbolTable, hint
from ..fx.values import call, draws_numbers
from ..step import Dim, RandomInput, dtype_name

aten = torch.ops.aten


@dataclass(frozen=True)
class Draws:
    """How to sample the masks of dropout.

    Attributes:
        fast: Whether from 16-bit numbers; otherwise as PyTorch does.
        within: Whether the graph samples them when they are needed, from a key that is an input; otherwise they are
            inputs themselves.
        by_device: Whether PyTorch's random operators stay in the graph, and draw on the device. Only dropout whose rate
            is an input is replaced, as PyTorch has no operator for it.
    """

    fast: bool = False
    within: bool = False
    by_device: bool = False


class Lifter:
    """Replaces random operators of a graph by inputs and nodes that compute the operators' results from them.

    Args:
        graph: The graph.
        symbols: The symbolic sizes.
        draws: How to sample masks.

    Attributes:
        graph: The graph.
        inputs: The new placeholders, and what to sample for each. A probability has the name of its node.
        origin: Metadata of the operator that is replaced.
    """

    def __init__(self, graph: torch.fx.Graph, symbols: SymbolTable, draws: Draws) -> None:
        self.graph = graph
        self.draws = draws
        self._symbols = symbols
        self._key: torch.fx.Node | None = None
        self.masks = 0
        self.inputs: dict[torch.fx.Node, RandomInput] = {}
        self.origin: dict[str, Any] = {}

    def draw(
        self,
        node: torch.fx.Node,
        like: torch.Tensor,
        kind: str,
        parameters: tuple[float, ...] = (),
        probability: torch.fx.Node | None = None,
    ) -> torch.fx.Node:
        """Returns a new placeholder of the shape and dtype of ``like``; ``probability`` is the one of p, if any."""
        shape = self._symbols.shape(like)
        if shape is None:
            raise ExportError(
                f"{node.target} is not supported here, because the number of random values that it draws depends on "
                f"the values of the batch: {source_line(node)}"
            )
        order = () if kind == "mask" else order_when_empty(like)
        placeholder = self._input(kind, like.detach(), shape, parameters, order)
        if probability is not None:
            self.inputs[placeholder] = self.inputs[placeholder]._replace(probability=probability.name)
        return placeholder

    def key(self) -> torch.fx.Node:
        """Returns the placeholder of the integer key from which the graph samples masks."""
        if self._key is None:
            with _disable_current_modes():
                number = torch.zeros((), dtype=torch.int64)
            self._key = self._input("key", self._fake_mode.from_tensor(number), ())
        return self._key

    def _input(
        self,
        kind: str,
        fake: torch.Tensor,
        shape: tuple[Dim, ...],
        parameters: tuple[float, ...] = (),
        order: tuple[int, ...] = (),
    ) -> torch.fx.Node:
        name = f"random_{len(self.inputs)}"
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            placeholder = self.graph.placeholder(name)
        placeholder.meta["val"] = fake
        self.inputs[placeholder] = RandomInput(name, kind, dtype_name(fake.dtype), shape, parameters, order)
        return placeholder

    @contextlib.contextmanager
    def replacing(self, node: torch.fx.Node) -> Iterator[None]:
        """Gives inserted nodes the origin and the fake mode of the operator that they replace."""
        # The replacement keeps the operator's module and source line.
        self.origin = dict(node.meta)
        value = node.meta["val"]
        self._fake_mode = (value[0] if isinstance(value, (tuple, list)) else value).fake_mode
        shapes = self._fake_mode.shape_env
        # The replacement works for the same sizes as the operator, so it adds no condition.
        with self._fake_mode, contextlib.nullcontext() if shapes is None else shapes.suppress_guards():
            yield

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """Inserts an operator at the current place, with its fake result."""
        node = call(self.graph, operator, *args, **kwargs)
        node.meta.update({**self.origin, "val": node.meta["val"]})
        return node


def order_when_empty(like: torch.Tensor) -> tuple[int, ...]:
    """Returns the dimensions in the order of ``empty_like``'s strides; an empty tuple if they are in order already.

    Uses the sample's sizes, because comparing symbolic sizes would add conditions to the graph.
    """
    sizes, strides = ([hint(size) for size in values] for values in (like.shape, like.stride()))
    with _disable_current_modes():
        sampled = torch.empty_like(torch.empty_strided(sizes, strides, device="meta")).stride()
    large = [axis for axis, size in enumerate(sizes) if size != 1]
    if [sampled[axis] for axis in large] == sorted((sampled[axis] for axis in large), reverse=True):
        return ()
    return tuple(sorted(range(len(sizes)), key=lambda axis: -sampled[axis]))


def lift_random_numbers(
    graph: torch.fx.Graph, symbols: SymbolTable, draws: Draws = Draws()
) -> dict[torch.fx.Node, RandomInput]:
    """Replaces every random operator of a graph by an input, in place.

    Args:
        graph: The graph.
        symbols: The symbolic sizes.
        draws: How to sample masks.

    Returns:
        The new placeholders and what to sample for each, in the order in which PyTorch samples.

    Raises:
        ExportError: If a random operator has no replacement.
    """
    lifter, handlers = Lifter(graph, symbols, draws), random_operators()
    for node in list(graph.nodes):
        if node.op != "call_function" or (draws.by_device and getattr(node.target, "namespace", "") == "aten"):
            continue
        if node.target in handlers:
            with lifter.replacing(node):
                handlers[node.target](lifter, node)
            # PyTorch regards random operators as having side effects, so dead code elimination would keep them.
            for user in [*node.users, node]:
                if not user.users:
                    graph.erase_node(user)
        elif draws_numbers(node):
            raise ExportError(
                f"the random operator {node.target} is not supported, only dropout, bernoulli, rand, randn, randint, "
                f"randperm, normal, uniform and exponential: {source_line(node)}"
            )
    graph.eliminate_dead_code()
    # A replacement may have other strides than the operator, so a view of the result may be impossible.
    for view in graph.find_nodes(op="call_function", target=aten.view.default) if lifter.inputs else ():
        view.target = aten.reshape.default
    return lifter.inputs
