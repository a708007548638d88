"""Frozen weights that consist of other tensors, as quantized ones do, in an ``ORTModule``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from ort_trainer import ExportError, ORTModule, ORTTrainer, optim

from .pairs import assert_same_gradients, close

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Rounded(torch.Tensor):
    """Whole numbers of 8 bits, and a scale for each row, as torchao's tensors have them."""

    whole: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, whole: torch.Tensor, scale: torch.Tensor) -> Rounded:
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype)  # type: ignore[attr-defined]

    def __init__(self, whole: torch.Tensor, scale: torch.Tensor) -> None:
        self.whole, self.scale = whole, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Rounded:
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: None, size: Any, stride: Any) -> Rounded:
        return cls(parts["whole"], parts["scale"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (F.linear, torch.ops.aten.linear.default):
            x, weight, *bias = args
            return F.linear(x, weight.whole.to(x.dtype)) * weight.scale.t() + (bias[0] if bias else 0)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default):
            found = cls(operator(args[0].whole), operator(args[0].scale))
            return return_and_correct_aliasing(operator, args, kwargs or {}, found)
        raise NotImplementedError(operator)


class Adapted(nn.Module):
    """A frozen layer, whose weight is rounded, with an adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.base.weight = nn.Parameter(Rounded.of(self.base.weight), requires_grad=False)
        self.a, self.b = nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def test_an_adapter_of_a_quantized_layer_trains() -> None:
    torch.manual_seed(0)
    eager: Any = nn.Sequential(Adapted(), nn.Tanh())
    ours = ORTModule(copy.deepcopy(eager), fallback="error")
    for _ in range(2):
        assert_same_gradients(eager, ours, lambda module: module(X).square().sum().backward())
    other = Rounded.of(torch.randn(5, 6))
    for net in (eager, ours):  # its parts change where they are
        net[0].base.weight.whole.copy_(other.whole)
        net[0].base.weight.scale.copy_(other.scale)
    close(ours(X), eager(X))
    for net in (eager, ours):
        net[0].base.weight = nn.Parameter(Rounded.of(torch.ones(5, 6)), requires_grad=False)
    close(ours(X), eager(X))
    for net in (eager, ours):
        net[0].base.weight = nn.Parameter(torch.ones(5, 6), requires_grad=False)
    with pytest.raises(ExportError, match=r"'0.base.weight' is a tensor of another kind"):
        ours(X)


def test_their_exports_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORT_TRAINER_CACHE", str(tmp_path))
    torch.manual_seed(0)
    eager = Adapted()

    def train(weight: torch.Tensor) -> None:
        for net in (eager, ours := ORTModule(copy.deepcopy(eager), fallback="error")):
            net.base.weight = nn.Parameter(weight, requires_grad=False)
        assert_same_gradients(eager, ours, lambda module: module(X).square().sum().backward())

    train(Rounded.of(torch.randn(5, 6)))
    kept = [*tmp_path.rglob("*.export")]
    assert len(kept) == 1
    train(Rounded.of(torch.randn(5, 6)))  # values are inputs
    assert [*tmp_path.rglob("*.export")] == kept
    train(Rounded(torch.ones(5, 6, dtype=torch.int16), torch.ones(5, 1)))
    assert len([*tmp_path.rglob("*.export")]) == 2


def test_a_trainer_says_who_takes_such_weights() -> None:
    with pytest.raises(TypeError, match=r"\['base.weight'\] of Adapted consist of other tensors.*ORTModule"):
        ORTTrainer(Adapted(), "auto", optim.SGDConfig(), loss_fn="mse")


class Moving(nn.Module):
    """Keeps the scale of its weight in an attribute of the weight until the first call, as bitsandbytes' layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12, dtype=torch.int8).view(2, 6), requires_grad=False)
        self.weight.scale = torch.tensor(0.25)  # type: ignore[attr-defined]
        self.register_buffer("calls", torch.zeros(()))
        self.calls.count = 0  # type: ignore[attr-defined]
        self.scale: torch.Tensor | None = None
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.scale is not None:  # type: ignore[attr-defined]
            self.scale, self.weight.scale = self.weight.scale, None  # type: ignore[attr-defined]
        self.calls.count += 1  # type: ignore[attr-defined]
        scale = torch.ones(()) if self.scale is None else self.scale
        return F.linear(x, self.weight.float() * scale, self.bias)


def test_attributes_of_weights_move_in_a_graph() -> None:
    eager, ours = Moving(), Moving()
    module = ORTModule(ours, fallback="error")
    for _ in range(3):
        torch.testing.assert_close(module(X), eager(X))
    assert ours.calls.count == eager.calls.count == 3
    assert ours.scale == 0.25 and ours.weight.scale is None  # type: ignore[attr-defined]
