"""Compiles a captured graph to loops with PyTorch's Inductor, ahead of time.

Inductor fuses what lies between matrix products, convolutions and attention into loops; products, convolutions and
attention stay calls of PyTorch's kernels. For a CPU the loops are C++, which it compiles to a shared library that needs
neither Inductor nor a compiler to run. For a GPU they are Triton's kernels, and Python source that launches them.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.decomposition
import torch._inductor.lowering
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from .....core.atomic import temporary_folder
from .....core.errors import ExportError
from .....engine.programs import Program
from .....engine.programs.collectives import COLLECTIVES
from .....engine.programs.loops import encode, encode_kernels, inductor_works_in
from .....engine.programs.operators import LIBRARY
from .....engine.programs.program import GETITEM, LOOPS, Order
from .....engine.programs.runner import deterministic_kernels
from .....engine.programs.strides import IGNORING_STRIDES
from ...fx.values import Node, arguments_of, call, is_integer, is_view, needed_for, tensors_of
from ...graph.divide import part_of

__all__ = ["LoopsEncoder", "as_kernels", "divide_for_loops"]

aten = torch.ops.aten
ort_ops = torch.ops.ort_trainer

_FOR_CPU: dict[str, Any] = {
    "compile_threads": 1,  # this may be a forked process, and it compiles two files
    # As many threads as PyTorch uses when the loops run. Compiled for one, loops would lack what makes several safe.
    "cpp.dynamic_threads": True,
    "cpp.threads": max(2, os.cpu_count() or 2),
    # What several loops read is computed once, as by operators; long expressions are slow to compute again.
    "realize_reads_threshold": 1,
    "realize_opcount_threshold": 8,
    # Convolutions stay in the memory order that the model gave them. Inductor would move all of them to channels-last,
    # with copies around: a ResNet-18 then takes 1.29 times as long.
    "layout_optimization": False,
}
_FOR_GPU: dict[str, Any] = {
    "fallback_random": True,  # operators that draw random numbers stay PyTorch's, and so do their masks
    "fx_graph_cache": False,  # the cache of exports keeps the result
    "layout_optimization": False,
}
# PyTorch's kernels for these are faster than the loops that Inductor writes; the sum of an embedding's gradients would
# also depend on how threads run. For the gradient of a convolution Inductor writes none.
_WHOLE = (
    aten.convolution_backward.default,
    aten.embedding_dense_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
)
# These read or write elements at places that are computed. Inductor may fuse them with the loop that makes what they
# read, or let that be overwritten, although an element needs others than its own: losses were off by a fifth.
_AT_PLACES = (
    aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_select.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
)
_WITH_SIZES = (torch.Tensor, torch.SymInt, torch.SymFloat, tuple, list)
# Names of arguments that say which elements an operator reads or writes.
_PLACES = ("index", "indices", "target")
# The values of their results are values of their first argument.
_COPIES = (
    aten._to_copy.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_select.default,
)
# Inductor has no loops for these in sizes that it does not know.
_OF_KNOWN_SIZES = (
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.nonzero.default,
)
# The memory order of an input may differ from the one in which the graph was captured.
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_CONTIGUOUS = {"memory_format": torch.contiguous_format}


def _require_compiler() -> None:
    """Checks that there is a C++ compiler.

    Raises:
        ExportError: If there is none.
    """
    chosen = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "cl" if os.name == "nt" else "g++")
    if shutil.which(chosen) is None:
        raise ExportError(
            f"utils.kernels is 'compiled', which needs a C++ compiler, but there is no {chosen!r}: install it (on "
            "Debian: apt install g++), set the environment variable CXX to another one, or set utils.kernels to 'auto'"
        )


def divide_for_loops(
    nodes: Sequence[Node], apart: Collection[Node], checked: Collection[Node], last: Collection[Node] = ()
) -> list[tuple[list[Node], bool]]:
    """Divides operators, in order, into programs; returns with each whether it is compiled. Masks come first.

    Args:
        nodes: The operators.
        apart: Those that are rarely needed; they come last, and are not worth compiling.
        checked: The inputs whose values are checked to be in range where they are indices.
        last: Operators after which a program ends.
    """
    compiled = {node: _can_be_compiled(node, checked) for node in nodes}
    # Look-ups by integers that the model computes can't be compiled; ahead of all loops, they don't divide them.
    lookups = [node for node in nodes if not compiled[node] and _indices(node) and _of_integers(node)]
    ahead = needed_for(lookups, sizes=True) | {node for node in nodes if _draws_masks(node)}
    ahead |= {node for node in nodes if node.target is operator.getitem and node.all_input_nodes[0] in ahead}
    first = [node for node in nodes if node in ahead]
    others = [node for node in nodes if node not in ahead]
    later = [node for node in others if node in apart]
    main = itertools.groupby((node for node in others if node not in apart), compiled.__getitem__)
    divided = [(first, False), *((list(group), of_loops) for of_loops, group in main), (later, False)]
    return [(part, of_loops) for group, of_loops in divided for part in _split_after(last, group)]


def _split_after(last: Collection[Node], nodes: Sequence[Node]) -> list[list[Node]]:
    """Divides operators after some of them; each result of several stays with its operator."""
    parts: list[list[Node]] = []
    ended = True
    for node in nodes:
        is_part = node.target is operator.getitem
        if ended and not (is_part and parts):
            parts.append([])
        parts[-1].append(node)
        ended = (node.all_input_nodes[0] if is_part else node) in last
    return parts


def _draws_masks(node: Node) -> bool:
    """Returns whether an operator samples a mask of dropout."""
    return node.target in (ort_ops.draw_unpacked.default, ort_ops.draw_unpacked.rate)


def _can_be_compiled(node: Node, checked: Collection[Node]) -> bool:
    """Returns whether Inductor can call an operator, for results of known sizes."""
    if node.target is operator.getitem:
        return _can_be_compiled(node.all_input_nodes[0], checked)
    if node.target in _OF_KNOWN_SIZES or (node.target in _AT_PLACES and node.all_input_nodes[0].op != "placeholder"):
        return False
    if _has_sizes_of_values(node):
        return False
    # A loop that finds an index out of range ends the process: threads can't raise errors.
    if node.target not in _WHOLE and not all(_values_of(index) in checked for index in _indices(node)):
        return False
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target.namespace not in (LIBRARY, COLLECTIVES) and "mkldnn_rnn" not in str(node.target)


def _has_sizes_of_values(node: Node) -> bool:
    """Returns whether an operator takes or returns a size that depends on values."""
    arguments = pytree.tree_leaves((node.args, node.kwargs))
    found = [node.meta["val"], *(part.meta.get("val") if isinstance(part, Node) else part for part in arguments)]
    return any(free_unbacked_symbols(value) for value in found if isinstance(value, _WITH_SIZES))


def _indices(node: Node) -> list[Node]:
    """Returns the integers that say which elements an operator reads or writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments = arguments_of(node)
    places = [value for name in _PLACES for value in _listed(arguments.get(name))]
    return [value for value in places if isinstance(value, Node) and is_integer(value)]


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _values_of(node: Node) -> Node:
    """Returns what a node has its values from, through views and copies."""
    while is_view(node) or node.target in _COPIES:
        node = node.all_input_nodes[0]
    return node


def _of_integers(node: Node) -> bool:
    """Returns whether an operator needs nothing computed but integers, flags and sizes."""
    needed = needed_for([node]) - {node}
    return not any(
        value.dtype.is_floating_point for other in needed if other.op != "placeholder" for value in tensors_of(other)
    )


class LoopsEncoder:
    """Writes a program that runs compiled loops; it takes the place of ``encode.Encoder``.

    Args:
        graph: The graph.
        sizes: Symbolic size -> an input and an axis that have it.
        orders: Value that is passed between programs -> its memory order.
        available: What the program may take: inputs of the graph, and results of other programs.

    Attributes:
        inputs: The nodes that the program takes.
        operators: The node that each of its steps computes; None for the loops, which compute many.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        sizes: Mapping[str, tuple[Node, int]],
        orders: Mapping[Node, Order],
        available: Iterable[Node],
    ) -> None:
        self._graph, self._orders, self._available = graph, orders, set(available)
        self._sources = {source for source, _ in sizes.values()}
        self.inputs: list[Node] = []
        self.operators: list[Node | None] = []

    def write(self, nodes: Sequence[Node], results: Sequence[Node]) -> Program:
        """Returns the program of some operators.

        Args:
            nodes: The operators.
            results: What the program returns: some of the operators, or views of them or of inputs.

        Raises:
            ExportError: If Inductor can't compile them.
        """
        within = needed_for(results, self._available, sizes=True)
        # Loops read sizes from their inputs, too.
        taken = self._sources | {node for node in self._available if any(user in within for user in node.users)}
        self.inputs = [node for node in self._graph.nodes if node in taken]
        part = part_of(self._graph, within, self.inputs, results)
        (end,) = part.module.graph.find_nodes(op="output")
        end.args = (tuple(map(_in_memory_of_its_own, end.args[0], map(self._orders.get, results))),)
        for node in part.module.graph.nodes:
            if node.target in _VIEWS:
                node.target = aten.reshape.default
        part.module.recompile()
        orders = [self._orders.get(node) for node in self.inputs]
        for node, order in zip(part.inputs.values(), orders, strict=True):
            node.meta["val"] = _laid_out(node.meta["val"], order)
        program = Program(inputs=orders, loops=_compiled(part.module))
        program.steps.append((LOOPS, [[{"x": index} for index in range(len(orders))]], {}))
        program.steps.extend((GETITEM, [{"v": 0}, index], {}) for index in range(len(results)))
        program.results.extend((index, self._orders.get(node)) for index, node in enumerate(results, 1))
        self.operators = [None, *results]
        return program


def _in_memory_of_its_own(node: Node, order: Order) -> Node:
    """Returns a result that is no view, in its memory order."""
    if not is_view(node) and node.op != "placeholder":
        return node
    (end,) = node.graph.find_nodes(op="output")
    with node.graph.inserting_before(end), node.meta["val"].fake_mode:
        return call(node.graph, aten.clone.default, node, **({} if order else _CONTIGUOUS))


def _laid_out(value: torch.Tensor, order: Order) -> torch.Tensor:
    """Returns a fake tensor as the program gets it: contiguous, unless it has an order in memory of its own."""
    with value.fake_mode:  # type: ignore[attr-defined]
        return value if order is not None else torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _compiled(module: torch.fx.GraphModule) -> str:
    """Returns a graph as loops, in the form of ``engine.programs.loops``."""
    sample = tuple(node.meta["val"] for node in module.graph.find_nodes(op="placeholder"))
    on_cpu = all(value.device.type == "cpu" for value in sample)
    if on_cpu:
        _require_compiler()
    with temporary_folder() as folder:
        try:
            with torch.no_grad(), _whole(_WHOLE), deterministic_kernels(), inductor_works_in(folder / "own"):
                return _as_library(module, sample, folder) if on_cpu else as_kernels(module, sample, folder / "own")
        except Exception as error:
            raise ExportError(
                f"Inductor can't compile the graph; set utils.kernels to 'auto': {' '.join(str(error).split())[:500]}"
            ) from error


def _as_library(module: torch.fx.GraphModule, sample: tuple[torch.Tensor, ...], folder: Path) -> str:
    """Returns a graph as machine code for the CPU."""
    library = folder / "loops.so"
    torch._inductor.aot_compile(module, sample, options={**_FOR_CPU, "aot_inductor.output_path": str(library)})
    operators = [path.read_text(encoding="utf-8") for path in folder.glob("*.wrapper.json")]
    return encode(library.read_bytes(), operators[0] if operators else "")


def as_kernels(module: torch.fx.GraphModule, sample: tuple[torch.Tensor, ...], folder: Path) -> str:
    """Returns a graph as source that launches kernels, in the form of ``engine.programs.loops``.

    Args:
        module: The graph.
        sample: Fake tensors as it gets them.
        folder: Where Inductor works.
    """
    sources: list[str] = []

    def compile_inner(*args: Any, **options: Any) -> Any:
        result: Any = compile_fx_inner(*args, **options)
        sources.append(result.source_code)
        return result

    compile_fx(module, sample, inner_compile=compile_inner, config_patches=_FOR_GPU)
    (source,) = sources
    device = next((value.device for value in sample if value.device.type != "cpu"), sample[0].device)
    return encode_kernels(source, folder, device)


@contextlib.contextmanager
def _whole(operators: Sequence[torch._ops.OpOverload]) -> Iterator[None]:
    """Lets Inductor call operators as they are, instead of taking them apart.

    It gives those that ignore strides tensors with the strides of the graph, and not with others that suit its loops.
    """
    table = torch._inductor.decomposition.decompositions
    packets = [getattr(aten, name.removeprefix("aten.")) for name in IGNORING_STRIDES if name.startswith("aten.")]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    strides = dict.fromkeys((*operators, *overloads), torch._inductor.lowering.constrain_to_fx_strides)
    constraints = mock.patch.dict(torch._inductor.lowering._maybe_layout_constraints, strides)
    lowerings = torch._inductor.lowering.lowerings
    with mock.patch.dict(table), mock.patch.dict(lowerings), mock.patch.dict(os.environ), constraints:
        os.environ.pop("CI", None)  # Inductor takes this to be a run of its own tests, which fail for such operators
        # From torch 2.13 on, Inductor fixes the sizes of the images whose gradient it calls a kernel for.
        lowerings.pop(aten.convolution_backward.default, None)
        for each in operators:
            table.pop(each, None)
        yield
