"""Rewrites of graphs for PyTorch's kernels: what they find, and that numbers stay."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from .calls import LARGE, Function, needs_pytorch, trained

pytestmark = needs_pytorch
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
