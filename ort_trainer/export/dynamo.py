"""``torch.compile(model, backend="ort_trainer")``: the graphs that TorchDynamo captures, as programs.

TorchDynamo captures the parts of a model between what it can't capture, and AOTAutograd differentiates them; both are
PyTorch's. Each graph becomes a model of programs, as everywhere here. Random numbers are drawn as PyTorch draws them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..core.dims import evaluate
from ..core.errors import ExportError, warn
from ..engine.programs.runner import ProgramRunner
from ..engine.torch_memory import TorchMemory, shaped
from ..fx.symbols import SymbolNames, hint
from ..fx.values import base_of, is_tensor, memory_order, needed_for
from ..fx.view_writes import refuse_sums_over_windows
from ..graph.differentiate import backward_without_autocast, lift_attributes
from ..graph.divide import part_of
from ..graph.named_graph import NamedGraph, add_sizes
from ..kernels.programs.build import ProgramBuilder
from ..kernels.programs.rewrites import rewrite
from ..operators.indexing import dense_embedding, dense_embedding_bag
from ..step import SIZES, Step, TensorSpec, dtype_name

Node = torch.fx.Node


def ort_trainer(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compiles a captured graph: the backend of ``torch.compile``.

    Args:
        module: The graph.
        inputs: Its inputs, fake or real.
    """
    from torch._dynamo.backends.common import aot_autograd  # takes a second

    compiled: Callable[..., Any]
    dense = mock.patch.multiple(torch, embedding=dense_embedding, embedding_bag=dense_embedding_bag)
    with dense, backward_without_autocast():
        compiled = aot_autograd(fw_compiler=_lowered_forward, bw_compiler=_lowered)(module, inputs)
    return compiled


def _lowered_forward(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """Lowers the graph of a forward pass, where a sum over windows is a change in place; elsewhere it is a gradient."""
    refuse_sums_over_windows(module.graph)
    return _lowered(module, inputs)


def _lowered(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """Returns a flat graph as a function of a list, which it empties.

    A graph with an operator that no program can run, such as one of another library, runs in PyTorch, with a warning.
    """
    try:
        with _disable_current_modes():  # the constants of the graph are real
            run = _Lowered(torch.fx.GraphModule(module, copy.deepcopy(module.graph))).run
    except ExportError as error:
        warn(f"torch.compile(backend='ort_trainer') lets PyTorch run a part of the model: {error}")
        run = functools.partial(_run_in_pytorch, module)

    def boxed(values: list[Any]) -> Sequence[Any]:
        return run(values)

    boxed._boxed_call = True  # type: ignore[attr-defined] # it takes a list, which it empties
    return boxed


def _run_in_pytorch(module: torch.fx.GraphModule, values: list[Any]) -> Sequence[Any]:
    results: Sequence[Any] = module(*values)
    values.clear()
    return results


class _Lowered:
    """A flat graph as programs.

    Args:
        module: The graph; it is consumed.

    Raises:
        ExportError: If no program can run an operator of it.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        graph = module.graph
        # TorchDynamo casts a number that has become an input by this operator, which is not one on tensors.
        for node in graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default):
            node.args, node.kwargs = node.args[:1], {"dtype": node.args[1]}
            node.target = torch.ops.aten._to_copy.default
        constants: dict[Node, torch.Tensor] = {}
        placeholders = graph.find_nodes(op="placeholder")
        lift_attributes(module, constants)
        inputs = [value for node in placeholders if isinstance(value := node.meta["val"], torch.Tensor)]
        devices = {value.device for value in inputs if value.dim() or value.device.type != "cpu"}
        if len(devices) > 1:
            raise ExportError(f"its tensors are on several devices: {sorted(map(str, devices))}")
        rewrite(graph, divided=True)
        (end,) = graph.find_nodes(op="output")
        returned = [node for node in end.args[0] if isinstance(node, Node) and is_tensor(node)]
        # Programs would copy inputs and views of them, such as transposed weights that are saved for the backward pass.
        views = list(dict.fromkeys(node for node in returned if base_of(node) in placeholders))
        self._views = part_of(graph, needed_for(views, sizes=True), placeholders, views).module if views else None
        tensors = dict.fromkeys(node for node in returned if node not in views)
        # Sizes that the graph takes as numbers; programs read them from the shape of a tensor.
        numbers = [at for at, node in enumerate(placeholders) if not is_tensor(node)]
        sizes_by_name = {f"size_{at}": placeholders[at].meta["val"] for at in numbers}
        names = {size.node.expr: name for name, size in sizes_by_name.items() if isinstance(size, torch.SymInt)}
        symbols = SymbolNames(
            {expression: name for expression, name in names.items() if expression.is_Symbol},
            {name: hint(size) for name, size in sizes_by_name.items()},
        )
        self._numbers = dict(zip(sizes_by_name, numbers, strict=True))
        self._taken = [at for at, node in enumerate(placeholders) if is_tensor(node)]
        named = [(placeholders[at], f"input_{at}") for at in self._taken]
        specs = [TensorSpec(name, dtype_name(node.meta["val"].dtype), None) for node, name in named]
        sizes: Mapping[str, tuple[Node, int]] = {}
        if numbers:
            source, sizes = add_sizes(graph, sizes_by_name)
            named.append((source, SIZES))
            specs.append(TensorSpec(SIZES, "float32", None))
        outputs = [(node, f"output_{at}") for at, node in enumerate(tensors)]
        lowered = NamedGraph(module, named, outputs, constants, symbols, sizes, ordered=list(tensors))
        programs = ProgramBuilder(lowered).build()
        step = Step(
            kind="forward",
            inputs=tuple(specs),
            outputs=tuple(TensorSpec(name, dtype_name(node.meta["val"].dtype), None) for node, name in outputs),
            loss="",
            state={},
            programs=programs,
        )
        memory = TorchMemory(next(iter(devices), torch.device("cpu")))
        self._runner = ProgramRunner(step, {}, memory, deterministic=False)
        orders = [memory_order(node.meta["val"]) for node in tensors]
        # Programs return tensors in their order in memory.
        self._turned = [(at, sorted(range(len(o)), key=o.__getitem__)) for at, o in enumerate(orders) if o is not None]
        places = {node: at for at, node in enumerate([*tensors, *views])}
        # Of each result: its place among the tensors; or a constant, or an expression over sizes.
        self._results = [(places.get(node), _plain(node, symbols)) for node in end.args[0]]

    def run(self, values: list[Any]) -> Sequence[Any]:
        """Returns the results of the graph."""
        sizes = {name: int(values[at]) for name, at in self._numbers.items()}
        tensors = [values[at] for at in self._taken]
        views = () if self._views is None else self._views(*values)
        values.clear()
        if sizes:
            tensors.append(shaped(sizes.values()))
        results = list(self._runner.call(tensors))
        for at, order in self._turned:
            results[at] = results[at].permute(order)
        results += views
        return [
            (evaluate(other, sizes) if isinstance(other, str) else other) if at is None else results[at]
            for at, other in self._results
        ]


def _plain(result: Any, symbols: SymbolNames) -> Any:
    """Returns a result that is not a tensor: a constant, or a size as an expression."""
    value = result.meta["val"] if isinstance(result, Node) else result
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None if isinstance(value, torch.Tensor) else value
    size = symbols.expression(value) if isinstance(value, torch.SymInt) else None
    if size is None:
        raise ExportError(f"a graph returns {value}, which is no size of its inputs")
    return size
