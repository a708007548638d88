"""What an error says that PyTorch's exporter raises: what could not be captured, where, and what to do instead."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound

from .source_lines import source_line, source_line_of_error

__all__ = ["explain", "unsupported_input"]

_BY_VALUES = "depends on the values of tensors, which a graph does not know"


def explain(error: Exception, exporter: str, model: str) -> str:
    """Returns what the exporter could not do, where, and what to do instead."""
    what = None
    if isinstance(error, (GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound)):
        what = f"what it does next {_BY_VALUES}"
    elif isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        what = f"the result of {error.func} {_BY_VALUES}"
    if what is not None:
        hint = (
            "Where it is an 'if', compute both and choose with torch.where; where it is a number taken out of a tensor "
            "(float(x), x.item()), keep the tensor; where it is a size (x[mask], nonzero), multiply by the mask instead"
        )
    else:
        what = f"{type(error).__name__}: {error}".partition("\n\n")[0]
        hint = (
            "A model trains here if torch.export can export it; the usual causes are control flow that depends on the "
            "values of tensors and calls into other libraries, such as numpy"
        )
    return f"{exporter} could not capture {model}: {what}\n  {source_line_of_error(error)}\n{hint}"


def unsupported_input(what: Any, graph: torch.fx.Graph) -> str:
    """Returns what is wrong with an input of a graph that is neither data nor state.

    Args:
        what: AOTAutograd's descriptor of the input.
        graph: The graph.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects):
        return f"{node.args[1]} has no ONNX translation, as it does more than compute: {source_line(node)}"
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
