"""PyTorch's functions that programs call instead of the operators of the same names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ort_trainer.engine.programs.program import _FUNCTIONS

X, BATCH = torch.rand(3, 3), torch.rand(2, 3, 3)
IMAGE, WEIGHT = torch.rand(1, 2, 4, 4), torch.rand(2, 2, 3, 3)
# Operator -> arguments as programs have them, if they are not a matrix, or two.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "_log_softmax.default": (X, 1, False),
    "_softmax.default": (X, 1, False),
    "addmm.default": (X[0], X, X),
    "bmm.default": (BATCH, BATCH),
    "cat.default": ([X, X], 1),
    "convolution.default": (IMAGE, WEIGHT, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "embedding.default": (X, torch.tensor([[1]]), -1, False, False),
    "mean.dim": (X, [0], True),
    "native_layer_norm.default": (X, [3], X[0], None, 1e-5),
    "permute.default": (X, [1, 0]),
    "pow.Tensor_Scalar": (X, 2.0),
    "reshape.default": (X, [9]),
    "select.int": (X, 1, 0),
    "squeeze.dim": (X, 0),
    "stack.default": ([X, X], 1),
    "sum.dim_IntList": (X, [0], True),
    "transpose.int": (X, 0, 1),
    "unbind.int": (X, 1),
    "unsqueeze.default": (X, 1),
    "where.self": (X > 0, X, X),
}
TWO = ("add", "div", "mm", "mul", "sub")


class Called(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_a_function_calls_the_operator_of_its_name(name: str) -> None:
    short = name.removeprefix("aten.")
    args = ARGUMENTS.get(short, (X, X) if short.partition(".")[0] in TWO else (X.clone(),))
    kwargs = {"out": torch.empty_like(X)} if short.endswith(".out") else {}
    library, packet, overload = name.split(".")
    operator = getattr(getattr(getattr(torch.ops, library), packet), overload)
    with torch.no_grad(), Called() as ours:
        result = _FUNCTIONS[name](*args, **kwargs)
    with torch.no_grad(), Called() as theirs:
        expected = operator(*args, **kwargs)
    assert ours.names == theirs.names
    for mine, its in zip(*([value] if torch.is_tensor(value) else value for value in (result, expected)), strict=True):
        assert torch.equal(mine, its) and mine.stride() == its.stride()
