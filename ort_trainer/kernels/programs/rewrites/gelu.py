"""GELU that a model writes out in elementary operations."""

from __future__ import annotations

import math
from typing import Any

import torch

aten = torch.ops.aten

# In halves, the formula rounds eight times, the operator once.
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_X = "x"
_ROOT = math.sqrt(2.0 / math.pi)
_CUBE = ("mul", ("pow", _X, 3), 0.044715)
_TANH = ("mul", ("mul", _X, 0.5), ("add", ("tanh", ("mul", ("add", _X, _CUBE), _ROOT)), 1))
_FAST = ("tanh", ("mul", ("mul", _X, _ROOT), ("add", ("mul", ("mul", _X, 0.044715), _X), 1)))
_ERF = ("mul", ("mul", _X, 0.5), ("add", ("erf", ("div", _X, math.sqrt(2.0))), 1))
# torch.onnx writes this form, with numbers that are rounded to single precision.
_ERF_OF_ONNX = ("mul", ("mul", _X, ("add", ("erf", ("div", _X, math.sqrt(2.0))), 1)), 0.5)
_FORMS = (
    ("tanh", _TANH),
    ("tanh", ("mul", ("mul", _X, 0.5), ("add", _FAST, 1))),
    ("none", _ERF),
    ("none", _ERF_OF_ONNX),
)

_OPERATORS = {
    "mul": aten.mul.Tensor,
    "add": aten.add.Tensor,
    "div": aten.div.Tensor,
    "pow": aten.pow.Tensor_Scalar,
    "tanh": aten.tanh.default,
    "erf": aten.erf.default,
}


def fuse_gelu(graph: torch.fx.Graph) -> None:
    """Replaces the formula of GELU with the operator, before differentiation::

        0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))    =>    gelu(x, approximate="tanh")
        0.5 x (1 + erf(x / sqrt(2)))                         =>    gelu(x)

    The formula passes over the memory eight times, and its gradient twenty times. The first form is that of GPT-2
    (Hendrycks and Gimpel, 2016), which Hugging Face's ``gelu_new``, ``gelu_fast`` and ``gelu_accurate`` write out.
    """
    for node in list(graph.nodes):
        if node.target is not aten.mul.Tensor:
            continue
        for approximation, form in _FORMS:
            operands: dict[str, torch.fx.Node] = {}
            if not _matches(node, form, operands) or operands[_X].meta["val"].dtype not in _DTYPES:
                continue
            with graph.inserting_before(node):
                new = graph.call_function(aten.gelu.default, (operands[_X],), {"approximate": approximation})
            new.meta.update(node.meta)
            node.replace_all_uses_with(new)
            break


def _matches(value: Any, form: Any, bindings: dict[str, torch.fx.Node]) -> bool:
    """Returns whether a value is computed by a formula; stores the node that stands for x in ``bindings``."""
    if form is _X:
        return isinstance(value, torch.fx.Node) and bindings.setdefault(_X, value) is value
    if isinstance(form, (int, float)):
        return isinstance(value, (int, float)) and math.isclose(value, form, rel_tol=1e-7)
    kind, *operands = form
    if not isinstance(value, torch.fx.Node) or value.target is not _OPERATORS[kind] or value.kwargs:
        return False
    orders = [operands, operands[::-1]] if kind in ("mul", "add") else [operands]
    for order in orders:
        trial = dict(bindings)
        if len(value.args) == len(order) and all(map(lambda a, o: _matches(a, o, trial), value.args, order)):
            bindings.update(trial)
            return True
    return False
