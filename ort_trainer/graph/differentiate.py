"""Differentiates a captured step into one flat graph of ATen operators: forward pass, backward pass, buffer updates.

``aot_export_joint_with_descriptors`` is a private function of PyTorch. Only this file calls it, and it is a reason to
test each version of torch (``torch_versions.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import sympy
import torch
from torch import nn
from torch._export.utils import _compiling_state_context
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch.fx import traceback as fx_traceback
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..capture.call import CallModule
from ..capture.capture import CHECKPOINT, Capture, capturing
from ..capture.step_module import StepModule, canonical_names
from ..core.errors import ExportError
from ..fx.autocast import as_operator
from ..fx.explain import explain, source_line, way_out, with_history
from ..fx.operator_table import Operator, composites
from ..fx.symbols import SymbolTable
from ..options import InputDescription
from ..outside.values import memory_of
from .cell_loops import roll_up_loops
from .divide import Part, without
from .equal_layers import EqualLayers
from .flat_graph import FlatGraph
from .kernels import Kernels

aten = torch.ops.aten

# Of norms, which don't read them in training; PyTorch updates them in both runs of a checkpoint, a graph once.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def differentiate(
    captured: Capture,
    module: StepModule,
    inputs: Sequence[InputDescription],
    autocast: torch.autocast,
    kernels: Kernels,
) -> FlatGraph:
    """Differentiates a captured step.

    If any parameter requires grad, the graph has the backward pass; otherwise it has only the forward pass.

    Args:
        captured: The captured step.
        module: The step's module, in the mode and with the trainable parameters of the capture.
        inputs: Descriptions of the batch.
        autocast: The autocast context, enabled or not.
        kernels: What the graph is for.

    Raises:
        ExportError: If PyTorch can't differentiate the model.
    """
    least = dict(captured.least)
    with contextlib.ExitStack() as stack:
        stack.enter_context(capturing(module, autocast, kernels.of_pytorch))
        exported = captured.exported.module(check_guards=False)
        assert isinstance(exported, torch.fx.GraphModule)
        # A block under torch.no_grad() or torch.autocast() is a graph within the graph.
        for part in exported.modules():
            if isinstance(part, torch.fx.GraphModule):
                _drop_assertions(part.graph)
                # The larger limit of a symbol counts.
                least = dict.fromkeys(_symbols(_sizes_of_lstms(part.graph)), 1) | least
                least |= dict.fromkeys(_symbols(_squeezed_sizes(part.graph)), 2)
                roll_up_loops(part.graph)
                _replace_composites(part.graph, for_onnx=not kernels.of_pytorch)
                kernels.rewrite_forward(part.graph)
                part.recompile()
                if part is not exported:  # interpreted, so that the joint graph has the nodes' modules and lines
                    part.forward = torch.fx.Interpreter(part).run
        # An exported program lacks hooks and the backward pass of custom autograd functions: with these, the module
        # itself is differentiated.
        core = module if captured.as_it_stands else exported
        if captured.as_it_stands:
            stack.enter_context(_compiling_state_context())  # models ask whether they are exported
            stack.enter_context(_tensors_put_back(module))
            stack.enter_context(_marked_modules(module))
            stack.enter_context(module.recorder.with_backward_pass())
        table = stack.enter_context(kernels.decompositions())
        stack.enter_context(captured.fake_mode)
        of_module = functools.partial(_differentiate, stack, captured, type(module.model).__name__, table)
        layers = None if captured.as_it_stands else EqualLayers(exported, of_module)
        joint = of_module(core, captured.inputs)
        if layers is not None:
            layers.unfold(joint)
        shapes = [fake.shape for fake in captured.inputs]
        symbols = SymbolTable(captured.fake_mode.shape_env, inputs, shapes, least)
    _drop_assertions(joint.graph)
    joint.recompile()
    tensors: dict[str, torch.Tensor] = dict(core.named_parameters(remove_duplicate=False))
    tensors |= dict(core.named_buffers(remove_duplicate=False))
    constants = captured.exported.constants
    canonical = canonical_names(module.model, module)
    _forget_histories(joint, inputs, isinstance(module, CallModule))
    outside = module.outside()
    for name in dict.fromkeys((*tensors, *constants)):
        if name not in canonical and name.startswith("loss_fn.") and name in outside:
            canonical[name] = name
    result = _sort(joint, canonical, {**tensors, **constants}, symbols)
    result.assumptions = captured.assumptions
    described = len(result.outputs) - len(result.assumptions)
    result.outputs, result.conditions = result.outputs[:described], result.outputs[described:]
    _refuse_captured_parameters(result.constants.values(), module.model)
    _carry(result, outside)
    result.left = module.recorder.leftovers.tensors if module.leaves else 0
    if not kernels.of_pytorch:
        result.read_no_strides()
    return result


def _carry(result: FlatGraph, outside: Mapping[str, torch.Tensor]) -> None:
    """Turns constants that are tensors from outside into state."""
    names = {memory_of(tensor): name for name, tensor in outside.items()}
    first = {name: node for node, name in result.state.items()}
    for node, value in list(result.constants.items()):
        name = names.get(memory_of(value)) if memory_of(value) is not None else None
        if name is None:
            continue
        del result.constants[node]
        node.replace_all_uses_with(first.setdefault(name, node))
        result.state[first[name]] = name


def _replace_composites(graph: torch.fx.Graph, for_onnx: bool) -> None:
    """Replaces operators by compositions of simpler ones, in a graph that is not differentiated yet.

    Args:
        graph: The graph.
        for_onnx: Whether to include composites that only make up for gaps in ONNX.
    """
    table = composites(for_onnx)
    for node in graph.nodes:
        composite = (table.get(node.target) or table.get(str(node.target))) if node.op == "call_function" else None
        if composite is not None:
            node.target = _named(composite, node.target)


def _named(composite: Callable[..., Any], operator: Operator) -> Callable[..., Any]:
    """Wraps a composite in a named function: the graph's code needs a name, but a composite may be any callable."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return as_operator(operator, composite, *args, **kwargs)

    function.__name__ = function.__qualname__ = str(operator).replace(".", "_")
    return function


def _symbols(sizes: Iterable[torch.SymInt]) -> set[sympy.Symbol]:
    return {symbol for size in sizes for symbol in size.node.expr.free_symbols}


def _sizes_of_lstms(graph: torch.fx.Graph) -> Iterator[torch.SymInt]:
    """Yields the symbolic sizes of inputs of LSTMs: oneDNN's layer refuses an empty one, so that is another graph."""
    for node in graph.find_nodes(op="call_function", target=aten.lstm.input):
        yield from (size for size in node.args[0].meta["val"].shape if isinstance(size, torch.SymInt))


def _squeezed_sizes(graph: torch.fx.Graph) -> list[torch.SymInt]:
    """Returns the symbolic sizes of dimensions that a graph squeezes: it is valid only if they are not 1."""
    sizes = []
    for node in graph.find_nodes(op="call_function", target=aten.squeeze.default):
        sizes += list(node.args[0].meta["val"].shape)
    for target in (aten.squeeze.dim, aten.squeeze.dims):
        for node in graph.find_nodes(op="call_function", target=target):
            dims = node.args[1] if target is aten.squeeze.dims else [node.args[1]]
            shape = node.args[0].meta["val"].shape
            sizes += [shape[dim] for dim in dims if len(shape)]
    return [size for size in sizes if isinstance(size, torch.SymInt)]


def _refuse_captured_parameters(constants: Iterable[torch.Tensor], model: nn.Module) -> None:
    """Raises if a tensor of the model became a constant of the graph, because it would not be trained."""
    parameters = [(name, p) for name, p in model.named_parameters() if not hasattr(p, "__tensor_flatten__")]
    storages = {p.untyped_storage().data_ptr(): name for name, p in parameters if p.numel()}
    for value in constants:
        name = storages.get(value.untyped_storage().data_ptr()) if value.numel() else None
        if name is not None or value.requires_grad:
            what = "a tensor that requires grad" if name is None else f"parameter {name!r}"
            raise ExportError(
                f"the model or loss function uses {what} as a Python variable, which would be a constant in the graph: "
                "access it as an attribute of the model (model.layer.weight), or detach and clone it"
            )


def _differentiate(
    stack: contextlib.ExitStack,
    captured: Capture,
    model: str,
    table: Mapping[Any, Any],
    core: nn.Module,
    inputs: Sequence[torch.Tensor],
) -> torch.fx.GraphModule:
    """Returns AOTAutograd's joint graph of a module; ``model`` is the name of the user's, for errors."""
    try:
        # Random operators without a use stay, so that the others draw what they do in PyTorch.
        kept = torch._inductor.config.patch(fallback_random=True)
        with tracing(TracingContext(captured.fake_mode)), backward_without_autocast(), kept:
            joint = aot_export_joint_with_descriptors(stack, core, tuple(inputs), decompositions=dict(table))
        assert isinstance(joint.graph_module, torch.fx.GraphModule)
        return joint.graph_module
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(explain(error, "AOTAutograd", model)) from error


def backward_without_autocast() -> contextlib.AbstractContextManager[Any]:
    """A context in which AOTAutograd traces backward passes as autograd runs them, outside of autocast."""
    settings: contextlib.AbstractContextManager[Any] = functorch_config.patch(backward_pass_autocast="off")
    return settings


def _drop_assertions(graph: torch.fx.Graph) -> None:
    """Removes run-time assertions: guards check the sizes, and ONNX has no assertions."""
    for node in reversed(list(graph.nodes)):
        name = getattr(node.target, "_opname", "")
        if (
            node.op == "call_function"
            and not node.users
            and name
            in (
                "_assert_tensor_metadata",
                "_assert_scalar",
                "_assert_async",
                "sym_constrain_range_for_size",
                "sym_constrain_range",
            )
        ):
            graph.erase_node(node)


def _forget_histories(joint: torch.fx.GraphModule, inputs: Sequence[InputDescription], of_call: bool) -> None:
    """Removes what a backward pass would compute from gradients of tensors that forward() changes in place.

    In PyTorch such a tensor has a history if its new value requires grad. After a step nothing is differentiated.

    Args:
        joint: The graph.
        inputs: Descriptions of the batch.
        of_call: Whether the caller may differentiate the new value.

    Raises:
        ExportError: If the caller may do so, or if a zero would be needed that has symbolic sizes.
    """
    tangents = [node for node in joint.graph.find_nodes(op="placeholder") if _is_tangent(node)]
    forgotten = [node for node in tangents if isinstance(node.meta["desc"].output, InputMutationAOTOutput)]
    if not forgotten:
        return
    what = forgotten[0].meta["desc"].output.mutated_input
    if isinstance(what, ParamAOTInput):
        raise _changed(what)
    name = inputs[what.idx].name if isinstance(what, PlainAOTInput) else what.target.removeprefix("model.")
    if of_call:
        raise ExportError(with_history(name))
    placeholders = len(joint.graph.find_nodes(op="placeholder"))
    (end,) = joint.graph.find_nodes(op="output")
    without(Part(joint, {}, [*end.args[0]]), tangents, forgotten)
    if len(joint.graph.find_nodes(op="placeholder")) > placeholders:
        raise ExportError(with_history(name))
    for node in forgotten:
        joint.graph.erase_node(node)


def _is_tangent(node: torch.fx.Node) -> bool:
    return isinstance(node.meta["desc"], TangentAOTInput)


def _sort(
    joint: torch.fx.GraphModule, canonical: Mapping[str, str], tensors: Mapping[str, Any], symbols: SymbolTable
) -> FlatGraph:
    """Sorts placeholders and results by AOTAutograd's descriptors."""
    result = FlatGraph(joint, {}, {}, {}, {}, [], {}, {}, {}, {}, symbols)
    placeholders: dict[str, torch.fx.Node] = {}
    for node in joint.graph.find_nodes(op="placeholder"):
        what: Any = node.meta["desc"]
        inner = ""
        while isinstance(what, SubclassGetAttrAOTInput):  # a tensor of which a quantized weight, or the like, consists
            what, inner = what.base, f".{what.attr}{inner}"
        if isinstance(what, (ParamAOTInput, BufferAOTInput)):
            if what.target in canonical:
                # torch.export gives some tied weights a placeholder under each of their names.
                name = canonical[what.target] + inner
                first = placeholders.setdefault(name, node)
                node.replace_all_uses_with(first)
                result.state[first] = name
            else:
                result.constants[node] = attrgetter(inner[1:])(tensors[what.target]) if inner else tensors[what.target]
        elif isinstance(what, PlainAOTInput):
            result.batch[node] = what.idx
        elif isinstance(what, TangentAOTInput):
            assert isinstance(what.output, PlainAOTOutput)
            result.tangents[node] = what.output.idx
        else:
            raise ExportError(_unsupported_input(what, joint.graph))
    lift_attributes(joint, result.constants)
    (end,) = joint.graph.find_nodes(op="output")
    has_gradients = any(isinstance(what, GradAOTOutput) for what in end.meta["desc"])
    for what, node in zip(end.meta["desc"], end.args[0], strict=True):
        if node is None:
            continue
        if not isinstance(node, torch.fx.Node):
            raise ExportError(f"the model returns the constant {node!r} where a tensor is expected")
        if isinstance(what, PlainAOTOutput):
            result.outputs.append(node)
        elif isinstance(what, GradAOTOutput):
            if isinstance(what.grad_of, ParamAOTInput):
                _add_gradient(result, canonical[what.grad_of.target], node)
            elif isinstance(what.grad_of, PlainAOTInput):
                result.input_gradients[what.grad_of.idx] = node
            elif isinstance(what.grad_of, SubclassGetAttrAOTInput):
                raise ExportError(
                    f"{what.grad_of.expr()} is a part of a weight that consists of other tensors, which a graph can't "
                    "train: freeze it, requires_grad_(False)"
                )
        elif isinstance(what, InputMutationAOTOutput):
            _sort_mutation(what, node, canonical, result)
            if has_gradients:
                _refuse_changed_twice(what, node)
        else:
            raise ExportError(f"the model has a result of the unsupported kind {type(what).__name__}")
    return result


def _unsupported_input(what: Any, graph: torch.fx.Graph) -> str:
    """Returns what is wrong with an input of a graph that is neither data nor state.

    Args:
        what: AOTAutograd's descriptor of the input.
        graph: The graph.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects):
        what = f"{node.args[1]} has no ONNX translation, because it has side effects"
        return f"{what}: {source_line(node)}\n{way_out([node])}"
    if hasattr(what, "base_of"):
        name = getattr(what.base_of, "target", None)
        changed = "a tensor" if name is None else repr(str(name).removeprefix("model."))
        return (
            f"forward() changes in place memory that {changed} shares with a view: in a graph the change would not "
            "reach the other tensor. Keep only one of the two, and take the view in forward()"
        )
    return (
        f"the graph of the model needs a {type(what).__name__} as an input, which is not supported: it comes from a "
        "tensor subclass"
    )


def _add_gradient(result: FlatGraph, name: str, node: torch.fx.Node) -> None:
    """Adds to a parameter's gradient: a tied weight with several placeholders has a gradient from each."""
    other = result.gradients.get(name)
    if other is not None:
        (end,) = result.module.graph.find_nodes(op="output")
        with result.module.graph.inserting_before(end):
            total = result.module.graph.call_function(torch.ops.aten.add.Tensor, (other, node))
        total.meta["val"] = node.meta["val"]
        end.replace_input_with(node, total)
        node = total
    result.gradients[name] = node


def _sort_mutation(
    what: InputMutationAOTOutput, node: torch.fx.Node, canonical: Mapping[str, str], result: FlatGraph
) -> None:
    """Sorts the new value of an input, buffer or parameter that the module changes in place."""
    mutated = what.mutated_input
    if isinstance(mutated, BufferAOTInput) and mutated.target not in canonical:
        raise ExportError(f"the loss function changes its buffer {mutated.target!r}: only a model's buffers may change")
    if isinstance(mutated, BufferAOTInput):
        result.buffer_updates[canonical[mutated.target]] = node
    elif isinstance(mutated, ParamAOTInput):
        raise _changed(mutated)
    elif isinstance(mutated, PlainAOTInput):
        result.input_updates[mutated.idx] = node


def _refuse_changed_twice(what: InputMutationAOTOutput, node: torch.fx.Node) -> None:
    """Raises an error for a buffer that a checkpoint changes: PyTorch runs it twice, and the second run reads it."""
    name = getattr(what.mutated_input, "target", "").removeprefix("model.")
    if CHECKPOINT in (node.meta.get("custom") or {}) and not name.endswith(_STATISTICS):
        raise ExportError(
            f"forward() changes {name or 'an input'!r} in torch.utils.checkpoint, so PyTorch changes it again in the "
            "backward pass, which a graph can't do: change it outside of the part that is checkpointed"
        )


def _changed(parameter: ParamAOTInput) -> ExportError:
    return ExportError(
        f"forward() changes parameter {parameter.target.removeprefix('model.')!r} in place: change parameters outside "
        "forward(), or make it a buffer"
    )


def lift_attributes(joint: torch.fx.GraphModule, constants: dict[torch.fx.Node, torch.Tensor]) -> None:
    """Turns a graph's tensor attributes into placeholders, and adds their values to ``constants``."""
    for node in joint.graph.find_nodes(op="get_attr"):
        value: Any = joint
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            raise ExportError(f"the model has unsupported control flow ({node.target}): {source_line(node)}")
        first = next(iter(joint.graph.nodes))
        with joint.graph.inserting_before(first):
            placeholder = joint.graph.placeholder(f"constant_{len(constants)}")
        placeholder.meta["val"] = node.meta.get("val", value)
        node.replace_all_uses_with(placeholder)
        joint.graph.erase_node(node)
        constants[placeholder] = value


@contextlib.contextmanager
def _tensors_put_back(module: nn.Module) -> Iterator[None]:
    """Puts parameters and buffers back: PyTorch leaves those that it traced in a module that has several names."""
    tensors = [(part, dict(part._parameters), dict(part._buffers)) for part in module.modules()]
    try:
        yield
    finally:
        for part, parameters, buffers in tensors:
            part._parameters.update(parameters)
            part._buffers.update(buffers)


_STACK = "nn_module_stack"


@contextlib.contextmanager
def _marked_modules(step: nn.Module) -> Iterator[None]:
    """Gives operators the ``nn_module_stack`` that torch.export would give them, while modules of a step run."""
    names = {id(part): name for name, part in step.named_modules()}
    around: list[tuple[nn.Module, Any]] = []

    def enter(part: nn.Module, _: Any) -> None:
        name = names.get(id(part))
        if name is not None:  # else a module of another thread
            outer = fx_traceback.current_meta.get(_STACK)
            around.append((part, outer))
            kind = f"{type(part).__module__}.{type(part).__qualname__}"
            fx_traceback.current_meta[_STACK] = {**(outer or {}), name: (name, kind)}

    def leave(part: nn.Module, *_: Any) -> None:
        if around and around[-1][0] is part:
            outer = around.pop()[1]
            if outer is None:
                fx_traceback.current_meta.pop(_STACK, None)
            else:
                fx_traceback.current_meta[_STACK] = outer

    with contextlib.ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(enter).remove)
        # Called after errors too; otherwise the next operators would be in the wrong module.
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)
        stack.enter_context(fx_traceback.preserve_node_meta())
        yield
