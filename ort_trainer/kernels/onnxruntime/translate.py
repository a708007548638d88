"""Translates a flat graph to ONNX with torch.onnx's translator: only this file imports it.

The public ``torch.onnx.export`` decomposes the whole program a second time before translating it, which takes longer
than the rest of an export. The graphs here are decomposed already, so they are passed directly to its translation
step. That step is private: another reason to test each version of torch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch
from onnxscript.values import TracedOnnxFunction
from torch._decomp import core_aten_decompositions
from torch._decomp import decomposition_table as all_decompositions
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx.node import map_arg
from torch.onnx._internal.exporter import _core, _fx_passes, _registration
from torch.utils import _pytree as pytree

from ...capture.borrow import quiet
from ...core.errors import ExportError
from ...engine.fit_to_kernels import CastBeforeTransposePass, FitToKernelsPass, WidenInterfacePass
from ...fx.explain import line_of_trace, source_line, way_out
from ...fx.operator_table import Operator, decompositions, revision, translations
from ...fx.values import arguments_of
from ...step.names import Names
from ...step.opset import newer
from ...step.simplify import SimplifyPass
from .execution_order import lower_after
from .numbers import compute_numbers_in_doubles

aten = torch.ops.aten
Named = Sequence[tuple[torch.fx.Node, str]]
# In these, dim has another meaning.
_VIEWS = {aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default}
# Makes a number, or one computed from sizes, a tensor.
_NUMBER = aten.scalar_tensor.default


@functools.cache
def _torchlib() -> _registration.ONNXRegistry:
    # The registry reads the domain of each of its 500 functions, which would parse their sources.
    with quiet(), mock.patch.object(TracedOnnxFunction, "function_ir", SimpleNamespace(domain="")):
        return _registration.ONNXRegistry.from_torchlib()


@functools.lru_cache(maxsize=1)
def _registry(revision: int) -> _registration.ONNXRegistry:
    """Returns torch.onnx's translations; those of our table take precedence."""
    registry = _registration.ONNXRegistry()
    registry.functions = {target: [*functions] for target, functions in _torchlib().functions.items()}
    for operator, function in translations().items():
        if function is not None:
            registry.register_op(operator, function)
    return registry


def _has_translation(operator: Operator) -> bool:
    """Returns whether an operator has a translation."""
    if translations().get(operator, operator) is None:
        return False
    return bool(_registry(revision()).is_registered(operator))


def decomposition_table() -> dict[Operator, Callable[..., Any]]:
    """Returns operator -> decomposition.

    The table is PyTorch's core table plus all operators that torch.onnx does not know. (torch.onnx itself decomposes
    only the latter. It keeps composite operators and translates some of them incorrectly, for example an
    ``_unsafe_index_put`` that accumulates.) Entries of the package's own operator table take precedence.
    """
    return _decomposition_table(revision())


@functools.lru_cache(maxsize=1)
def _decomposition_table(revision: int) -> dict[Operator, Callable[..., Any]]:
    table: dict[Operator, Callable[..., Any]] = dict(core_aten_decompositions())
    for operator, decomposition in all_decompositions.items():
        if operator not in table and hasattr(operator, "_schema") and not _has_translation(operator):
            table[operator] = decomposition
    for operator, replacement in decompositions().items():
        if replacement is not None:
            table[operator] = replacement
        else:
            table.pop(operator, None)
    return table


def to_onnx(
    module: torch.fx.GraphModule,
    inputs: Named,
    results: Named,
    constants: Mapping[torch.fx.Node, torch.Tensor],
    opset: int,
    thoroughly: bool,
    stage: Callable[[str], None],
) -> tuple[ir.Model, dict[str, list[torch.fx.Node | None]]]:
    """Translates a captured graph to a model that the installed engine has kernels for.

    Args:
        module: The graph; it is consumed.
        inputs: Placeholders with the names of the model's inputs, in order. A placeholder in neither ``inputs`` nor
            ``constants`` must have no users.
        results: Nodes with the names of the model's outputs, in order.
        constants: Placeholders that become constants of the model.
        opset: ONNX operator set.
        thoroughly: Whether to simplify the model.
        stage: Called with the name of each stage when it begins.

    Returns:
        The model, and the name of each of its nodes with the operator that it is a part of; None for an unknown one.

    Raises:
        ExportError: If an operator has no translation, or the engine has no kernel for it.
    """
    crossing = next((node for node, _ in (*inputs, *results) if _is_complex(node)), None)
    if crossing is not None:  # such as what the backward pass of a Fourier transform needs of the forward pass
        raise ExportError(_complex_numbers(crossing))
    stage("translate")
    placeholders = module.graph.find_nodes(op="placeholder")
    model = _translate(module, [node for node, _ in results])
    operators = {node.name: str(node.meta.get("original_aten", node.target)) for node in module.graph.nodes}
    values = dict(zip(placeholders, model.graph.inputs, strict=True))
    model.graph.inputs.clear()
    model.graph.inputs.extend(values[node] for node, _ in inputs)
    for node, tensor in constants.items():
        if values[node].uses() or values[node].is_graph_output():
            values[node].const_value = ir.tensor(tensor.detach().cpu().contiguous(), name=values[node].name)
            model.graph.register_initializer(values[node])
    # One value can be two results, or an input and a result, but ONNX requires separate values.
    common_passes.OutputFixPass()(model)
    stage("simplify")
    SimplifyPass(thoroughly)(model)
    lower_after(model)
    newer(model, opset)
    _forget_idle_transpositions(model)
    _transpose_within_products(model)
    _name_nodes(model, operators)
    _rename(model, [name for _, name in inputs], [name for _, name in results])
    WidenInterfacePass()(model)
    _fit(model, results[0][0].meta["val"].device.type)
    CastBeforeTransposePass()(model)
    operator_of = _operators(model, module.graph)
    for onnx_node in model.graph.all_nodes():
        onnx_node.metadata_props.clear()
        onnx_node.meta.clear()  # torch.onnx keeps the whole captured graph alive here
    model.graph.metadata_props.clear()
    return model, operator_of


def _translate(module: torch.fx.GraphModule, results: Sequence[torch.fx.Node]) -> ir.Model:
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
    _lift_zero_dimensional(graph)
    placeholders = graph.find_nodes(op="placeholder")
    with quiet():
        try:
            _fx_passes.insert_type_promotion_nodes(module)
        except Exception as error:
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ExportError(f"the graph can't be translated to ONNX: {what}") from error
        compute_numbers_in_doubles(graph)  # last, as operators that take numbers accept no tensors in PyTorch
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


def _is_complex(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def _complex_numbers(node: torch.fx.Node) -> str:
    return (
        f"the graph can't be translated to ONNX: {node.target} gives complex numbers, which ONNX lacks; "
        f"compute with their real and imaginary parts: {source_line(node)}"
    )


def _explain(error: Exception, graph: torch.fx.Graph) -> str:
    """Returns the operator that could not be translated, and its line in the user's code."""
    for node in graph.nodes:
        if node.op == "call_function" and _is_complex(node):
            return _complex_numbers(node)
    match = re.search(r"translating node %(\w+)", str(error))
    for node in graph.nodes:
        if match is not None and node.name == match[1]:
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
        if isinstance(node.target, torch._ops.OperatorBase) and not _has_translation(node.target):
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
                tensor = graph.call_function(_NUMBER, (value,), {"dtype": dtype})
            tensor.meta["val"] = node.meta["val"].new_full((), value, dtype=dtype)
            node.update_arg(0, tensor)


def _lift_zero_dimensional(graph: torch.fx.Graph) -> None:
    """Passes one-element vectors to operators with a dim on zero-dimensional tensors, which ONNX rejects.

    PyTorch treats these tensors as one-element vectors. The dimension is removed from the results.
    """
    for node in list(graph.nodes):
        if _has_dimension(node) and _is_number(node.args[0]):
            _lift(graph, node)


def _has_dimension(node: torch.fx.Node) -> bool:
    """Returns whether an operator works along a dimension that an argument chooses."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args or node.target in _VIEWS:
        return False
    arguments = arguments_of(node)
    # No dims mean all dimensions: no need to lift.
    return any(arguments.get(name) not in (None, []) for name in ("dim", "dims"))


def _is_number(value: object) -> bool:
    return (
        isinstance(value, torch.fx.Node)
        and isinstance(value.meta.get("val"), torch.Tensor)
        and value.meta["val"].dim() == 0
    )


def _lift(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Gives an operator one-element vectors, and removes the dimension from its results."""
    with graph.inserting_before(node):
        for place, argument in enumerate(node.args):
            if _is_number(argument):
                assert isinstance(argument, torch.fx.Node)
                lifted = graph.call_function(aten.unsqueeze.default, (argument, 0))
                lifted.meta["val"] = argument.meta["val"].unsqueeze(0)
                node.update_arg(place, lifted)
    shown = node.target(*map_arg(node.args, _fake), **map_arg(node.kwargs, _fake))  # type: ignore[operator]
    if isinstance(shown, torch.Tensor):
        _drop_dimension(graph, node, shown)
        return
    node.meta["val"] = type(node.meta["val"])(shown)
    for user in list(node.users):
        _drop_dimension(graph, user, shown[user.args[1]])


def _fake(node: torch.fx.Node) -> Any:
    return node.meta["val"]


def _drop_dimension(graph: torch.fx.Graph, result: torch.fx.Node, shown: torch.Tensor) -> None:
    """Removes the dimension from a result, unless the operator has removed it."""
    if result.meta["val"].dim() == shown.dim():
        return
    users = list(result.users)
    with graph.inserting_after(result):
        dropped = graph.call_function(aten.squeeze.dim, (result, 0))
    dropped.meta.update(result.meta)
    result.meta["val"] = shown
    for user in users:
        user.replace_input_with(result, dropped)


def _forget_idle_transpositions(model: ir.Model) -> None:
    """Turns transpositions that keep the order of all axes into identities, also where nothing else is simplified.

    The ``GemmTransposeFusion`` of ONNX Runtime 1.19 transposes a Gemm's operand or result for every ``Transpose`` of
    two axes, whatever its ``perm``.
    """
    for node in model.graph.all_nodes():
        order = node.attributes.get_ints("perm", (1, 0)) if node.op_type == "Transpose" else (1, 0)
        if list(order) == sorted(order):
            node.op_type = "Identity"
            node.attributes.clear()


def _transpose_within_products(model: ir.Model) -> None:
    """Lets a Gemm transpose its operand itself, where the transposition is also a result.

    ONNX Runtime (1.19 to 1.31) would do so, too, and lose the result: its ``GemmTransposeFusion`` asks how many nodes
    read a transposition, but not whether it is an output of the graph.
    """
    for value in model.graph.outputs:
        transposition = value.producer()
        if transposition is None or transposition.op_type != "Transpose":
            continue
        if list(transposition.attributes.get_ints("perm", (1, 0))) != [1, 0]:
            continue
        for product, place in list(value.uses()):
            if product.op_type == "Gemm" and place < 2:
                flag = ("transA", "transB")[place]
                product.attributes[flag] = ir.AttrInt64(flag, 1 - product.attributes.get_int(flag, 0))
                product.replace_input_with(place, transposition.inputs[0])


def _name_nodes(model: ir.Model, operators: Mapping[str, str]) -> None:
    """Names every node after its operator: ONNX Runtime's errors show only the node's name."""
    for number, node in enumerate(model.graph.all_nodes()):
        operator = operators.get(_operator_of(node))
        node.name = f"{node.op_type}_{number}" if operator is None else f"{operator}/{node.op_type}_{number}"


def _rename(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Gives the inputs and outputs of a model their names, and all other values names that differ from these."""
    graph = model.graph
    named = {id(value): name for value, name in zip(graph.inputs, inputs, strict=True)}
    named |= {id(value): name for value, name in zip(graph.outputs, outputs, strict=True)}
    names = Names([*inputs, *outputs])
    others = [value for node in graph.all_nodes() for value in node.outputs if id(value) not in named]
    others += [value for value in graph.initializers.values() if id(value) not in named]
    others += [value for body in graph.subgraphs() for value in body.inputs]
    for value in others:
        value.name = names.unique(value.name or "value")
    # First temporary names: values of a graph must never share a name, not even temporarily.
    for value in (*graph.inputs, *graph.outputs):
        value.name = names.unique("interface")
    for value in (*graph.inputs, *graph.outputs):
        value.name = named[id(value)]


def _operator_of(node: ir.Node) -> str:
    """Returns the name of the operator in the captured graph that a node was translated from; "" if there is none."""
    match = re.match(r"%(\w+)", node.metadata_props.get("pkg.torch.onnx.fx_node", ""))
    return "" if match is None else match[1]


def _fit(model: ir.Model, device: str) -> None:
    """Puts casts around nodes for whose types the engine has no kernel."""

    def source(node: ir.Node) -> str:
        return line_of_trace(node.metadata_props.get("pkg.torch.onnx.stack_trace"))

    missing = FitToKernelsPass(device, source).call(model).missing
    if missing:
        raise ExportError(
            "ONNX Runtime has no kernel for these operators with these types or wider ones: cast their inputs to "
            "another type.\n  " + "\n  ".join(missing)
        )


def _operators(model: ir.Model, graph: torch.fx.Graph) -> dict[str, list[torch.fx.Node | None]]:
    """Maps the name of every node of a translated model to the operator that it is a part of.

    A node added after the translation, such as a cast, belongs to the operator that reads its result, or else to the
    one that computed its input.
    """
    operators = {node.name: node for node in graph.nodes}
    origins: dict[ir.Node, torch.fx.Node | None] = {}
    nodes = list(model.graph.all_nodes())
    for node in nodes:
        origins[node] = operators.get(_operator_of(node))
    for node in reversed(nodes):
        if origins[node] is None:
            users = (user for value in node.outputs for user, _ in value.uses())
            origins[node] = next((origins[user] for user in users if origins.get(user) is not None), None)
    for node in nodes:
        if origins[node] is None:
            makers = (value.producer() for value in node.inputs if value is not None)
            origins[node] = next((origins[maker] for maker in makers if maker and origins.get(maker) is not None), None)
    return {str(node.name): [operator] for node, operator in origins.items()}
