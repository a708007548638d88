"""Rewrites of graphs for PyTorch's kernels: what they find, and that the numbers stay the same."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, amp, optim
from ort_trainer.engine.programs import linear, rows
from ort_trainer.kernels.programs import kind as kernels
from ort_trainer.kernels.programs import rewrites
from ort_trainer.kernels.programs.rewrites import convolutions, halves

from ..helpers import assert_close, assert_same_edges
from .calls import LARGE, Function, trained

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


@pytest.mark.parametrize("slow_mkl", [False, True])
def test_products_with_weights_are_onednns(slow_mkl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear, kernels):
        monkeypatch.setattr(module, "slow_mkl", lambda: slow_mkl)
    calls = trained(torch.relu, *LARGE)
    assert calls["ort_trainer.linear.default"] == (2 if slow_mkl else 1) and "aten.addmm.default" not in calls
    assert calls["aten.relu_.default"] == 1, "it writes over the product"
    assert calls["aten.mm.default"] == (0 if slow_mkl else 1), "the gradient of the weight"


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


@pytest.mark.parametrize(
    ("kernel", "outputs", "last", "summed"),
    [(5, 1, True, True), (3, 2, True, True), (3, 1, True, False), (5, 1, False, False)],
)
def test_the_bias_gradient_of_a_depthwise_convolution_is_a_sum(
    kernel: int, outputs: int, last: bool, summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one with a large kernel, or several outputs per channel, on a channels-last tensor."""
    for module in (convolutions, kernels):
        monkeypatch.setattr(module, "slow_mkl", lambda: False)

    def convolution(x: torch.Tensor) -> torch.Tensor:
        image = x[:24, :4].sin().reshape(1, 6, 4, 4).permute(0, 3, 1, 2)
        weight = x[: outputs * kernel**2, :4].t().reshape(4 * outputs, 1, kernel, kernel)
        bias = x[:outputs, 4:].reshape(-1)
        return F.conv2d(image if last else image.contiguous(), weight, bias, padding=kernel // 2, groups=4)

    calls = trained(convolution, 25, 10)
    assert calls["aten.convolution_backward.default"] == 1
    assert calls["aten.sum.dim_IntList"] == (2 if summed else 1), "one for the bias of the linear layer"


@pytest.mark.parametrize(("kernel", "slow_mkl", "copies"), [(5, True, 3), (3, True, 0), (5, False, 0)])
def test_gradients_of_large_depthwise_kernels_are_channels_last(
    kernel: int, slow_mkl: bool, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of the gradient and the image, and of the image's gradient back."""
    for module in (convolutions, kernels):
        monkeypatch.setattr(module, "slow_mkl", lambda: slow_mkl)
    weight = torch.randn(6, 1, kernel, kernel)
    calls = trained(lambda x: F.conv2d(x.sin().reshape(-1, 6, 4, 5), weight, None, 2, kernel // 2, 1, 6), 24)
    assert calls["aten.convolution_backward.default"] == 1 and calls["aten.clone.default"] == copies


def test_views_that_lead_back_are_gone() -> None:
    calls = trained(lambda x: x.t().t().reshape(-1, 5).view(-1, 5).detach() * x)
    assert "aten.detach.default" not in calls


def test_slices_of_everything_are_gone() -> None:
    calls = trained(lambda x: x[:][:, 0:].exp() * x[:, :])
    assert not {"aten.slice.Tensor", "aten.slice_backward.default"} & calls.keys()


def test_a_view_is_taken_once() -> None:
    calls = trained(lambda x: x[:, 0].exp() + x[:, 0].sin() * x[:, 1])
    assert calls["aten.select.int"] == 2
    assert "aten.reshape.default" not in calls, "the gradient of the bias is a sum over rows"


class Halves(nn.Module):
    """A convolution, products, attention and an LSTM in halves, and a constant of that dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.both, self.head = nn.Conv1d(4, 8, 3, padding=1), nn.Linear(8, 24), nn.Linear(8, 4)
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        query, key, value = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in self.both(x).chunk(3, 2))
        x = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = self.lstm(torch.maximum(x, torch.tensor(-1.0, dtype=x.dtype)))[0]
        return self.head(x @ (x.transpose(1, 2) @ x))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_of_halves_that_the_processor_lacks_are_done_in_fp32(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(graph: torch.fx.Graph) -> None:
        products = [node for node in graph.nodes if node.target in halves._PRODUCTS]
        operands = [operand.meta["val"] for node in products for operand in node.all_input_nodes]
        assert len(products) > 10
        assert not [value for value in operands if isinstance(value, torch.Tensor) and value.dtype == half]

    half = getattr(torch, dtype)
    monkeypatch.setattr(halves, "slow_halves", lambda: (half,))
    monkeypatch.setattr(rewrites, "_REWRITES", (*rewrites._REWRITES, check))
    model, draw = Halves(), torch.Generator().manual_seed(0)
    reference, x = copy.deepcopy(model), torch.randn(3, 6, 4, generator=draw)
    options = ORTTrainerOptions(
        {
            "mixed_precision": {
                "enabled": True,
                "dtype": dtype,
                "loss_scaler": amp.DynamicLossScaler(automatic_update=False, loss_scale=8.0),
            },
            "utils": {"kernels": "pytorch", "grad_norm_clip": False, "cache_exports": False},
        }
    )
    ours = ORTTrainer(model, "auto", optim.SGDConfig(lr=1.0), loss_fn=F.mse_loss, options=options)
    loss = ours.train_step(x, torch.ones(3, 6, 4))[0]
    with torch.autocast("cpu", half):
        expected = F.mse_loss(reference(x), torch.ones(3, 6, 4))
    (expected * 8.0).backward()
    relative = 4e-3 if dtype == "float16" else 3e-2
    assert_close(loss, expected.detach(), relative, "loss")
    for (name, after), before in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert before.grad is not None
        assert_close(before.detach() - after.detach(), before.grad / 8.0, relative, name)


EDGES = [math.nan, math.inf, -math.inf, -0.0, 300.0, 1e30]
LABELS = torch.arange(520) % 4000
LABELS[::7] = -100


def _halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """With 300 in x and a factor of 10,000, a gradient is above the largest float16."""
    return F.relu(x.half() @ weight.half().t()).float()


# Rewrite -> a function of x and a weight that it changes, and their shapes.
CHANGED: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, int], tuple[int, int]]] = {
    "drop_needless_views": (
        lambda x, w: (x.t().t().reshape(-1).view(6, 7) @ w.t().t()).detach() * x[0, 0],
        (6, 7),
        (7, 3),
    ),
    "drop_needless_casts": (lambda x, w: GELUS["new"](x.to(torch.float32) @ w), (6, 7), (7, 3)),
    "fuse_gelu": (lambda x, w: GELUS["new"](x) + GELUS["fast"](w), (6, 7), (1, 7)),
    "widen_products": (_halves, (6, 7), (3, 7)),
    "use_onednn": (lambda x, w: F.relu(F.linear(x, w, w[:, 0])), (128, 300), (250, 300)),
    "fuse_cross_entropy": (lambda x, w: F.cross_entropy(x @ w, LABELS[:6] % 3, reduction="none"), (6, 7), (7, 3)),
    "order_images": (
        lambda x, w: F.conv2d(x.view(2, 2, 6, 6), w.view(2, 1, 5, 5), w[:, 0], 1, 2, 1, 2),
        (72, 2),
        (2, 25),
    ),
    "sum_bias_gradients": (
        lambda x, w: F.conv2d(x.view(2, 6, 6, 2).permute(0, 3, 1, 2), w.view(2, 1, 5, 5), w[:, 0], 1, 2, 1, 2),
        (72, 2),
        (2, 25),
    ),
    "join_selects": (lambda x, w: (h := (x @ w).view(2, 3, 3))[:, 0] * h[:, 1].exp() + h[:, 2], (6, 7), (7, 3)),
    "add_rows": (lambda x, w: F.embedding(LABELS[:6] % 3, w, padding_idx=1) * x, (6, 7), (3, 7)),
    "fuse_linear_cross_entropy": (lambda x, w: F.cross_entropy(F.linear(x, w), LABELS), (520, 5), (4000, 5)),
}


PAIRS = torch.tril_indices(5, 5, -1)
ROWS = torch.tensor([[3, -7, 0], [3, 5, 6]])


def test_parts_are_taken_at_once() -> None:
    """The gradient of what they are taken from is their stack, not a sum."""
    calls = trained(lambda x: (h := x[:, None] * ROWS[:1].t())[:, 0].exp() * h[:, -2].sin() + h[:, 2])
    assert calls["aten.unbind.int"] == 1 and calls["aten.stack.default"] + calls["aten.cat.default"] == 1
    assert not {"aten.select.int", "aten.select_backward.default", "aten.select_scatter.default"} & calls.keys()


def test_parts_that_are_changed_in_place_stay() -> None:
    calls = trained(lambda x: [(h := x[:, None] * ROWS[:1].t())[:, 0].mul_(3), h[:, 1] * h[:, 2]][-1])
    assert "aten.unbind.int" not in calls


INDEXED: dict[str, Function] = {
    "pairs in a matrix": lambda x: (x[:, :, None] * x[:, None])[:, PAIRS[0], PAIRS[1]],
    "rows": lambda x: x[ROWS.to(torch.int32)] * 2,
    "columns, some from the end": lambda x: x[:, ROWS[0] // 2].exp(),
    "columns of several axes": lambda x: x.sin().reshape(7, 1, 5)[:, :, PAIRS[0]],
    "of which one is a row": lambda x: (x[:, :, None] * x[:, None])[:, PAIRS[:1], PAIRS[1][:, None]],
}
NOT_INDEXED: dict[str, Function] = {
    "a mask": lambda x: x[:, torch.tensor([True, False, True, False, False])],
    "axes that are apart": lambda x: (x[:, :, None] * x[:, None])[ROWS[1], :, ROWS[1] // 2],
    "what repeats in memory": lambda x: (x * 2)[:, None].expand(-1, 3, -1)[:, :, PAIRS[0]],
    "another order in memory": lambda x: (x * 2).t()[PAIRS[0]],
}


@pytest.mark.parametrize("name", INDEXED)
def test_rows_are_taken_by_one_index(name: str) -> None:
    calls = trained(INDEXED[name])
    assert calls["ort_trainer.flat_index.default"] == calls["aten.index_select.default"] == 1
    assert calls["aten.index_add.default"] == 1, "the gradient"
    assert not {"aten.index.Tensor", "aten.index_put.default"} & calls.keys()


@pytest.mark.parametrize("name", NOT_INDEXED)
def test_what_one_index_does_not_say_stays(name: str) -> None:
    calls = trained(NOT_INDEXED[name])
    assert calls["aten.index.Tensor"] == 1 and "ort_trainer.flat_index.default" not in calls


@pytest.mark.parametrize(("index", "wrong"), [([0, 5], 5), ([1, -6], -6)])
def test_an_index_out_of_range_is_refused(index: list[int], wrong: int) -> None:
    """Also where one index for several axes would point into the matrix."""
    with pytest.raises(IndexError, match=f"index {wrong} is out of bounds for a dimension of size 5"):
        rows.flat_index([torch.tensor([0, 1]), torch.tensor(index)], [5, 5])


@pytest.mark.parametrize("count", [11, 300])
@pytest.mark.parametrize("settings", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True}])
def test_the_gradient_of_an_embedding_adds_rows(settings: dict[str, Any], count: int) -> None:
    ids = torch.randint(0, 7, (2, count))
    calls = trained(lambda x: F.embedding(ids, x, **settings).cumsum(1))
    whole = "scale_grad_by_freq" in settings
    assert calls["ort_trainer.add_rows.default"] == (not whole)
    assert calls["aten.embedding_dense_backward.default"] == whole


class Edges(nn.Module):
    """A function of two parameters; the loss is the weighted sum of its results, which are an output, too."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function, *shapes = CHANGED[name]
        self.x, self.weight = (nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = self.function(self.x, self.weight)
        return (result * factor).sum(), result


def test_all_rewrites_are_tried_at_edges() -> None:
    assert {function.__name__ for function in rewrites._REWRITES} <= CHANGED.keys()


@pytest.mark.parametrize("name", CHANGED)
def test_edges_go_through_as_in_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN, infinities and signs of zeros of the results are PyTorch's, and so are those of the gradients."""
    monkeypatch.setattr(halves, "slow_halves", lambda: (torch.float16,))
    model = Edges(name)
    reference = copy.deepcopy(model)
    result = list(model(torch.ones(1))[1].shape)
    desc = {"inputs": [("factor", [1])], "outputs": [("loss", [], True), ("result", result)]}
    options = ORTTrainerOptions({"utils": {"kernels": "pytorch", "cache_exports": False}})
    trainer = ORTTrainer(model, desc, optim.SGDConfig(lr=0.0), options=options)
    if name == "fuse_linear_cross_entropy":
        trainer.train_step_info.fetches = ["loss"]
    relative = 2e-2 if name == "widen_products" else 1e-5
    for where in ("x", "weight"):
        for edge in EDGES:
            for factor in (torch.ones(1), torch.full((1,), 1e4)):
                for own, its in zip(model.parameters(), reference.parameters(), strict=True):
                    its.grad = own.grad = None
                    own.data.normal_()
                    its.data.copy_(own)
                for changed in (model, reference):
                    changed.get_parameter(where).data.view(-1)[1] = edge
                ours = trainer.forward_backward(factor)
                theirs = reference(factor)
                theirs[0].backward()
                for a, b in zip(ours if isinstance(ours, (list, tuple)) else [ours], theirs, strict=False):
                    assert_same_edges(a, b.detach(), relative, f"result for {edge} in {where}")
                for (parameter, own), its in zip(model.named_parameters(), reference.parameters(), strict=True):
                    if its.grad is not None:
                        # Sums of products may begin with a zero of either sign.
                        what = f"gradient of {parameter} for {edge} in {where}"
                        assert_same_edges(own.grad + 0.0, its.grad + 0.0, relative, what)


def _attention(mask: Callable[[int], torch.Tensor], width: int = 5) -> Function:
    """Returns attention of rows to each other, with a mask for their number."""
    return lambda x: F.scaled_dot_product_attention(*[x.reshape(1, 1, -1, width)] * 3, attn_mask=mask(x.shape[0]))


def _count(size: int) -> torch.Tensor:
    return torch.arange(size) + 0


PLAIN_MASKS: dict[str, Callable[[int], torch.Tensor]] = {
    "true": lambda n: (_count(n)[None, None, :, None] >= 0).expand(1, 1, n, n),
    "causal": lambda n: (_count(n)[None, None, None, :] <= _count(n)[None, None, :, None]).expand(1, 1, n, n),
    "causal, the other way round": lambda n: _count(n)[None, None, :, None] >= _count(n)[None, None, None, :],
}
OTHER_MASKS: dict[str, Callable[[int], torch.Tensor]] = {
    "from the second on": lambda n: ((_count(n) - 1)[None, None, None, :] >= 0).expand(1, 1, n, n),
    "anti-causal": lambda n: _count(n)[None, None, None, :] >= _count(n)[None, None, :, None],
    "one further": lambda n: _count(n)[None, None, None, :] <= (_count(n) + 1)[None, None, :, None],
    "without the first": lambda n: (_count(n)[None, None, :, None] >= 0) & (_count(n)[None, None, None, :] > 0),
}


@pytest.mark.parametrize("name", PLAIN_MASKS)
def test_a_mask_that_is_true_or_causal_is_gone(name: str) -> None:
    calls = trained(_attention(PLAIN_MASKS[name]))
    assert calls["aten._scaled_dot_product_flash_attention_for_cpu.default"] == 1
    assert not {"aten.arange.default", "aten.where.self"} & calls.keys()


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_another_mask_stays(name: str) -> None:
    assert "aten.arange.default" in trained(_attention(OTHER_MASKS[name]))
