"""torch.onnx's translator from ATen operators to ONNX: only this file imports it.

The public ``torch.onnx.export`` decomposes the whole program a second time before translating it, which takes longer
than the rest of an export. The graphs here are decomposed already, so they are passed directly to its translation
step. That step is private: another reason for the upper bound on the torch version.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

import onnx_ir as ir
import torch
from onnxscript.values import TracedOnnxFunction
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.onnx._internal.exporter import _core, _fx_passes, _registration
from torch.utils import _pytree as pytree

from ...core.errors import ExportError
from .borrow import quiet
from .explain import way_out
from .operators.registry import Operator, revision, translations
from .source_lines import source_line
from .zero_dimensional import lift_zero_dimensional

__all__ = ["has_translation", "translate"]


@functools.cache
def _torchlib() -> _registration.ONNXRegistry:
    # The registry reads the domain of each of its 500 functions, which would parse their sources.
    with quiet(), mock.patch.object(TracedOnnxFunction, "function_ir", SimpleNamespace(domain="")):
        return _registration.ONNXRegistry.from_torchlib()


@functools.lru_cache(maxsize=1)
def _registry(revision: int) -> _registration.ONNXRegistry:
    """Returns torch.onnx's translations; those of our table take precedence."""
    registry = _registration.ONNXRegistry()
    registry.functions = {target: [*known] for target, known in _torchlib().functions.items()}
    for operator, function in translations().items():
        if function is not None:
            registry.register_op(operator, function)
    return registry


def has_translation(operator: Operator) -> bool:
    """Returns whether an operator has a translation."""
    if translations().get(operator, operator) is None:
        return False
    return bool(_registry(revision()).is_registered(operator))


def translate(module: torch.fx.GraphModule, results: Sequence[torch.fx.Node]) -> ir.Model:
    """Translates a flat graph of ATen operators into an ONNX model.

    Args:
        module: The graph; changed in place: its results become ``results``.
        results: The nodes that become the model's outputs, in order.

    Returns:
        A model whose inputs are the placeholders and whose outputs are the results, both in order.

    Raises:
        ExportError: If an operator has no translation; names the operator and the line of the user's code.
    """
    graph = module.graph
    (end,) = graph.find_nodes(op="output")
    end.args = (tuple(results),)
    graph.set_codegen(torch.fx.graph.CodeGen())  # the captured calling convention is gone: inputs and results are flat
    graph.eliminate_dead_code()
    _refuse_unknown_operators(graph)
    _tensors_for_scalars(graph)
    lift_zero_dimensional(graph)
    placeholders = graph.find_nodes(op="placeholder")
    with quiet():
        try:
            _fx_passes.insert_type_promotion_nodes(module)
        except Exception as error:
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ExportError(f"the graph can't be translated to ONNX: {what}") from error
        module.recompile()
        results = list(end.args[0])  # type promotion adds a cast after a reduction, which may be a result
        call = ModuleCallSignature(
            inputs=[],
            outputs=[],
            in_spec=pytree.tree_flatten((tuple(placeholders), {}))[1],
            out_spec=pytree.tree_flatten(tuple(results))[1],
        )
        program = torch.export.ExportedProgram(
            root=module,
            graph=graph,
            graph_signature=ExportGraphSignature(
                [InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None) for node in placeholders],
                [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in results],
            ),
            state_dict={},
            range_constraints={},
            module_call_graph=[ModuleCallEntry("", call)],
        )
        try:
            return _core._exported_program_to_onnx_program(program, registry=_registry(revision())).model
        except Exception as error:
            raise ExportError(_explain(error, module.graph)) from error


def _explain(error: Exception, graph: torch.fx.Graph) -> str:
    """Returns the operator that could not be translated, and its line in the user's code."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and value.is_complex():
            return (
                f"the graph can't be translated to ONNX: {node.target} gives complex numbers, which ONNX lacks; "
                f"compute with their real and imaginary parts: {source_line(node)}"
            )
    found = re.search(r"translating node %(\w+)", str(error))
    for node in graph.nodes:
        if found is not None and node.name == found[1]:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            why = f"{type(cause).__name__}: {cause}".partition("\n")[0]
            where = f"{source_line(node)}\n{way_out([node])}"
            return f"the graph can't be translated to ONNX: {node.target} failed ({why}): {where}"
    return f"the graph can't be translated to ONNX: {type(error).__name__}: {error}: {error.__cause__}"


def _refuse_unknown_operators(graph: torch.fx.Graph) -> None:
    unknown: dict[str, torch.fx.Node] = {}
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OperatorBase) and not has_translation(node.target):
            unknown.setdefault(str(node.target), node)
    if unknown:
        lines = [f"{operator} has no ONNX translation: {source_line(node)}" for operator, node in unknown.items()]
        lines = ["the graph can't be translated to ONNX:", *lines]
        raise ExportError("\n  ".join(lines) + "\n" + way_out(unknown.values()))


def _tensors_for_scalars(graph: torch.fx.Graph) -> None:
    """Makes the first operand of ``1.0 - x`` a tensor, where PyTorch also accepts a number."""
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or not node.args:
            continue
        argument, value = node.target._schema.arguments[0], node.args[0]
        if isinstance(argument.type, torch.TensorType) and isinstance(value, (int, float)):
            # A zero-dimensional tensor is promoted like a number; float64 keeps the value from being rounded to fp32.
            is_double = isinstance(value, float) and getattr(node.meta["val"], "dtype", None) == torch.float64
            dtype = torch.float64 if is_double else torch.tensor(value).dtype
            with graph.inserting_before(node):
                tensor = graph.call_function(torch.ops.aten.scalar_tensor.default, (value,), {"dtype": dtype})
            tensor.meta["val"] = node.meta["val"].new_full((), value, dtype=dtype)
            node.update_arg(0, tensor)
