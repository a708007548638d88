"""Rewrites of graphs for PyTorch's kernels: what they find, and that numbers stay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.runtime.aten import Program
from ort_trainer.runtime.engine import can_call_pytorch

from ....helpers import assert_close

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not can_call_pytorch(), reason="the engine can't call PyTorch"),
]
Function = Callable[[torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """A function of a linear layer, and its mean square."""

    def __init__(self, function: Function, width: int) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(width, 5 * width // 6), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x)).square().mean()


def trained(function: Function, rows: int = 7, width: int = 6) -> Counter[str]:
    """Compares loss and gradients with PyTorch's, within 1e-5; returns the operators that were called."""
    model = Model(function, width)
    desc = {"inputs": [("x", ["batch", width])], "outputs": [("loss", [], True)]}
    options = ORTTrainerOptions({"utils": {"kernels": "pytorch", "grad_norm_clip": False}})
    ours = ORTTrainer(model, desc, optim.SGDConfig(lr=1.0), options=options)
    x = torch.randn(rows, width) * 2
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss = ours.train_step(x)
    expected = model(x)
    expected.backward()
    assert_close(loss, expected.detach(), 1e-5, "loss")
    after = ours.state_dict(pytorch_format=True)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_close(before[name] - after[name], parameter.grad, 1e-5, name)
    assert ours.session is not None
    texts = ours.session.graphs(True)[0].programs.values()
    return Counter(target for text in texts for target, _, _ in Program.from_text(text).steps)


ROOT = math.sqrt(2 / math.pi)
GELUS: dict[str, Function] = {
    "new": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    "other way round": lambda x: (torch.tanh((x**3 * 0.044715 + x) * ROOT) + 1) * (x * 0.5),
    "fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "erf": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
}
NO_GELUS: dict[str, Function] = {
    "another factor": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.05 * torch.pow(x, 3.0)))),
    "another x": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x + 1, 3.0)))),
}


@pytest.mark.parametrize("name", GELUS)
def test_a_gelu_that_is_written_out_is_one_operator(name: str) -> None:
    calls = trained(GELUS[name])
    assert calls["aten.gelu.default"] == calls["aten.gelu_backward.default"] == 1
    assert not {"aten.tanh.default", "aten.erf.default"} & calls.keys()


@pytest.mark.parametrize("name", NO_GELUS)
def test_what_is_no_gelu_stays(name: str) -> None:
    assert "aten.gelu.default" not in trained(NO_GELUS[name])


# Rows and columns of a product for which oneDNN is worth its preparation.
LARGE = (128, 300)


def test_products_with_weights_are_onednns() -> None:
    calls = trained(torch.relu, *LARGE)
    assert calls["ort_trainer.linear.default"] == 1 and "aten.addmm.default" not in calls
    assert "aten.relu.default" not in calls, "it is a part of the product"
    assert calls["aten.mm.default"] == 1, "the gradient of the weight"


def test_a_relu_is_no_part_of_a_product_that_others_read() -> None:
    calls = trained(lambda x: torch.relu(x) + x, *LARGE)
    assert calls["aten.relu.default"] == calls["ort_trainer.linear.default"] == 1


def test_a_small_product_stays() -> None:
    calls = trained(torch.relu)
    assert calls["aten.addmm.default"] == 1 and "ort_trainer.linear.default" not in calls


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_the_gradient_of_a_cross_entropy_is_one_operator(reduction: str, ignored: int) -> None:
    target = torch.tensor([0, 1, 2, 3, 4, 2, 1])
    calls = trained(lambda x: F.cross_entropy(x, target[: x.shape[0]], reduction=reduction, ignore_index=ignored))
    assert calls["ort_trainer.cross_entropy_backward.default"] == 1
    assert not {"aten.nll_loss_backward.default", "aten._log_softmax_backward_data.default"} & calls.keys()


def test_a_cross_entropy_with_weights_stays() -> None:
    target, weight = torch.tensor([0, 1, 2, 3, 4, 2, 1]), torch.rand(5)
    calls = trained(lambda x: F.cross_entropy(x, target[: x.shape[0]], weight=weight))
    assert calls["aten.nll_loss_backward.default"] == 1


def test_views_that_lead_back_are_gone() -> None:
    calls = trained(lambda x: x.t().t().reshape(-1, 5).view(-1, 5).detach() * x)
    assert "aten.detach.default" not in calls
    assert calls["aten.reshape.default"] == 1, "of the gradient of the bias, a sum over rows"
