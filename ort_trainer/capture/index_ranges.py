"""Finds the operators of a captured step that use a batch input as indices, and the ranges that they allow."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.indices import STEPS, IndexRange
from ..fx.explain import source_line
from ..fx.symbols import SymbolTable
from ..fx.values import arguments_of, is_integer
from ..fx.view_writes import written
from ..options import ModelDescription
from .capture import Capture

Node = torch.fx.Node
Arguments = Mapping[str, Any]

# Operators that return a tensor's values unchanged, except for their dtype.
_COPIES = {"alias", "clone", "contiguous", "detach", "detach_", "lift_fresh_copy", "to", "_to_copy"}
# Those of STEPS that return only a part of the values.
_PARTS = {"narrow", "select", "slice"}
_WHOLE = (0, 2**63 - 1)


@dataclass(frozen=True)
class _Operand:
    """The values of an input as an operator sees them.

    Attributes:
        input: Name of the input.
        steps: The operators applied to it, with their arguments after the tensor.
        parts: The number of leading steps that determine which values are left.
    """

    input: str
    steps: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    parts: int = 0


def find_index_ranges(captured: Capture, description: ModelDescription) -> tuple[IndexRange, ...]:
    """Returns the ranges that the operators of a captured step allow for integer batch inputs used as indices.

    An input is followed through views, slices, constant padding and casts, but not through computations.

    Args:
        captured: The captured step.
        description: The description, for the names of inputs and outputs.
    """
    exported, inputs, outputs = captured.exported, description.input_names, description.output_names
    shapes = [fake.shape for fake in captured.inputs]
    symbols = SymbolTable(captured.fake_mode.shape_env, description.inputs, shapes, captured.least)
    signature = exported.graph_signature
    names = dict(zip(signature.user_inputs, inputs, strict=True))
    operands = {
        node: _Operand(names[node.name])
        for node in exported.graph.find_nodes(op="placeholder")
        if node.name in names and is_integer(node)
    }
    results = list(zip(signature.user_outputs, outputs, strict=False))  # without what is left, and conditions
    changed: set[str] = set()
    ranges = list(_ranges(exported.graph, operands, symbols, lambda node: _dependent(node, results), changed))
    return tuple(dict.fromkeys(entry for entry in ranges if entry.input not in changed))


def _ranges(
    graph: torch.fx.Graph,
    operands: dict[Node, _Operand],
    symbols: SymbolTable,
    dependent: Callable[[Node], tuple[str, ...]],
    changed: set[str],
) -> Iterator[IndexRange]:
    """Yields the ranges of one graph; adds inputs that it changes in place to ``changed``: their values are unknown."""
    views: dict[Node, str] = {}  # views that are not followed, such as parts from split() -> the input
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        origin = _origin(node.args[0], operands, views) if node.args else None
        if origin is not None and _shares_memory(node):
            views[node] = origin
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            inner = _inner(node, operands)
            if inner is not None:
                outputs = dependent(node)
                yield from _ranges(*inner, symbols, lambda _, outputs=outputs: outputs, changed)  # type: ignore[misc]
        elif isinstance(node.target, torch._ops.OpOverload):
            changed |= {name for value in written(node) if (name := _origin(value, operands, views))}
            handed_on = _handed_on(node, operands, symbols)
            if handed_on is not None:
                operands[node] = handed_on
            for index, size, rest in _uses(node):
                operand = operands.get(index) if isinstance(index, Node) else None
                number = symbols.expression(size)
                if operand is not None and number is not None:
                    yield IndexRange(
                        operand.input,
                        number,
                        operator=_name(node),
                        source=source_line(node),
                        outputs=dependent(node),
                        steps=operand.steps[: operand.parts],
                        **rest,
                    )


def _origin(node: Any, operands: Mapping[Node, _Operand], views: Mapping[Node, str]) -> str | None:
    """Returns the input that a node holds values of, or is a view or copy of; None if there is none."""
    if not isinstance(node, Node):
        return None
    return operands[node].input if node in operands else views.get(node)


def _shares_memory(node: Node) -> bool:
    """Returns whether a result may be a view of an operator's first argument."""
    if isinstance(node.target, torch._ops.OpOverload):
        return any(result.alias_info is not None for result in node.target._schema.returns)
    return node.target is operator.getitem


def _uses(node: Node) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Yields the indices of an operator: the value, the size of the indexed dimension, and further allowed values."""
    name, arguments = _name(node), arguments_of(node)
    if name in ("embedding", "embedding_bag", "_embedding_bag"):
        yield arguments["indices"], _shape(arguments["weight"])[0], {}
    elif name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"):
        shape = _shape(arguments["self"])
        yield arguments["target"], shape[1 if len(shape) > 1 else 0], {"ignored": arguments["ignore_index"]}
    elif name == "multi_margin_loss":
        yield arguments["target"], _shape(arguments["self"])[-1], {}
    elif name == "one_hot" and arguments["num_classes"] > 0:
        yield arguments["self"], arguments["num_classes"], {}
    elif name in ("gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add", "index_copy"):
        yield arguments["index"], _axis(arguments["self"], arguments["dim"]), {}
    elif name == "index_fill":
        yield arguments["index"], _axis(arguments["self"], arguments["dim"]), {"from_end": True}
    elif name in ("index", "index_put"):
        yield from _indexed_axes(arguments)


def _indexed_axes(arguments: Arguments) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Yields the indices of ``tensor[indices]``: one value per axis; a mask covers as many axes as it has."""
    axis, shape = 0, _shape(arguments["self"])
    for index in arguments["indices"]:
        if index is not None and index.meta["val"].dtype == torch.bool:
            axis += index.meta["val"].dim()
            continue
        if index is not None:
            yield index, shape[axis], {"from_end": True}
        axis += 1


def _handed_on(node: Node, operands: Mapping[Node, _Operand], symbols: SymbolTable) -> _Operand | None:
    """Returns the operand after an operator that passes values on unchanged; None after any other operator."""
    operand = operands.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
    if operand is None or not is_integer(node):
        return None
    name, settings = _name(node), list(arguments_of(node).values())[1:]
    if name in _COPIES:
        return operand if node.meta["val"].dtype in (_type_before(node), torch.int32, torch.int64) else None
    part = name in _PARTS
    if name in ("pad", "constant_pad_nd"):
        if name == "pad" and settings[1] != "constant":
            return None
        # core/indices.py applies the steps to the positions of elements; -1 says that padding has none.
        name, settings, part = "constant_pad_nd", [settings[0], -1], True
    elif name == "slice" and (settings[1] or 0, settings[2], settings[3]) == (*_WHOLE, 1):
        return operand
    elif name not in STEPS:
        return None
    arguments = _numbers(settings, symbols)
    if arguments is None:
        return None
    steps = (*operand.steps, (name, arguments))
    return _Operand(operand.input, steps, len(steps) if part else operand.parts)


def _type_before(node: Node) -> torch.dtype:
    """Returns the dtype of an operator's first argument."""
    dtype: torch.dtype = node.args[0].meta["val"].dtype  # type: ignore[union-attr]
    return dtype


def _numbers(arguments: Sequence[Any], symbols: SymbolTable) -> tuple[Any, ...] | None:
    """Returns arguments with expressions for symbolic sizes; None if one has no expression."""
    numbers: list[Any] = []
    for value in arguments:
        if isinstance(value, (list, tuple)):
            entry: Any = _numbers(value, symbols)
        elif value is None or isinstance(value, (bool, float, str)):
            numbers.append(value)
            continue
        else:
            size = value.meta.get("val") if isinstance(value, Node) else value
            entry = symbols.expression(size) if isinstance(size, (int, torch.SymInt)) else None
        if entry is None:
            return None
        numbers.append(entry)
    return tuple(numbers)


def _inner(node: Node, operands: Mapping[Node, _Operand]) -> tuple[torch.fx.Graph, dict[Node, _Operand]] | None:
    """Returns the graph of a block under ``torch.no_grad()`` or ``torch.autocast()``, and the operands in it."""
    module = node.graph.owning_module
    for place, value in enumerate(node.args):
        part = getattr(module, str(value.target), None) if isinstance(value, Node) and value.op == "get_attr" else None
        if isinstance(part, torch.fx.GraphModule):
            inputs = part.graph.find_nodes(op="placeholder")
            passed = node.args[place + 1 :]
            if len(inputs) != len(passed):
                return None
            return part.graph, {
                inside: operands[outside]
                for inside, outside in zip(inputs, passed, strict=True)
                if isinstance(outside, Node) and outside in operands
            }
    return None


def _dependent(node: Node, results: Sequence[tuple[Any, str]]) -> tuple[str, ...]:
    """Returns the names of the described outputs that depend on an operator."""
    seen, waiting = {node}, [node]
    while waiting:
        last = waiting.pop()
        new = {*last.users, *written(last)} - seen
        seen |= new
        waiting += new
    names = {node.name for node in seen}
    return tuple(name for node_name, name in results if node_name in names)


def _name(node: Node) -> str:
    return node.target._opname.rstrip("_") if isinstance(node.target, torch._ops.OpOverload) else ""


def _shape(node: Any) -> Sequence[Any]:
    return node.meta["val"].shape  # type: ignore[no-any-return]


def _axis(node: Any, axis: int) -> Any:
    shape = _shape(node)
    return shape[axis] if len(shape) else 1


def reads_values(node: Node) -> bool:
    """Returns whether a node depends on the values of an input, a parameter or a constant, not only on sizes."""
    seen: set[Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current.op in ("placeholder", "get_attr"):
            return True
        if current not in seen:
            seen.add(current)
            # What comes from a size comes from no value.
            waiting += [
                source for source in current.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)
            ]
    return False
