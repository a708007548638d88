"""Compiles graphs to loops with PyTorch's Inductor, ahead of time, several graphs at once.

Inductor fuses what lies between matrix products, convolutions and attention into loops; products, convolutions and
attention stay calls of PyTorch's kernels. For a CPU the loops are C++, which becomes a shared library: to run needs
neither Inductor nor a compiler. For a GPU they are Triton's kernels, and Python source that launches them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.decomposition
import torch._inductor.lowering
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.ir import TensorBox
from torch._inductor.mkldnn_ir import LinearBinary, LinearUnary
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx

from ...capture.isolation import can_isolate
from ...core.atomic import temporary_folder
from ...core.errors import ExportError
from ...core.forked import end, end_with_parent, forked
from ...engine.programs.loops import RUN, encode, encode_kernels, inductor_works_in
from ...engine.programs.program import GETITEM
from ...engine.programs.runner import deterministic_kernels
from ...engine.programs.strides import IGNORING_STRIDES
from ...fx.symbols import SymbolTable
from .compiler import missing_compiler
from .divide import WHOLE
from .launch import read_launch

aten = torch.ops.aten

Loops = dict[str, Any]

_ON_ALL: dict[str, Any] = {
    "fx_graph_cache": False,  # the cache of exports keeps the result
    # Inductor would compile headers of 300 MB into a folder that anybody may have created before.
    "cpp_cache_precompile_headers": False,
    # Convolutions stay in the memory order that the model gave them. Inductor would move all of them to channels-last,
    # with copies around: a ResNet-18 then takes 1.29 times as long.
    "layout_optimization": False,
}
_FOR_CPU: dict[str, Any] = {
    **_ON_ALL,
    "compile_threads": 1,  # this may be a forked process
    # As many threads as PyTorch uses when the loops run. Compiled for one, loops would lack what makes several safe.
    "cpp.dynamic_threads": True,
    "cpp.threads": max(2, os.cpu_count() or 2),
    # What several loops read is computed once, as by operators; long expressions are slow to compute again.
    "realize_reads_threshold": 1,
    "realize_opcount_threshold": 8,
}
_FOR_GPU: dict[str, Any] = {
    **_ON_ALL,
    "fallback_random": True,  # operators that draw random numbers stay PyTorch's, and so do their masks
}


def compiled(graphs: Mapping[str, torch.fx.GraphModule], symbols: SymbolTable) -> dict[str, Loops]:
    """Returns graphs as loops, by the same names: attributes of a ``Program``, whose results have no memory order yet.

    Args:
        graphs: The graphs, by any names.
        symbols: Their symbolic sizes, to which compiling may add conditions.

    Raises:
        ExportError: If Inductor can't compile one of them, or there is no compiler.
    """
    if not graphs:
        return {}
    samples = {
        name: tuple(node.meta["val"] for node in graph.graph.find_nodes(op="placeholder"))
        for name, graph in graphs.items()
    }
    on_cpu = all(value.device.type == "cpu" for sample in samples.values() for value in sample)
    if on_cpu and (reason := missing_compiler()):
        raise ExportError(reason)
    with temporary_folder() as folder:

        def work(names: Iterable[str]) -> dict[str, Loops]:
            with torch.no_grad(), _whole(WHOLE), deterministic_kernels():
                if not on_cpu:
                    return {name: as_kernels(graphs[name], samples[name], folder / name) for name in names}
                with mock.patch.object(AsyncCompile, "cpp_pybinding"):  # would compile each loop by itself, to run it
                    return {name: _as_functions(graphs[name], samples[name], folder / name) for name in names}

        try:
            if not on_cpu:
                return work([*graphs])
            # Whether the compiler knows the processor's instructions would take it five seconds to try.
            with inductor_works_in(folder / "own"), torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
                if not can_isolate():
                    return work([*graphs])
                pick_vec_isa()  # tries the compiler for what is left, once for all
                largest_first = sorted(graphs, key=lambda name: -len(graphs[name].graph.nodes))
                return _at_once(work, largest_first, symbols)
        except Exception as error:
            raise ExportError(
                f"Inductor can't compile the graph; set utils.kernels to 'auto': {' '.join(str(error).split())[:500]}"
            ) from error


def _at_once(
    work: Callable[[Iterable[str]], dict[str, Loops]], names: Sequence[str], symbols: SymbolTable
) -> dict[str, Loops]:
    """Returns the results of some work, by name, which child processes and this one do, each taking what is next."""
    reader, writer = os.pipe()
    os.write(writer, b"".join(number.to_bytes(2, "big") for number in range(len(names))))
    os.close(writer)

    def taken() -> Iterator[str]:
        while number := os.read(reader, 2):
            yield names[int.from_bytes(number, "big")]

    def answer(writer: int) -> None:
        end_with_parent()
        before, _ = symbols.guards()
        results = work(taken())
        conditions, frozen = symbols.guards()
        with os.fdopen(writer, "w", encoding="utf-8") as stream:
            json.dump([results, [text for text in conditions if text not in before], frozen], stream)

    with contextlib.ExitStack() as stack:
        stack.callback(os.close, reader)
        answers = []
        for _ in range(min(len(names), len(os.sched_getaffinity(0))) - 1):
            child, stream = forked(answer)
            stack.callback(end, child)
            answers.append(stack.enter_context(os.fdopen(stream, encoding="utf-8")))
        results = work(taken())
        for text in [stream.read() for stream in answers]:
            if text:
                compiled_there, conditions, frozen = json.loads(text)
                symbols.require(conditions, frozen)
                results |= compiled_there
        return results | work(name for name in names if name not in results)  # if a child failed, this raises its error


def _as_functions(module: torch.fx.GraphModule, sample: Sequence[torch.Tensor], folder: Path) -> Loops:
    """Returns a graph as steps that call functions of a library, and PyTorch's kernels."""
    folder.mkdir(exist_ok=True)  # from a process that failed
    launch = read_launch(_source(module, sample, _FOR_CPU))
    source = folder / "loops.cpp"
    source.write_text(launch.source, encoding="utf-8")
    builder = CppBuilder("loops", str(source), CppTorchOptions(pick_vec_isa()), str(folder))
    builder.build()
    loops = encode(Path(builder.get_target_file_path()).read_bytes(), launch.functions)
    return {"loops": loops, "symbols": launch.symbols, "steps": launch.steps, "results": launch.results}


def as_kernels(module: torch.fx.GraphModule, sample: Sequence[torch.Tensor], folder: Path) -> Loops:
    """Returns a graph as one step that launches its kernels, and PyTorch's.

    Args:
        module: The graph.
        sample: Fake tensors as it gets them.
        folder: Where Inductor works.
    """
    device = next((value.device for value in sample if value.device.type != "cpu"), sample[0].device)
    with inductor_works_in(folder):  # all of whose files are kept
        loops = encode_kernels(_source(module, sample, _FOR_GPU), folder, device)
    (end,) = module.graph.find_nodes(op="output")
    inputs, results = [{"x": index} for index in range(len(sample))], range(len(end.args[0]))
    steps: list[Any] = [(RUN, [inputs], {}), *((GETITEM, [{"v": 0}, index], {}) for index in results)]
    return {"loops": loops, "steps": steps, "results": [index + 1 for index in results]}


def _source(module: torch.fx.GraphModule, sample: Sequence[torch.Tensor], options: Mapping[str, Any]) -> str:
    """Returns the Python source with which Inductor computes a graph.

    The graph neither needs gradients nor writes to anything, so what Inductor's own entry does before takes a quarter
    of the time for nothing.
    """
    mode = detect_fake_mode([node.meta.get("val") for node in module.graph.nodes])
    assert mode is not None, "graphs of fake tensors only"
    with (
        torch._inductor.config.patch({**options}),
        enable_python_dispatcher(),
        tracing(TracingContext(mode)),
        V.set_fake_mode(mode),
    ):
        with mode:
            # A trace tells tensors apart by identity, and inputs that come from equal layers may be one object.
            own = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in sample]
            graph = make_fx(module, select_decomp_table())(*own)
        written = [node.target for node in graph.graph.nodes if _writes(node.target)]
        if written:
            raise ValueError(f"{written[0]} writes to a tensor")
        (end,) = graph.graph.find_nodes(op="output")
        end.meta["user_visible_output_idxs"] = range(len(end.args[0]))  # whose strides are kept
        result: Any = compile_fx_inner(graph, own, is_inference=True)
    source: str = result.source_code
    return source


def _writes(called: Any) -> bool:
    return isinstance(called, torch._ops.OpOverload) and called._schema.is_mutable


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
        # Inductor's own take constant weights only.
        lowerings[torch.ops.mkldnn._linear_pointwise.default] = functools.partial(_linear, LinearUnary, 1)
        lowerings[torch.ops.mkldnn._linear_pointwise.binary] = functools.partial(_linear, LinearBinary, 2)
        # From torch 2.13 on, Inductor fixes the sizes of the images whose gradient it calls a kernel for.
        lowerings.pop(aten.convolution_backward.default, None)
        for each in operators:
            table.pop(each, None)
        yield


def _linear(kind: Any, weight: int, *args: Any) -> Any:
    """Lets loops call oneDNN's linear layer. Unlike Inductor, it takes a transpose as weight without a copy.

    Args:
        kind: Inductor's class of the call.
        weight: Which argument is the weight.
        args: The arguments.
    """
    ready = [
        kind.require_contiguous(kind.realize_input(value))
        if isinstance(value, TensorBox) and place != weight
        else value
        for place, value in enumerate(args)
    ]
    with mock.patch.object(kind, "require_contiguous", kind.require_stride1):
        return TensorBox.create(kind.create(*ready))
