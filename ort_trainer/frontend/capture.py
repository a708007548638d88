"""Captures a step as one flat graph of ATen operators: PyTorch's own forward pass, backward pass and buffer updates.

``aot_export_joint_with_descriptors`` is a private function of PyTorch. It is called here only, and the torch
version that the package depends on is bounded because of it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._decomp import decompositions
from torch._functorch import utils as functorch_utils
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch.fx import traceback as fx_traceback
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import CheckpointFunction

from ..errors import ExportError
from ..model_desc import InputDescription
from .composites import exportable_functions, replace_composites
from .decompositions import decomposition_table
from .explain import explain, unsupported_input
from .size_one import watch_size_one
from .source import source_line
from .step_module import StepModule
from .symbols import SymbolTable
from .view_ops import squeezed_sizes

__all__ = ["CHECKPOINT", "Capture", "capture"]

CHECKPOINT = "ort_trainer_checkpoint"
"""Key in a node's custom metadata: the number of the ``torch.utils.checkpoint`` that it was captured in."""


@dataclass
class Capture:
    """A flat graph, and what each of its placeholders and results is.

    Attributes:
        module: The graph; placeholders and results are tensors in no particular order.
        state: Placeholder -> qualified name of the parameter or buffer in the captured module.
        constants: Placeholder -> value, for tensors that are neither.
        batch: Placeholder -> index of the batch input.
        tangent: The placeholder of the loss scale; None for evaluation.
        outputs: Results of the captured module, in order.
        gradients: Qualified parameter name -> its gradient.
        buffer_updates: Qualified buffer name -> its new value.
        symbols: The symbolic sizes.
    """

    module: torch.fx.GraphModule
    state: dict[torch.fx.Node, str]
    constants: dict[torch.fx.Node, torch.Tensor]
    batch: dict[torch.fx.Node, int]
    tangent: torch.fx.Node | None
    outputs: list[torch.fx.Node]
    gradients: dict[str, torch.fx.Node]
    buffer_updates: dict[str, torch.fx.Node]
    symbols: SymbolTable


def capture(
    module: StepModule,
    inputs: Sequence[InputDescription],
    sample: Sequence[torch.Tensor],
    autocast: torch.autocast,
) -> Capture:
    """Captures a step.

    If any parameter requires grad, the graph has the backward pass; otherwise it is the forward pass alone.

    Args:
        module: The step, already in the mode and with the trainable parameters that the graph is for.
        inputs: Descriptions of the batch.
        sample: A batch; sizes of symbolic dimensions must be at least 2.
        autocast: The policy of mixed precision, enabled or not.

    Raises:
        ExportError: If PyTorch can't export the model.
    """
    _refuse_hooks(module)
    dims = tuple(
        {axis: torch.export.Dim.AUTO for axis, size in enumerate(entry.shape) if isinstance(size, str)}
        for entry in inputs
    )
    with contextlib.ExitStack() as stack:
        # The fused attention kernels have backward operators that nothing translates; the plain formula has not.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(_right_recurrence())
        stack.enter_context(exportable_functions())
        stack.enter_context(autocast)
        with _watch_autograd() as custom_backward, watch_size_one() as special, _marked_checkpoints():
            program = _export(module, tuple(sample), dims)
        # Exported with symbolic sizes, the program's own fake inputs keep them; the user's module might look at sizes.
        names = program.graph_signature.user_inputs
        placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        fakes = tuple(placeholders[str(name)].meta["val"] for name in names)
        fake_mode = fakes[0].fake_mode
        exported = program.module(check_guards=False)
        assert isinstance(exported, torch.fx.GraphModule)
        # A block under torch.no_grad() or torch.autocast() is a graph within the graph.
        for part in exported.modules():
            if isinstance(part, torch.fx.GraphModule):
                _drop_assertions(part)
                special |= {symbol for size in squeezed_sizes(part.graph) for symbol in size.node.expr.free_symbols}
                replace_composites(part)
        # An exported program has the forward pass of a custom autograd function and not its backward pass, nor hooks:
        # a model with these is differentiated as it stands.
        core = module if custom_backward else exported
        stack.enter_context(fake_mode)
        joint = _differentiate(stack, core, fakes, module)
        symbols = SymbolTable(fake_mode.shape_env, inputs, [fake.shape for fake in fakes], special)
    _drop_assertions(joint)
    tensors: dict[str, torch.Tensor] = dict(core.named_parameters(remove_duplicate=False))
    tensors |= dict(core.named_buffers(remove_duplicate=False))
    result = _sort(joint, _names_in_model(module), {**tensors, **program.constants}, symbols)
    _refuse_captured_parameters(result.constants.values(), module.model)
    return result


def _refuse_hooks(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ExportError(f"parameter {name.removeprefix('model.')!r} has a backward hook, which no graph contains")
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise ExportError(f"module {name.removeprefix('model.')!r} has a backward hook, which no graph contains")


def _names_in_model(module: StepModule) -> dict[str, str]:
    """Returns the names of the step's tensors that are the model's, each with its name there.

    What a loss function holds beside them is no part of the model: it is constant.
    """
    model, step = (
        [*m.named_parameters(remove_duplicate=False), *m.named_buffers(remove_duplicate=False)]
        for m in (module.model, module)
    )
    own: dict[int, str] = {}
    for name, tensor in model:
        own.setdefault(id(tensor), f"model.{name}")
    return {name: own[id(tensor)] for name, tensor in step if id(tensor) in own}


def _refuse_captured_parameters(constants: Iterable[torch.Tensor], model: nn.Module) -> None:
    """Raises if a tensor of the model came into the graph as a constant, so that it would not be trained."""
    storages = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters() if p.numel()}
    for value in constants:
        name = storages.get(value.untyped_storage().data_ptr()) if value.numel() else None
        if name is not None or value.requires_grad:
            what = "a tensor that requires grad" if name is None else f"parameter {name!r}"
            raise ExportError(
                f"the model or loss function uses {what} as a Python variable, which would make it a constant of the "
                "graph: use it as an attribute of the model (model.layer.weight), or detach and clone it"
            )


def _export(
    module: StepModule, sample: tuple[torch.Tensor, ...], dims: tuple[Mapping[int, Any], ...]
) -> torch.export.ExportedProgram:
    try:
        # Before it raises, it prints the graph as far as it came.
        with contextlib.redirect_stderr(io.StringIO()) as said:
            program = torch.export.export(module, sample, dynamic_shapes=(dims,), strict=False)
        sys.stderr.write(said.getvalue())
        return program
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(explain(error, "torch.export", type(module.model).__name__)) from error


def _differentiate(
    stack: contextlib.ExitStack, core: nn.Module, fakes: tuple[torch.Tensor, ...], module: StepModule
) -> torch.fx.GraphModule:
    try:
        with tracing(TracingContext(fakes[0].fake_mode)):  # type: ignore[attr-defined]
            joint = aot_export_joint_with_descriptors(stack, core, fakes, decompositions=decomposition_table())
        assert isinstance(joint.graph_module, torch.fx.GraphModule)
        return joint.graph_module
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(explain(error, "AOTAutograd", type(module.model).__name__)) from error


@contextlib.contextmanager
def _watch_autograd() -> Iterator[list[str]]:
    """Gives a list that tells, when the block ends, which custom backward passes the model has.

    ``Function.apply`` itself may be bound to a name long before, so what it calls first is watched.
    """
    found: list[str] = []
    unwrap, register_hook = functorch_utils.unwrap_dead_wrappers, torch.Tensor.register_hook

    def watched_apply(args: Any) -> Any:
        function = sys._getframe(1).f_locals.get("cls")
        if function is CheckpointFunction:
            raise ExportError(
                "torch.utils.checkpoint with use_reentrant=True calls backward() while it runs, which can't be "
                "captured: pass use_reentrant=False"
            )
        found.append(getattr(function, "__name__", "a custom function"))
        return unwrap(args)  # type: ignore[no-untyped-call]

    def watched_hook(tensor: torch.Tensor, hook: Any) -> Any:
        found.append("register_hook")
        return register_hook(tensor, hook)  # type: ignore[no-untyped-call]

    with (
        mock.patch.object(functorch_utils, "unwrap_dead_wrappers", watched_apply),
        mock.patch.object(torch.Tensor, "register_hook", watched_hook),
    ):
        yield found


@contextlib.contextmanager
def _marked_checkpoints() -> Iterator[None]:
    """Marks what ``torch.utils.checkpoint`` encloses, which would leave no trace: a capture has no saved tensors."""
    enclosed = checkpointing._checkpoint_without_reentrant_generator
    numbers = itertools.count()

    def marked(*args: Any, **kwargs: Any) -> Iterator[None]:
        with fx_traceback.annotate({CHECKPOINT: next(numbers)}):
            yield from enclosed(*args, **kwargs)

    with (
        fx_traceback.preserve_node_meta(),  # without it, annotations are dropped
        mock.patch.object(checkpointing, "_checkpoint_without_reentrant_generator", marked),
    ):
        yield


@contextlib.contextmanager
def _right_recurrence() -> Iterator[None]:
    """Mends PyTorch's decompositions of LSTM, GRU and RNN: always arithmetic, and with dropout between the layers.

    Torch 2.13 drops that dropout (it compares the number of layers with the wrong thing), and picks a kernel of oneDNN
    for an LSTM whose input needs no gradient, whose backward operator nothing translates.
    """
    one_layer, plain = decompositions._rnn_helper, decompositions.one_layer_lstm

    def layers(
        value: torch.Tensor, hidden: Any, params: Any, biases: bool, count: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool, layer: Any,
    ) -> tuple[torch.Tensor, list[Any]]:  # fmt: skip
        width = 2 if bidirectional else 1
        value = value.transpose(0, 1) if batch_first else value
        final: list[Any] = []
        for start in range(0, count * width, width):
            if start and dropout and train:
                value = torch.dropout(value, dropout, train=True)
            part = slice(start, start + width)
            value, states = one_layer(  # type: ignore[no-untyped-call]
                value, hidden[part], params[part], biases, 1, 0.0, train, bidirectional, False, layer
            )
            final += states
        return (value.transpose(0, 1) if batch_first else value), final

    with (
        mock.patch.object(decompositions, "_rnn_helper", layers),
        mock.patch.object(decompositions, "select_one_layer_lstm_function", lambda *_: plain),
    ):
        yield


def _drop_assertions(core: torch.fx.GraphModule) -> None:
    """Removes run-time assertions: sizes are checked by the guards, and an assertion has no ONNX counterpart."""
    for node in reversed(list(core.graph.nodes)):
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
            core.graph.erase_node(node)
    core.recompile()


def _sort(
    joint: torch.fx.GraphModule, known: Mapping[str, str], tensors: Mapping[str, Any], symbols: SymbolTable
) -> Capture:
    """Reads AOTAutograd's descriptors of placeholders and results."""
    result = Capture(joint, {}, {}, {}, None, [], {}, {}, symbols)
    placeholders: dict[str, torch.fx.Node] = {}
    for node in joint.graph.find_nodes(op="placeholder"):
        what = node.meta["desc"]
        if isinstance(what, (ParamAOTInput, BufferAOTInput)):
            if what.target in known:
                # torch.export gives some tied weights a placeholder under each of their names.
                first = placeholders.setdefault(known[what.target], node)
                node.replace_all_uses_with(first)
                result.state[first] = known[what.target]
            else:
                result.constants[node] = tensors[what.target]
        elif isinstance(what, PlainAOTInput):
            result.batch[node] = what.idx
        elif isinstance(what, TangentAOTInput):
            result.tangent = node
        else:
            raise ExportError(unsupported_input(type(what).__name__, joint.graph))
    _lift_attributes(joint, result.constants)
    (end,) = joint.graph.find_nodes(op="output")
    for what, node in zip(end.meta["desc"], end.args[0], strict=True):
        if node is None:
            continue
        if not isinstance(node, torch.fx.Node):
            raise ExportError(f"the model returns the constant {node!r} where a tensor is expected")
        if isinstance(what, PlainAOTOutput):
            result.outputs.append(node)
        elif isinstance(what, GradAOTOutput):
            if isinstance(what.grad_of, ParamAOTInput):
                _add_gradient(result, known[what.grad_of.target], node)
        elif isinstance(what, InputMutationAOTOutput):
            _sort_mutation(what, node, known, result)
        else:
            raise ExportError(f"the model gives {type(what).__name__} as a result, which is not supported")
    return result


def _add_gradient(result: Capture, name: str, node: torch.fx.Node) -> None:
    """Adds to a parameter's gradient: a tied weight with several placeholders has one from each."""
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
    what: InputMutationAOTOutput, node: torch.fx.Node, known: Mapping[str, str], result: Capture
) -> None:
    mutated = what.mutated_input
    if isinstance(mutated, BufferAOTInput) and mutated.target not in known:
        raise ExportError(f"the loss function changes its buffer {mutated.target!r}: only a model's buffers may change")
    if isinstance(mutated, BufferAOTInput):
        result.buffer_updates[known[mutated.target]] = node
    elif isinstance(mutated, ParamAOTInput):
        raise ExportError(
            f"forward() changes parameter {mutated.target.removeprefix('model.')!r} in place: change parameters "
            "outside forward(), or make it a buffer"
        )
    # An input of the batch that forward() changes in place is the caller's tensor, which the trainer leaves alone.


def _lift_attributes(joint: torch.fx.GraphModule, constants: dict[torch.fx.Node, torch.Tensor]) -> None:
    """Turns tensors that the graph holds as attributes into placeholders."""
    for node in joint.graph.find_nodes(op="get_attr"):
        value: Any = joint
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            raise ExportError(f"the model has control flow ({node.target}) that is not supported: {source_line(node)}")
        first = next(iter(joint.graph.nodes))
        with joint.graph.inserting_before(first):
            placeholder = joint.graph.placeholder(f"constant_{len(constants)}")
        placeholder.meta["val"] = node.meta.get("val", value)
        node.replace_all_uses_with(placeholder)
        joint.graph.erase_node(node)
        constants[placeholder] = value
