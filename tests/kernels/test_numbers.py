"""Numbers that a model computes from sizes are Python's, in double precision, on every kind of kernels."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, optim

SIZES = (5, 3, 8, 11)
Number = Callable[[Any], Any]
BINARY: list[Callable[[Any, Any], Any]] = [
    operator.add,
    operator.sub,
    operator.mul,
    lambda a, b: a / (abs(b) + 0.7),
    lambda a, b: (abs(a) + 0.3) ** (b if isinstance(b, float) else 0.5),
]
UNARY: list[Number] = [
    lambda a: 0.9**a,
    lambda a: a // 0.37,
    lambda a: round(a * 1.5),
    lambda a: math.floor(a * 1.5),
    operator.neg,
    abs,
    lambda a: torch.sym_sqrt(abs(a) + 0.1),
]
REMAINDER: list[Number] = [lambda a: abs(a) % 0.37]  # in Inductor none; in PyTorch's symbols no negative ones


def drawn(draw: random.Random, depth: int, unary: list[Number]) -> Number:
    """Returns a number that is computed from a size, as a function of it."""
    if depth == 0:
        constant = draw.choice([None, None, 0.1, 7.3, 3])
        return lambda n: n if constant is None else constant
    operation = draw.choice([*BINARY, *unary])
    operands = [drawn(draw, depth - 1, unary) for _ in range(2 if operation in BINARY else 1)]
    return lambda n: operation(*(operand(n) for operand in operands))


class Numbers(nn.Module):
    def __init__(self, unary: list[Number]) -> None:
        super().__init__()
        draw = random.Random(7)
        self.numbers = [drawn(draw, 3, unary) for _ in range(24)]
        self.weight = nn.Parameter(torch.ones(24, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[0]
        rows = [(number(size) + size * 0.1) * row for number, row in zip(self.numbers, self.weight, strict=True)]
        clamped = x.clamp(max=size / 70) + torch.full((2,), size / 7, dtype=x.dtype)
        return torch.cat([torch.stack(rows), clamped * x.abs() ** (size / 7)])


@pytest.mark.parametrize("kernels", ["onnxruntime", "pytorch", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.engine
def test_drawn_numbers_are_those_of_python(kernels: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = Numbers(UNARY + REMAINDER * (kernels != "compiled")).to(dtype)
    x = {size: torch.rand(size, 2, generator=torch.Generator().manual_seed(size), dtype=dtype) for size in SIZES}
    rtol = 1e-13 if dtype == torch.float64 else 1e-6
    expected = {size: model(x[size]).detach() for size in SIZES}
    trainer = ORTTrainer(
        model,
        {"inputs": [("x", ["n", 2])], "outputs": [("loss", [], True), ("y", ["m", 2])]},
        optim.SGDConfig(lr=0.0),
        loss_fn=lambda y: F.mse_loss(y, y.detach() + 1),
        options={"utils": {"kernels": kernels}},
    )
    for size in SIZES:
        torch.testing.assert_close(trainer.train_step(x[size])[1], expected[size], rtol=rtol, atol=0)
    trainer.save_as_onnx(tmp_path / "numbers.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "numbers.onnx", providers=["CPUExecutionProvider"])
    for size in SIZES:
        (y,) = session.run(["y"], {"x": x[size].numpy()})
        torch.testing.assert_close(torch.from_numpy(y), expected[size], rtol=rtol, atol=0)
