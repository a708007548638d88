"""Explains errors of PyTorch's exporter: what could not be captured, where, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound

from ...core.errors import ExportError
from .source_lines import differentiates_in, library_line_of_error, source_line, source_line_of_error

__all__ = ["explain", "gradients_within", "may_be_sizes", "unsupported_input", "way_out"]

_ON_VALUES = (GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound)
_RESULTS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_BY_VALUES = "depends on the values of tensors, which a graph does not know"
_BEFORE_THE_STEP = (
    "before the step, in PyTorch under torch.no_grad(), if it needs no gradient (for example, to mine hard negatives), "
    "and pass the result as a label (docs/cookbook.md#hard-negatives)"
)


def explain(error: Exception, exporter: str, model: str) -> str:
    """Returns what the exporter could not do, where, and what to do instead."""
    gradients = gradients_within(error, model)
    if gradients:
        return gradients
    what, inner = None, library_line_of_error(error)
    if isinstance(error, _ON_VALUES):
        what = f"what it does next {_BY_VALUES}"
    elif isinstance(error, _RESULTS_ON_VALUES):
        what = f"the result of {error.func} {_BY_VALUES}"
    if what is not None and inner:
        hint = (
            "This function of PyTorch reads values: pass it what it would compute from them (such as num_classes of "
            "one_hot), or compute the same without it"
        )
    elif what is not None:
        hint = (
            "For an 'if', compute both branches and choose with torch.where; for a number taken from a tensor "
            "(float(x), x.item()), keep the tensor; for a size (x[mask], nonzero), multiply by the mask instead; or "
            f"compute it {_BEFORE_THE_STEP}"
        )
    elif ".numpy()" in str(error):
        what = "it reads the values of a tensor with .numpy(), which a graph does not know"
        hint = f"Compute what depends on them with tensors, or {_BEFORE_THE_STEP}"
    else:
        what = f"{type(error).__name__}: {error}".partition("\n\n")[0]
        hint = (
            "The model must be exportable with torch.export. The usual causes of this error are control flow that "
            "depends on the values of tensors, and calls into other libraries, such as numpy"
        )
    where = source_line_of_error(error) + (f"\n  which calls {inner}" if inner else "")
    return f"{exporter} could not capture {model}: {what}\n  {where}\n{hint}"


def may_be_sizes(error: ExportError) -> bool:
    """Returns whether an export may have failed because sizes are symbolic, and not because of the model itself."""
    cause = error.__cause__
    return cause is not None and not isinstance(cause, (*_ON_VALUES, *_RESULTS_ON_VALUES))


def gradients_within(error: Exception, model: str) -> str:
    """Returns the message for a model or loss that computes gradients itself; "" if that did not cause the error."""
    if not differentiates_in(error) and "functorch tensor" not in str(error):
        return ""
    return (
        f"{model} can't be captured: it differentiates in its own forward pass (torch.autograd.grad, backward, "
        "torch.func), but the graph of a step has only one backward pass. Compute that part of the loss in PyTorch: "
        "call trainer.forward_backward() for the rest, backward() for this part, which adds to the same p.grad, and "
        "then trainer.optimizer_step() (docs/cookbook.md#a-penalty-on-gradients)\n"
        f"  {source_line_of_error(error)}"
    )


def way_out(nodes: Iterable[torch.fx.Node]) -> str:
    """Returns what a user can do about operators that can't be translated."""
    nodes = list(nodes)
    # A composite replaces an operator of the model before differentiation decomposes it.
    captured = [sources[-1].target for node in nodes if (sources := node.meta.get("from_node"))]
    names = dict.fromkeys(name for name in captured if name.count(".") == 2)
    operators = " and ".join(names or dict.fromkeys(str(node.target) for node in nodes))
    return f"Add it with ort_trainer.register_operator, for example a composite of {operators} (docs/contributing.md)"


def unsupported_input(what: Any, graph: torch.fx.Graph) -> str:
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
