"""Takes random numbers out of the graph: every random operator becomes an input that the session draws.

ONNX Runtime's own random operators keep their state inside the runtime, where nothing can read or restore it, so a run
that is resumed would sample other numbers. Sampled outside, by a ``torch.Generator`` that belongs to the session and in
the order in which PyTorch itself would draw, they are reproducible from a seed and saved in a checkpoint. Dropout masks
are the very ones that PyTorch draws for the same seed, or drawn faster (:class:`Draws`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import ExportError
from ...graph import Dim, RandomInput
from .operators.registry import random_operators
from .source_lines import source_line
from .symbols import SymbolTable, hint

__all__ = ["Draws", "Lifter", "lift_random_numbers", "memory_order"]

aten = torch.ops.aten
# It counts as random because of a dropout that only other devices have.
_DRAWS_NOTHING = (aten._scaled_dot_product_flash_attention_for_cpu.default,)


@dataclass(frozen=True)
class Draws:
    """How the masks of dropout are drawn.

    Attributes:
        fast: Whether by 16-bit numbers, or by PyTorch's own.
        within: Whether within the graph, at the moment when they are needed, from a key that is an input. Otherwise
            they are inputs themselves.
    """

    fast: bool = False
    within: bool = False


class Lifter:
    """Puts inputs into a graph, and what computes the result of a random operator from them.

    Args:
        graph: The graph.
        symbols: The symbolic sizes.
        draws: How masks are drawn.

    Attributes:
        graph: The graph.
        inputs: The new placeholders, and what must be sampled for each.
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
        self, node: torch.fx.Node, like: torch.Tensor, kind: str, parameters: tuple[float, ...] = ()
    ) -> torch.fx.Node:
        """Returns a new placeholder of the shape and dtype of ``like``."""
        shape = self._symbols.shape(like)
        if shape is None:
            raise ExportError(
                f"{node.target} draws a number of random values that depends on the values of the batch, which is not "
                f"supported: {source_line(node)}"
            )
        order = () if kind == "mask" else memory_order(like)
        return self._input(kind, like.detach(), shape, parameters, order)

    def key(self) -> torch.fx.Node:
        """Returns the placeholder of the key that masks are drawn from within the graph, a whole number."""
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
        self.inputs[placeholder] = RandomInput(name, kind, fake.dtype, shape, parameters, order)
        return placeholder

    @contextlib.contextmanager
    def replacing(self, node: torch.fx.Node) -> Iterator[None]:
        """Gives what is inserted the origin and the fake mode of the operator that it replaces."""
        # Where it comes from, by module and line, is true of its replacement too.
        self.origin = dict(node.meta)
        value = node.meta["val"]
        self._fake_mode = (value[0] if isinstance(value, (tuple, list)) else value).fake_mode
        shapes = self._fake_mode.shape_env
        # What takes the operator's place works for every size that the operator does: no condition is added.
        with self._fake_mode, contextlib.nullcontext() if shapes is None else shapes.suppress_guards():
            yield

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """Inserts an operator at the current place, with its fake result."""
        node = self.graph.call_function(operator, args, kwargs)
        node.meta.update(self.origin)
        fakes = torch.fx.map_arg(args, lambda n: n.meta["val"]), torch.fx.map_arg(kwargs, lambda n: n.meta["val"])
        node.meta["val"] = operator(*fakes[0], **fakes[1])
        return node


def memory_order(like: torch.Tensor) -> tuple[int, ...]:
    """Returns the dimensions in the order of ``empty_like``'s strides; nothing where that is their own order.

    The sizes are those of the sample: a comparison of symbolic ones would bind the graph to them.
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
        draws: How masks are drawn.

    Returns:
        The new placeholders and what must be sampled for each, in the order in which PyTorch samples.

    Raises:
        ExportError: If there is a random operator that has no such replacement.
    """
    lifter, handlers = Lifter(graph, symbols, draws), random_operators()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in handlers:
            with lifter.replacing(node):
                handlers[node.target](lifter, node)
            # A random operator has a side effect to PyTorch, so that dead code elimination would keep it.
            for user in [*node.users, node]:
                if not user.users:
                    graph.erase_node(user)
        elif (
            torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and node.target not in _DRAWS_NOTHING
        ):
            raise ExportError(
                f"the random operator {node.target} is not supported; supported are dropout, bernoulli, rand, randn, "
                f"randint, randperm, normal, uniform and exponential: {source_line(node)}"
            )
    graph.eliminate_dead_code()
    # What replaces an operator may have other strides than it had, for which a view of its result was possible.
    for view in graph.find_nodes(op="call_function", target=aten.view.default) if lifter.inputs else ():
        view.target = aten.reshape.default
    return lifter.inputs
