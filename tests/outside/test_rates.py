"""Rates of dropout that change from step to step: PyTorch's numbers, without further exports."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ort_trainer import ORTModule, ORTTrainer, ORTTrainerOptions, optim

X, Y = torch.randn(8, 6), torch.randint(3, (8,))
KERNELS = pytest.mark.parametrize("kernels", ["pytorch", "onnxruntime"])


class Net(nn.Module):
    """Calls a function with itself, what a layer returns, and the rate of a dropout."""

    def __init__(self, function: Callable[[Any, torch.Tensor, float], torch.Tensor]) -> None:
        super().__init__()
        self.fc, self.dropout, self.out = nn.Linear(6, 24), nn.Dropout(0.5), nn.Linear(24, 3)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.function(self, self.fc(x), self.dropout.p))


def trainer_of(
    model: nn.Module, kernels: str = "auto", random_numbers: str = "pytorch", lr: float = 0.02
) -> ORTTrainer:
    torch.manual_seed(7)
    utils = {"grad_norm_clip": False, "kernels": kernels, "random_numbers": random_numbers}
    options = ORTTrainerOptions({"utils": utils})
    return ORTTrainer(model, "auto", optim.SGDConfig(lr=lr), loss_fn=F.cross_entropy, options=options)


def _attention(net: Any, h: torch.Tensor, rate: float) -> torch.Tensor:
    query = h.reshape(-1, 2, 4, 3)
    rate, mask = rate if net.training else 0.0, torch.ones(4, 4, dtype=torch.bool).tril()
    h = F.scaled_dot_product_attention(query, query, query, dropout_p=rate, is_causal=True, scale=0.3)
    return F.scaled_dot_product_attention(query, h[:, :1], h[:, :1], mask, rate, enable_gqa=True).reshape(-1, 24)


def _every_kind(net: Any, h: torch.Tensor, rate: float) -> torch.Tensor:
    on = net.training
    h = h + net.dropout(h) + F.dropout(h.sin(), rate / 2, on, inplace=True)
    h = h + F.dropout(h.t().cos(), rate, on).t()
    h = h + F.dropout1d(h.reshape(-1, 8, 3), rate, on).reshape(h.shape)
    h = h + F.dropout2d(h.reshape(-1, 4, 3, 2), rate, on).reshape(h.shape)
    h = F.alpha_dropout(h, rate, on) + F.feature_alpha_dropout(h.reshape(-1, 8, 3), rate, on).reshape(h.shape)
    h = h.tanh()
    h = h + checkpoint(lambda value: F.dropout(torch.tanh(value), rate, on).sin(), h, use_reentrant=False)
    return _attention(net, h, rate)


@KERNELS
def test_draws_and_losses_are_those_of_pytorch(kernels: str) -> None:
    model = Net(_every_kind)
    reference = copy.deepcopy(model)
    trainer, optimizer = trainer_of(model, kernels), torch.optim.SGD(reference.parameters(), lr=0.02)
    torch.manual_seed(7)
    # The first rate, all others, and one graph for each of 0 and 1, for which PyTorch draws nothing.
    for rate, graphs in ((0.5, 1), (0.4, 2), (0.3, 2), (0.2, 2), (0.0, 3), (0.1, 3), (1.0, 4), (0.6, 4), (0.5, 4)):
        model.dropout.p = reference.dropout.p = rate
        loss = F.cross_entropy(reference(X), Y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert float(trainer.train_step(X, Y)[0]) == pytest.approx(loss.item(), rel=1e-4), rate
        assert len(trainer.session.graphs(True)) == graphs
        expected = F.cross_entropy(reference.eval()(X), Y).item()
        assert float(trainer.eval_step(X, Y)[0]) == pytest.approx(expected, rel=1e-4)
        reference.train()
    assert len(trainer.session.graphs(False)) <= 2, "evaluation does not depend on the rate"


@KERNELS
def test_fast_masks_are_those_of_a_fixed_rate(kernels: str) -> None:
    def forward(net: Any, h: torch.Tensor, rate: float) -> torch.Tensor:
        return F.dropout(net.dropout(h), rate / 2, net.training, inplace=True)

    model = Net(forward)
    fixed = copy.deepcopy(model)
    fixed.dropout.p = 0.2
    trainers = [trainer_of(net, kernels, "fast", lr=0.0) for net in (model, fixed)]
    for rate in (0.5, 0.4, 0.3, 0.2):
        model.dropout.p = rate
        losses = [float(trainer.train_step(X, Y)[0]) for trainer in trainers]
    assert losses[0] == losses[1]
    assert len(trainers[0].session.graphs(True)) == 2


def test_dropout_that_is_active_in_evaluation() -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.rate = nn.Parameter(torch.ones(())), 0.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(x, self.rate) * self.weight

    model, x = Masks(), torch.ones(100, 100)
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.0), loss_fn=lambda masked, y: (masked * y).mean())
    for rate in (0.5, 0.4, 0.25):
        model.rate = rate
        for step in (trainer.train_step, trainer.eval_step):
            masked = step(x, x)[1]
            assert masked.unique().tolist() == [0.0, pytest.approx(1 / (1 - rate))]
            assert (masked == 0).float().mean() == pytest.approx(rate, abs=0.03)


def test_modules_and_their_gradients() -> None:
    model = Net(lambda net, h, rate: net.dropout(h) + F.dropout2d(h.reshape(-1, 8, 3, 1), rate).reshape(h.shape))
    reference = copy.deepcopy(model)
    ours = ORTModule(model, {"utils": {"random_numbers": "pytorch"}})
    for first, second in ((0.5, 0.5), (0.4, 0.3), (0.2, 0.6), (0.1, 0.15)):
        for module, net in ((ours, model), (reference, reference)):
            torch.manual_seed(3)
            net.zero_grad()
            losses = []
            for rate in (first, second):  # both before the backward pass
                net.dropout.p = rate
                losses.append(module(X).square().sum())
            sum(losses).backward()
        for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(mine.grad, expected.grad, rtol=1e-5, atol=1e-5)
    assert sum(map(len, ours._graphs._by_kind.values())) == 2


def test_a_wrong_rate_is_the_error_of_pytorch() -> None:
    model = Net(lambda net, h, rate: net.dropout(h))
    trainer = trainer_of(model)
    for rate, wrong in ((0.5, 1.5), (0.4, -0.1), (0.3, 1.2)):
        model.dropout.p = rate
        trainer.train_step(X, Y)
        weight, model.dropout.p = model.fc.weight.clone(), wrong
        with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1, but got"):
            trainer.train_step(X, Y)
        assert torch.equal(model.fc.weight, weight)
    assert trainer.train_step_info.optimization_step == 3 and len(trainer.session.graphs(True)) == 2
