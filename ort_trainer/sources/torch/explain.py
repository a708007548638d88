"""What an error says that PyTorch's exporter raises: what could not be captured, where, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound

from .source_lines import differentiates_in, library_line_of_error, source_line, source_line_of_error

__all__ = ["explain", "gradients_within", "unsupported_input", "way_out"]

_BY_VALUES = "depends on the values of tensors, which a graph does not know"


def explain(error: Exception, exporter: str, model: str) -> str:
    """Returns what the exporter could not do, where, and what to do instead."""
    if differentiates_in(error) or "functorch tensor" in str(error):
        return f"{model} can't be captured: {gradients_within()}\n  {source_line_of_error(error)}"
    what, inner = None, library_line_of_error(error)
    if isinstance(error, (GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound)):
        what = f"what it does next {_BY_VALUES}"
    elif isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        what = f"the result of {error.func} {_BY_VALUES}"
    if what is not None and inner:
        hint = (
            "It is this function of PyTorch that looks at values: give it what it would find out (for one, "
            "num_classes of one_hot), or compute the same without it"
        )
    elif what is not None:
        hint = (
            "Where it is an 'if', compute both and choose with torch.where; where it is a number taken out of a tensor "
            "(float(x), x.item()), keep the tensor; where it is a size (x[mask], nonzero), multiply by the mask instead"
        )
    elif ".numpy()" in str(error):
        what = "it takes values out of a tensor with .numpy(), and a graph does not know them"
        hint = (
            "Compute with tensors what depends on them; or before the step, in PyTorch under torch.no_grad() (the "
            "hardest negatives of a batch, for one), and give the model the result as an input"
        )
    else:
        what = f"{type(error).__name__}: {error}".partition("\n\n")[0]
        hint = (
            "A model trains here if torch.export can export it; the usual causes are control flow that depends on the "
            "values of tensors and calls into other libraries, such as numpy"
        )
    where = source_line_of_error(error) + (f"\n  which calls {inner}" if inner else "")
    return f"{exporter} could not capture {model}: {what}\n  {where}\n{hint}"


def gradients_within() -> str:
    """Returns what is said about a gradient that model or loss ask for themselves."""
    return (
        "it differentiates in its own forward pass (torch.autograd.grad, backward, torch.func), and the graph of a "
        "step has one backward pass. Compute that part of the loss in PyTorch: trainer.forward_backward() for the "
        "rest, backward() for this part, which adds to the same p.grad, and trainer.optimizer_step() (docs/cookbook.md#"
        "a-penalty-on-gradients)"
    )


def way_out(nodes: Iterable[torch.fx.Node]) -> str:
    """Returns what a user can do about operators that can't be translated."""
    nodes = list(nodes)
    # A composite is one of an operator of the model, as it is before differentiation takes it apart.
    captured = [sources[-1].target for node in nodes if (sources := node.meta.get("from_node"))]
    names = dict.fromkeys(name for name in captured if name.count(".") == 2)
    operators = " and ".join(names or dict.fromkeys(str(node.target) for node in nodes))
    return f"ort_trainer.register_operator can teach it: a composite of {operators}, for one (docs/contributing.md)"


def unsupported_input(what: Any, graph: torch.fx.Graph) -> str:
    """Returns what is wrong with an input of a graph that is neither data nor state.

    Args:
        what: AOTAutograd's descriptor of the input.
        graph: The graph.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects):
        what = f"{node.args[1]} has no ONNX translation, as it does more than compute"
        return f"{what}: {source_line(node)}\n{way_out([node])}"
    if hasattr(what, "base_of"):
        name = getattr(what.base_of, "target", None)
        changed = "a tensor" if name is None else repr(str(name).removeprefix("model."))
        return (
            f"forward() changes in place what {changed} is a view of, or has a view of: in a graph the change would "
            "not reach the other. Keep one of the two, and take the view in forward()"
        )
    return (
        f"the model needs a {type(what).__name__} as an input of its graph, which is not supported: it comes from a "
        "tensor subclass"
    )
