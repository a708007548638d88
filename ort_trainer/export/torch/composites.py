"""Applies the operator table to a model before PyTorch differentiates it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from .operators.registry import Operator, composites, replacements

__all__ = ["exportable_functions", "replace_composites"]


def replace_composites(module: torch.fx.GraphModule, for_onnx: bool = True) -> None:
    """Replaces operators by compositions of simpler ones, in a graph that is not differentiated yet.

    Args:
        module: The graph.
        for_onnx: Whether to include composites that only make up for gaps in ONNX.
    """
    known = composites(for_onnx)
    for node in module.graph.nodes:
        composite = (known.get(node.target) or known.get(str(node.target))) if node.op == "call_function" else None
        if composite is not None:
            node.target = _named(composite, node.target)
    module.recompile()


def _named(composite: Callable[..., Any], operator: Operator) -> Callable[..., Any]:
    """Wraps a composite in a named function: the graph's code needs a name, but a composite may be any callable."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return composite(*args, **kwargs)

    function.__name__ = function.__qualname__ = str(operator).replace(".", "_")
    return function


@contextlib.contextmanager
def exportable_functions() -> Iterator[None]:
    """Replaces functions of torch that can't be captured by ones that can."""
    with contextlib.ExitStack() as stack:
        for (module, name), function in replacements().items():
            stack.enter_context(mock.patch.object(module, name, function))
        yield
