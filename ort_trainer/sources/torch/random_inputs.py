"""Takes random numbers out of the graph: every random operator becomes an input that the session draws.

ONNX Runtime's own random operators keep their state inside the runtime, where nothing can read or restore it, so a run
that is resumed would draw other numbers. Drawn outside, by a ``torch.Generator`` that belongs to the session and in
the order in which PyTorch itself would draw, they are reproducible from a seed, saved in a checkpoint, and the
dropout masks are the very ones that PyTorch draws for the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import ExportError
from ...graph import RandomInput
from .source_lines import source_line
from .symbols import SymbolTable, hint

__all__ = ["RANDOM_OPERATORS", "lift_random_numbers", "memory_order"]

aten = torch.ops.aten


class _Lifter:
    def __init__(self, graph: torch.fx.Graph, symbols: SymbolTable) -> None:
        self._graph = graph
        self._symbols = symbols
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
        name = f"random_{len(self.inputs)}"
        with self._graph.inserting_before(next(iter(self._graph.nodes))):
            placeholder = self._graph.placeholder(name)
        placeholder.meta["val"] = like.detach()
        self.inputs[placeholder] = RandomInput(name, kind, like.dtype, shape, parameters, memory_order(like))
        return placeholder

    def call(self, operator: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """Inserts an operator at the current place, with its fake result."""
        node = self._graph.call_function(operator, args, kwargs)
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
        drawn = torch.empty_like(torch.empty_strided(sizes, strides, device="meta")).stride()
    large = [axis for axis, size in enumerate(sizes) if size != 1]
    if [drawn[axis] for axis in large] == sorted((drawn[axis] for axis in large), reverse=True):
        return ()
    return tuple(sorted(range(len(sizes)), key=lambda axis: -drawn[axis]))


def _dropout(lifter: _Lifter, node: torch.fx.Node) -> None:
    """``native_dropout`` becomes a product with noise that is 0 or 1 / (1 - p): what PyTorch computes on the CPU."""
    value, probability, *train = cast("tuple[Any, ...]", node.args)
    keep = 1.0 - probability
    fake = value.meta["val"]
    factor = 1.0 / keep if keep > 0 else 0.0
    active = train[0] is not False if train else True
    noise = lifter.draw(node, fake, "bernoulli", (keep, factor)) if active and probability else None
    gets = {user.args[1]: user for user in node.users}
    with lifter._graph.inserting_before(node):
        if 0 in gets:
            result = lifter.call(aten.mul.Tensor, value, noise) if noise is not None else value
            gets[0].replace_all_uses_with(result)
        if 1 not in gets:
            return
        for user in list(gets[1].users):
            if user.target is aten.native_dropout_backward.default and noise is not None:
                with lifter._graph.inserting_before(user):
                    user.replace_all_uses_with(lifter.call(aten.mul.Tensor, user.args[0], noise))
        if gets[1].users:
            if noise is not None:
                mask_node = lifter.call(aten.ne.Scalar, noise, 0)
            else:
                mask_node = lifter.call(aten.ones_like.default, value, dtype=torch.bool)
            gets[1].replace_all_uses_with(mask_node)


def _replace(kind: str) -> Callable[[_Lifter, torch.fx.Node], None]:
    def handler(lifter: _Lifter, node: torch.fx.Node) -> None:
        node.replace_all_uses_with(lifter.draw(node, node.meta["val"], kind))

    return handler


def _bernoulli_p(lifter: _Lifter, node: torch.fx.Node) -> None:
    probability = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    # It stands for bernoulli_(), which fills the tensor that is there, and has lost the order of that one's dimensions.
    (filled,) = cast("tuple[torch.fx.Node]", node.args[:1])
    noise = lifter.draw(node, filled.meta["val"], "bernoulli", (float(probability), 1.0))  # type: ignore[arg-type]
    node.replace_all_uses_with(noise)


def _bernoulli(lifter: _Lifter, node: torch.fx.Node) -> None:
    """Probabilities that are themselves computed: 1 where a uniform number is below them."""
    (probability,) = node.args[:1]
    uniform = lifter.draw(node, node.meta["val"], "uniform")
    with lifter._graph.inserting_before(node):
        below = lifter.call(aten.lt.Tensor, uniform, probability)
        node.replace_all_uses_with(lifter.call(aten._to_copy.default, below, dtype=node.meta["val"].dtype))


def _integers(first: int) -> Callable[[_Lifter, torch.fx.Node], None]:
    """``first`` is the position of the first bound; a lone bound is the upper one."""

    def handler(lifter: _Lifter, node: torch.fx.Node) -> None:
        given = [bound for bound in node.args[first : first + 2] if not isinstance(bound, (list, tuple))]
        low, high = given if len(given) == 2 else (0, given[0])
        if not isinstance(low, int) or not isinstance(high, int):
            raise ExportError(
                f"{node.target} with bounds that are not plain numbers is not supported: {source_line(node)}"
            )
        node.replace_all_uses_with(lifter.draw(node, node.meta["val"], "integers", (float(low), float(high))))

    return handler


def _or_defaults(given: tuple[Any, ...], defaults: tuple[float, float]) -> tuple[Any, Any]:
    return (given[0] if given else defaults[0]), (given[1] if len(given) > 1 else defaults[1])


def _normal_functional(lifter: _Lifter, node: torch.fx.Node) -> None:
    mean, deviation = _or_defaults(node.args[1:3], (0.0, 1.0))
    _affine(lifter, node, "normal", deviation, mean)


def _uniform(lifter: _Lifter, node: torch.fx.Node) -> None:
    low, high = _or_defaults(node.args[1:3], (0.0, 1.0))
    _affine(lifter, node, "uniform", high - low, low)


def _normal_tensors(lifter: _Lifter, node: torch.fx.Node) -> None:
    mean, deviation = _or_defaults(node.args[:2], (0.0, 1.0))
    _affine(lifter, node, "normal", deviation, mean)


def _normal_numbers(lifter: _Lifter, node: torch.fx.Node) -> None:
    mean, deviation = node.args[:2]
    _affine(lifter, node, "normal", deviation, mean)


def _exponential(lifter: _Lifter, node: torch.fx.Node) -> None:
    rate = node.args[1] if len(node.args) > 1 else 1.0
    noise = lifter.draw(node, node.meta["val"], "exponential", (float(rate),))  # type: ignore[arg-type]
    node.replace_all_uses_with(noise)


def _affine(lifter: _Lifter, node: torch.fx.Node, kind: str, factor: Any, offset: Any) -> None:
    noise = lifter.draw(node, node.meta["val"], kind)
    with lifter._graph.inserting_before(node):
        scaled = lifter.call(aten.mul.Tensor, noise, factor)
        node.replace_all_uses_with(lifter.call(aten.add.Tensor, scaled, offset))


_HANDLERS: dict[Any, Callable[[_Lifter, torch.fx.Node], None]] = {
    aten.native_dropout.default: _dropout,
    aten.bernoulli.p: _bernoulli_p,
    aten.bernoulli.default: _bernoulli,
    aten.rand.default: _replace("uniform"),
    aten.rand_like.default: _replace("uniform"),
    aten.randn.default: _replace("normal"),
    aten.randn_like.default: _replace("normal"),
    aten.randint.default: _integers(0),
    aten.randint.low: _integers(0),
    aten.randint_like.default: _integers(1),
    aten.randint_like.low_dtype: _integers(1),
    aten.normal_functional.default: _normal_functional,
    aten.normal.Tensor_Tensor: _normal_tensors,
    aten.normal.Tensor_float: _normal_tensors,
    aten.normal.float_Tensor: _normal_tensors,
    aten.normal.float_float: _normal_numbers,
    aten.uniform.default: _uniform,
    aten.exponential.default: _exponential,
    aten.randperm.default: _replace("permutation"),
}
RANDOM_OPERATORS = tuple(_HANDLERS)


def lift_random_numbers(graph: torch.fx.Graph, symbols: SymbolTable) -> dict[torch.fx.Node, RandomInput]:
    """Replaces every random operator of a graph by an input, in place.

    Returns:
        The new placeholders and what must be drawn for each, in the order in which PyTorch draws.

    Raises:
        ExportError: If there is a random operator that has no such replacement.
    """
    lifter = _Lifter(graph, symbols)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _HANDLERS:
            # Where it comes from, by module and line, is true of its replacement too.
            lifter.origin = dict(node.meta)
            with _fake_mode_of(node):
                _HANDLERS[node.target](lifter, node)
            # A random operator has a side effect to PyTorch, so that dead code elimination would keep it.
            for user in [*node.users, node]:
                if not user.users:
                    graph.erase_node(user)
        elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ExportError(
                f"the random operator {node.target} is not supported; supported are dropout, bernoulli, rand, randn, "
                f"randint, randperm, normal, uniform and exponential: {source_line(node)}"
            )
    graph.eliminate_dead_code()
    # What replaces an operator may have other strides than it had, for which a view of its result was possible.
    for view in graph.find_nodes(op="call_function", target=aten.view.default) if lifter.inputs else ():
        view.target = aten.reshape.default
    return lifter.inputs


def _fake_mode_of(node: torch.fx.Node) -> Any:
    value = node.meta["val"]
    return (value[0] if isinstance(value, (tuple, list)) else value).fake_mode
