"""Dtypes other than fp32 inside a model: PyTorch's numbers, or an error that names operator, type and line."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ExportError, ORTTrainer, ORTTrainerOptions, optim

from ..helpers import assert_same_training

pytestmark = pytest.mark.engine

Operator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ANY: dict[str, Operator] = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "equal": lambda a, b: a == b,
    "greater": lambda a, b: a > b,
    "where": lambda a, b: torch.where(a > b, a, b),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 1),
    "amax": lambda a, b: a.amax(1),
    "maximum": lambda a, b: torch.maximum(a, b),
    "sum": lambda a, b: a.sum(1),
    "cumsum": lambda a, b: a.cumsum(1),
    "any": lambda a, b: a.any(1),
    "sort": lambda a, b: a.sort(1).values,
    "gather": lambda a, b: a.gather(1, torch.tensor([[0, 2, 1]]).expand(a.shape[0], 3)),
    "index": lambda a, b: a[:, torch.tensor([1, 1, 4])],
    "scatter": lambda a, b: a.scatter(1, torch.zeros(a.shape[0], 1, dtype=torch.int64), b[:, :1]),
    "join": lambda a, b: torch.cat([a, b.flip(1)], 1),
    "pad": lambda a, b: F.pad(a, (1, 1)),
    "tril": lambda a, b: a.tril(),
    "average": lambda a, b: (a * 0.5 + b.float()).mean(1),
}
NUMBERS: dict[str, Operator] = {
    "subtract": lambda a, b: 3 - a,
    "negate": lambda a, b: -a,
    "absolute": lambda a, b: a.abs(),
    "remainder": lambda a, b: a % b,
    "square": lambda a, b: a**2,
    "clamp": lambda a, b: a.clamp(2, 5),
    "matmul": lambda a, b: a @ b.T,
    "linear": lambda a, b: F.linear(a, b, b[:, 0]),
    "topk": lambda a, b: a.topk(2, 1).values,
    "scatter_add": lambda a, b: a.scatter_add(1, torch.zeros(a.shape[0], 2, dtype=torch.int64), b[:, :2]),
    "floor": lambda a, b: a.floor(),
    "is_nan": lambda a, b: torch.isnan(a),
}
BITS: dict[str, Operator] = {
    "and": lambda a, b: a & b,
    "exclusive or": lambda a, b: a ^ b,
    "invert": lambda a, b: ~a,
}
WHOLE: dict[str, Operator] = {
    "floor_divide": lambda a, b: a // b,
    "product": lambda a, b: a.prod(1),
    "left": lambda a, b: a << 1,
    "right": lambda a, b: a >> b % 4,
}
FRACTIONS: dict[str, Operator] = {
    "divide": lambda a, b: a / b,
    "exp": lambda a, b: (a / 8).exp(),
    "tanh": lambda a, b: a.tanh() + a.sigmoid(),
    "softmax": lambda a, b: a.softmax(1),
    "layer_norm": lambda a, b: F.layer_norm(a, (6,)),
    "std": lambda a, b: a.std(1),
    "numbers": lambda a, b: torch.lerp(a * 0.1 + 0.7, b.clamp(min=1.3), 0.3).masked_fill(b > 3, 0.1) ** 0.7,
    "norms": lambda a, b: a.norm(dim=1) + a.norm(3, dim=1) + b.norm(math.inf, dim=1),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[:, None], b[:, None], b[:, None]),
}
CASES: dict[torch.dtype, dict[str, Operator]] = {
    torch.uint8: {**ANY, **NUMBERS, **BITS, **WHOLE},
    torch.int8: {**NUMBERS, **BITS, **WHOLE},
    torch.bool: {**ANY, **BITS},
    torch.float64: {**FRACTIONS, **NUMBERS},
    torch.float16: FRACTIONS,
}


class Operators(nn.Module):
    """Returns the results of operators, and a loss that depends on them."""

    def __init__(self, operators: Mapping[str, Operator]) -> None:
        super().__init__()
        self.operators = operators
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = a * self.weight.to(a.dtype) if a.is_floating_point() else a
        results = [operator(first, b) for operator in self.operators.values()]
        return (torch.stack([(x.float() * self.weight).sigmoid().mean() for x in results]).sum(), *results)


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    if dtype == torch.bool:
        return torch.rand(4, 6, generator=draw) > 0.5, torch.rand(4, 6, generator=draw) > 0.3
    if dtype.is_floating_point:
        values = torch.randn(4, 6, generator=draw) * 3, torch.rand(4, 6, generator=draw) * 8 + 0.5
        return values[0].to(dtype), values[1].to(dtype)
    limits = torch.iinfo(dtype)
    a = torch.randint(limits.min, limits.max + 1, (4, 6), generator=draw).to(dtype)
    return a, torch.randint(1, 9, (4, 6), generator=draw).to(dtype)


@pytest.mark.parametrize("dtype", CASES, ids=str)
def test_operators_compute_what_pytorch_computes(dtype: torch.dtype) -> None:
    operators = CASES[dtype]
    a, b = operands(dtype)
    model = Operators(operators)
    loss, *expected = model(a, b)
    loss.backward()
    description: dict[str, Any] = {
        "inputs": [("a", ["rows", 6]), ("b", ["rows", 6])],
        "outputs": [("loss", [], True)]
        + [
            (f"output_{n}", [f"size_{n}_{axis}" for axis in range(value.dim())])
            for n, value in zip(operators, expected, strict=True)
        ],
    }
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False}})
    trainer = ORTTrainer(model, description, optim.SGDConfig(lr=1.0), options=options)
    found = trainer.train_step(a, b)
    tolerance = {torch.float64: 1e-9, torch.float16: 1e-2}.get(dtype, 1e-6)
    for name, ours, theirs in zip(operators, found[1:], expected, strict=True):
        assert ours.dtype == theirs.dtype, name
        # Both sides round fp16 after each operator, but sum in different orders.
        torch.testing.assert_close(ours, theirs.detach(), rtol=tolerance, atol=tolerance * 3, msg=f"{name}: {ours}")
    weight = trainer.state_dict(pytorch_format=True)["weight"]
    assert model.weight.grad is not None
    torch.testing.assert_close(1.5 - weight, model.weight.grad, rtol=max(tolerance, 1e-4), atol=1e-5)


class Head(nn.Module):
    """A function of doubles or integers, followed by a float head."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], torch.Tensor], features: int = 8) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(8, 8).double()
        self.convolution = nn.Conv1d(1, 1, 3, padding=1).double()
        self.head = nn.Linear(features, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.function(self, x).float())


HEAD_DESC: dict[str, Any] = {
    "inputs": [("x", ["batch", 8]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 3])],
}


@pytest.mark.parametrize(
    "function",
    [
        lambda model, x: model.layer(x.double()),
        lambda model, x: x * (((x * 40).to(torch.uint8) + 3) * 2).clamp(3, 200) / 100,
        lambda model, x: x * (x.int().T @ (x * 3).int()).float().mean(),
    ],
    ids=["double", "uint8", "int"],
)
def test_other_types_in_front_of_a_float_head(function: Any) -> None:
    draw = torch.Generator().manual_seed(3)
    batches = [(torch.randn(8, 8, generator=draw) * 2, torch.randint(0, 3, (8,), generator=draw)) for _ in range(3)]
    model = Head(function)
    assert_same_training(
        copy.deepcopy(model),
        HEAD_DESC,
        batches,
        optim.SGDConfig(lr=0.01),
        lambda reference: torch.optim.SGD(reference.parameters(), lr=0.01),
    )


@pytest.mark.options(kernels="onnxruntime")
def test_numbers_computed_from_sizes_are_doubles_for_doubles() -> None:
    """The factors of a mean's and a variance's gradient; before a batch norm, what they scale cancels."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8, momentum=0.7), nn.Linear(8, 3)).double()
    reference = copy.deepcopy(model)
    trainer = ORTTrainer(
        model,
        "auto",
        optim.SGDConfig(lr=0.1),
        loss_fn=lambda y, target: F.mse_loss(y, target) + y.var(0).mean() + (y.square() + 1).log2().mean(),
        options=ORTTrainerOptions({"utils": {"grad_norm_clip": False}}),
    )
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for rows in (8, 5, 7, 3):
        x, target = torch.randn(rows, 8).double(), torch.randn(rows, 3).double()
        ours = trainer.train_step(x, target)[0]
        optimizer.zero_grad()
        y = reference(x)
        theirs = F.mse_loss(y, target) + y.var(0).mean() + (y.square() + 1).log2().mean()
        theirs.backward()
        optimizer.step()
        torch.testing.assert_close(ours.squeeze(), theirs.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda model, x: model.convolution(x.double()[:, None])[:, 0],
            r"Conv of double, double, double: File .*in forward: ",
        ),
        (lambda model, x: F.gelu(model.layer(x.double())), r"Erf of double: File .*test_dtypes.py.* in forward: "),
    ],
    ids=["convolution", "gelu"],
)
@pytest.mark.options(kernels="onnxruntime")
def test_what_has_no_kernel_is_named_with_its_line(function: Any, message: str) -> None:
    trainer = ORTTrainer(Head(function), HEAD_DESC, optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy)
    with pytest.raises(ExportError, match=message):
        trainer.train_step(torch.randn(8, 8), torch.zeros(8, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_layer_norm_of_weights_in_its_own_precision(dtype: torch.dtype) -> None:
    """On ONNX Runtime's kernels, whose statistics are fp32."""
    model = Operators({"norm": lambda a, b: F.layer_norm(a, (6,), b[0], b[1])})
    a, b = operands(dtype)
    loss, expected = model(a, b)
    loss.backward()
    description = {
        "inputs": [("a", ["rows", 6]), ("b", ["rows", 6])],
        "outputs": [("loss", [], True), ("norm", ["rows", 6])],
    }
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False, "kernels": "onnxruntime"}})
    trainer = ORTTrainer(model, description, optim.SGDConfig(lr=1.0), options=options)
    _, norm = trainer.train_step(a, b)
    tolerance = 1e-2 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(norm, expected.detach(), rtol=tolerance, atol=tolerance)
    weight = trainer.state_dict(pytorch_format=True)["weight"]
    assert model.weight.grad is not None
    torch.testing.assert_close(1.5 - weight, model.weight.grad, rtol=tolerance, atol=1e-5)
