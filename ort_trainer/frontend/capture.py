"""Captures a step as one flat graph of ATen operators: PyTorch's own forward pass, backward pass and buffer updates.

``aot_export_joint_with_descriptors`` is a private function of PyTorch. It is called here only, and the torch
version that the package depends on is bounded because of it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._decomp import decompositions
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
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import ExportError
from ..model_desc import InputDescription
from .decompositions import decomposition_table
from .source import source_line
from .step_module import StepModule
from .symbols import SymbolTable

__all__ = ["Capture", "capture"]


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
    dims = tuple(
        {axis: torch.export.Dim.AUTO for axis, size in enumerate(entry.shape) if isinstance(size, str)}
        for entry in inputs
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        # The fused attention kernels have backward operators that nothing translates; the plain formula has not.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        # So has the LSTM kernel of oneDNN, which PyTorch otherwise picks where the input needs no gradient.
        stack.enter_context(_plain_lstm())
        stack.enter_context(autocast)
        program = _export(module, tuple(sample), dims)
        # Exported with symbolic sizes, the program's own fake inputs keep them; the user's module might look at sizes.
        names = program.graph_signature.user_inputs
        placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        fakes = tuple(placeholders[str(name)].meta["val"] for name in names)
        fake_mode = fakes[0].fake_mode
        core = program.module(check_guards=False)
        assert isinstance(core, torch.fx.GraphModule)
        _drop_assertions(core)
        stack.enter_context(fake_mode)
        with tracing(TracingContext(fake_mode)):
            joint = aot_export_joint_with_descriptors(
                stack, core, fakes, decompositions=decomposition_table()
            ).graph_module
        symbols = SymbolTable(fake_mode.shape_env, inputs, [fake.shape for fake in fakes])
    tensors: dict[str, torch.Tensor] = dict(core.named_parameters(remove_duplicate=False))
    tensors |= dict(core.named_buffers(remove_duplicate=False))
    # What the loss function holds is no part of the model: it is constant.
    known = {f"model.{name}" for name, _ in module.model.named_parameters(remove_duplicate=False)}
    known |= {f"model.{name}" for name, _ in module.model.named_buffers(remove_duplicate=False)}
    return _sort(joint, known, {**tensors, **program.constants}, symbols)


def _export(
    module: StepModule, sample: tuple[torch.Tensor, ...], dims: tuple[Mapping[int, Any], ...]
) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(module, sample, dynamic_shapes=(dims,), strict=False)
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(
            f"torch.export could not capture {type(module.model).__name__}: {error}\n"
            "A model trains here if torch.export can export it; the usual causes are control flow that depends on the "
            "values of tensors (use torch.where or torch.cond) and calls into other libraries"
        ) from error


def _plain_lstm() -> contextlib.AbstractContextManager[Any]:
    """Makes PyTorch decompose an LSTM into arithmetic."""
    plain = decompositions.one_layer_lstm
    return mock.patch.object(decompositions, "select_one_layer_lstm_function", lambda *_: plain)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Mutes what torch.export warns about modules that export well, such as the weight lists of an LSTM."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The tensor attributes? .* (was|were) assigned during export")
        warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\).*")
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


def _sort(joint: torch.fx.GraphModule, known: set[str], tensors: Mapping[str, Any], symbols: SymbolTable) -> Capture:
    """Reads AOTAutograd's descriptors of placeholders and results."""
    result = Capture(joint, {}, {}, {}, None, [], {}, {}, symbols)
    for node in joint.graph.nodes:
        if node.op != "placeholder":
            continue
        what = node.meta["desc"]
        if isinstance(what, (ParamAOTInput, BufferAOTInput)):
            if what.target in known:
                result.state[node] = what.target
            else:
                result.constants[node] = tensors[what.target]
        elif isinstance(what, PlainAOTInput):
            result.batch[node] = what.idx
        elif isinstance(what, TangentAOTInput):
            result.tangent = node
        else:
            raise ExportError(
                f"the model needs {type(what).__name__} as an input of its graph, which is not supported: it comes "
                "from an operator with side effects or from a tensor subclass"
            )
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
                result.gradients[what.grad_of.target] = node
        elif isinstance(what, InputMutationAOTOutput):
            _sort_mutation(what, node, result)
        else:
            raise ExportError(f"the model gives {type(what).__name__} as a result, which is not supported")
    return result


def _sort_mutation(what: InputMutationAOTOutput, node: torch.fx.Node, result: Capture) -> None:
    mutated = what.mutated_input
    if isinstance(mutated, BufferAOTInput) and not mutated.target.startswith("model."):
        raise ExportError(f"the loss function changes its buffer {mutated.target!r}: only a model's buffers may change")
    if isinstance(mutated, BufferAOTInput):
        result.buffer_updates[mutated.target] = node
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
