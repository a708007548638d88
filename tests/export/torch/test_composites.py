"""Composites against the operators that they replace: values, and gradients where there are any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ort_trainer.export.torch.capture.capture import exportable_functions
from ort_trainer.export.torch.operators.registry import composites, decompositions, replacements

aten = torch.ops.aten


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def compare(ours: Callable[..., Any], theirs: Callable[..., Any], *args: Any, outputs: int | None = None) -> None:
    """Compares the first ``outputs`` (default: all), and the gradients of all floating-point arguments."""
    results = []
    for function in (ours, theirs):
        fresh = [
            a.detach().clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
            for a in args
        ]
        values = tensors_of(function(*fresh))[:outputs]
        torch.manual_seed(0)
        total = sum((v * torch.randn(v.shape)).sum() for v in values if v.is_floating_point() and v.requires_grad)
        leaves = [a for a in fresh if isinstance(a, torch.Tensor) and a.is_floating_point()]
        differentiable = isinstance(total, torch.Tensor)
        gradients = torch.autograd.grad(total, leaves, allow_unused=True) if differentiable else [None] * len(leaves)
        results.append((values, gradients))
    (our_values, our_gradients), (their_values, their_gradients) = results
    for a, b in zip(our_values, their_values, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(our_gradients, their_gradients, strict=True):
        zero = torch.zeros(()) if b is None and a is None else torch.zeros_like(b if a is None else a)
        torch.testing.assert_close(zero if a is None else a, zero if b is None else b, rtol=1e-3, atol=1e-4)


TOKENS, STARTS = torch.tensor([1, 4, 4, 0, 2, 1, 3]), torch.tensor([0, 2, 2, 5])
MASK = torch.rand(4, 6, generator=torch.Generator().manual_seed(3)) > 0.5
INDEX = torch.tensor([[0, 1, 1], [2, 0, 2], [3, 3, 3], [1, 0, 0]])
LABELS = torch.tensor([[1, 3, -1, 0, -1, -1], [0, 2, 4, 5, 1, 3], [-1, 0, 0, 0, 0, 0], [4, 0, -1, -1, -1, -1]])

IMAGE = torch.randn(2, 3, 5, 6)
CASES = {
    "grid_sampler, bilinear": (aten.grid_sampler.default, (IMAGE, torch.rand(2, 4, 4, 2), 0, 0, False)),
    "grid_sampler, border": (aten.grid_sampler.default, (IMAGE, torch.randn(2, 4, 4, 2), 0, 1, True)),
    "grid_sampler, nearest": (aten.grid_sampler.default, (IMAGE, torch.rand(2, 4, 4, 2), 1, 0, False)),
    "affine_grid": (aten.affine_grid_generator.default, (torch.randn(2, 2, 3), [2, 3, 4, 5], False)),
    "affine_grid, corners": (aten.affine_grid_generator.default, (torch.randn(2, 2, 3), [2, 3, 4, 5], True)),
    "bilinear": (aten.bilinear.default, (torch.randn(5, 3), torch.randn(5, 4), torch.randn(2, 3, 4), torch.randn(2))),
    "bilinear, no bias": (aten.bilinear.default, (torch.randn(5, 3), torch.randn(5, 4), torch.randn(2, 3, 4))),
    "weight_norm": (aten._weight_norm.default, (torch.randn(5, 3), torch.randn(5, 1), 0)),
    "weight_norm, last dimension": (aten._weight_norm.default, (torch.randn(5, 3), torch.randn(1, 3), 1)),
    "cdist": (aten.cdist.default, (torch.randn(2, 4, 3), torch.randn(2, 5, 3), 2.0)),
    "cdist, p=1": (aten.cdist.default, (torch.randn(4, 3), torch.randn(5, 3), 1.0)),
    "cdist, p=3": (aten.cdist.default, (torch.randn(4, 3), torch.randn(5, 3), 3.0)),
    "cdist, p=inf": (aten.cdist.default, (torch.randn(4, 3), torch.randn(5, 3), float("inf"))),
    "cdist, p=0": (aten.cdist.default, (torch.randn(4, 3), torch.randn(5, 3), 0.0)),
    "pdist": (aten.pdist.default, (torch.randn(5, 3), 2.0)),
    "adaptive_max_pool1d": (aten.adaptive_max_pool1d.default, (torch.randn(2, 3, 7), [3])),
    "adaptive_max_pool2d": (aten.adaptive_max_pool2d.default, (torch.randn(2, 3, 7, 8), [3, 5])),
    "adaptive_max_pool2d, no batch": (aten.adaptive_max_pool2d.default, (torch.randn(3, 7, 8), [2, 2])),
    "adaptive_max_pool3d": (aten.adaptive_max_pool3d.default, (torch.randn(2, 3, 4, 5, 6), [2, 3, 4])),
    "adaptive_avg_pool1d": (aten.adaptive_avg_pool1d.default, (torch.randn(2, 3, 7), [1])),
    "adaptive_avg_pool2d": (aten.adaptive_avg_pool2d.default, (torch.randn(2, 3, 7, 8), [1, 1])),
    "adaptive_avg_pool3d": (aten.adaptive_avg_pool3d.default, (torch.randn(2, 3, 4, 5, 6), [2, 3, 4])),
    "pad, replicate": (aten.pad.default, (torch.randn(2, 3, 4, 5), [2, 1, 0, 3], "replicate")),
    "pad, replicate and crop": (aten.pad.default, (torch.randn(2, 3, 4, 5), [-1, 1, 2, -2], "replicate")),
    "multilabel_margin_loss": (aten.multilabel_margin_loss.default, (torch.randn(4, 6), LABELS)),
    "multilabel_margin_loss, sum": (aten.multilabel_margin_loss.default, (torch.randn(4, 6), LABELS, 2)),
    "multilabel_margin_loss, one": (aten.multilabel_margin_loss.default, (torch.randn(6), LABELS[0])),
    "kthvalue": (aten.kthvalue.default, (torch.randn(4, 6), 2, 0)),
    "kthvalue, keepdim": (aten.kthvalue.default, (torch.randn(4, 6), 3, -1, True)),
    "median": (aten.median.default, (torch.randn(4, 6),)),
    "median, dim": (aten.median.dim, (torch.randn(4, 6), 1)),
    "cummax": (aten.cummax.default, (torch.randn(4, 6).round(), 1)),
    "cummin": (aten.cummin.default, (torch.randn(4, 6).round(), 0)),
    "cummax, int": (aten.cummax.default, (torch.randint(-3, 3, (4, 6)), 1)),
    "cummax, -inf": (aten.cummax.default, (torch.tensor([[-float("inf"), -float("inf"), 1.0, -2.0]]), 1)),
    "cdist, p=0.5": (aten.cdist.default, (torch.randn(4, 3).relu(), torch.randn(5, 3).relu(), 0.5)),
    "masked_scatter": (aten.masked_scatter.default, (torch.randn(4, 6), MASK, torch.randn(24))),
    "masked_scatter, broadcast": (aten.masked_scatter.default, (torch.randn(3, 4, 6), MASK, torch.randn(72))),
    "take": (aten.take.default, (torch.randn(4, 6), torch.tensor([[0, 5], [-1, 7]]))),
    "put": (aten.put.default, (torch.randn(4, 6), torch.tensor([0, 5, 5]), torch.randn(3), True)),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_composites(name: str) -> None:
    operator, args = CASES[name]
    compare(composites()[operator], operator, *args)


@pytest.mark.parametrize("reduce", ["mean", "amax", "prod", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_reduction_by_index(reduce: str, include_self: bool) -> None:
    for operator, args in (
        (aten.index_reduce.default, (torch.randn(4, 6), 0, torch.tensor([0, 2, 0]), torch.randn(3, 6))),
        (aten.scatter_reduce.two, (torch.randn(4, 6), 1, INDEX, torch.randn(4, 3))),
    ):
        ours = composites()[operator](*args, reduce, include_self=include_self)
        torch.testing.assert_close(ours, operator(*args, reduce, include_self=include_self))


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("padding_idx", [None, 4])
@pytest.mark.parametrize("include_last", [False, True])
def test_embedding_bag(mode: int, padding_idx: int | None, include_last: bool) -> None:
    starts = torch.tensor([0, 2, 2, 7]) if include_last else STARTS
    weights = torch.randn(7) if mode == 0 else None
    args = (torch.randn(5, 3), TOKENS, starts, False, mode, False, weights, include_last, padding_idx)
    compare(composites()[aten.embedding_bag.padding_idx], aten.embedding_bag.padding_idx, *args, outputs=1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ctc_loss(reduction: str) -> None:
    frames, lengths = torch.tensor([8, 6, 7]), torch.tensor([3, 2, 4])
    targets = torch.tensor([[1, 2, 2, 0], [3, 1, 0, 0], [4, 4, 1, 2]])
    flat = torch.tensor([1, 2, 2, 3, 1, 4, 4, 1, 2])
    for labels, given in ((targets, lengths), (flat, lengths), (flat, None)):

        def loss(logits: torch.Tensor, labels: Any = labels, given: Any = given) -> torch.Tensor:
            sizes = (frames, given) if given is not None else (tuple(frames.tolist()), tuple(lengths.tolist()))
            return F.ctc_loss(logits.log_softmax(-1), labels, *sizes, reduction=reduction)

        def ours(logits: torch.Tensor, loss: Any = loss) -> torch.Tensor:
            with exportable_functions():
                return loss(logits)

        compare(ours, loss, torch.randn(8, 3, 5))

    def translated(probabilities: torch.Tensor, *args: Any) -> torch.Tensor:
        loss = composites()[torch.ops.ort_trainer.ctc_losses.default](probabilities, *args)[0]
        return loss if reduction == "none" else loss.sum()

    def whole(probabilities: torch.Tensor, labels: torch.Tensor, *args: Any) -> torch.Tensor:
        return F.ctc_loss(probabilities, labels, *args[:3], reduction="none" if reduction == "none" else "sum")

    for labels in (targets, flat):
        compare(translated, whole, torch.randn(8, 3, 5).log_softmax(-1), labels, frames, lengths, 0, False)


def test_ctc_loss_of_halves_is_computed_in_fp32_as_under_autocast() -> None:
    probabilities = torch.randn(8, 2, 5).log_softmax(-1)
    args = torch.tensor([[1, 2], [3, 1]]), torch.tensor([8, 6]), torch.tensor([2, 1])
    with exportable_functions():
        found = F.ctc_loss(probabilities.half(), *args)
    torch.testing.assert_close(found, F.ctc_loss(probabilities.half().float(), *args))


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc_loss_of_what_can_not_be_aligned(zero_infinity: bool) -> None:
    logits = torch.randn(2, 1, 4).log_softmax(-1).requires_grad_()
    targets, frames, lengths = torch.tensor([[1, 2, 3]]), torch.tensor([2]), torch.tensor([3])
    with exportable_functions():
        loss = F.ctc_loss(logits, targets, frames, lengths, zero_infinity=zero_infinity)
    assert loss.item() == (0.0 if zero_infinity else float("inf"))
    if zero_infinity:
        (gradient,) = torch.autograd.grad(loss, logits)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_triplet_margin_loss(swap: bool, reduction: int) -> None:
    ours = replacements()[torch, "triplet_margin_loss"]
    triplet: Any = [torch.randn(6, 3) for _ in range(3)]
    compare(ours, torch.triplet_margin_loss, *triplet, 0.5, 2.0, 1e-6, swap, reduction)
    expected = torch.triplet_margin_loss(*triplet, 0.5, 2.0, 1e-6, swap, reduction)  # type: ignore[call-arg]
    torch.testing.assert_close(ours(*triplet, torch.tensor(0.5), 2.0, 1e-6, swap, reduction), expected)


@pytest.mark.parametrize("full", [False, True])
def test_gaussian_likelihood(full: bool) -> None:
    for variance in (torch.rand(4, 3) + 0.1, torch.rand(4, 1) + 0.1, torch.rand(4) + 0.1, torch.zeros(4, 3)):
        ours = replacements()[F, "gaussian_nll_loss"]
        compare(ours, F.gaussian_nll_loss, torch.randn(4, 3), torch.randn(4, 3), variance, full)


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (aten.cumprod.default, (torch.randn(4, 6), 1)),
        (aten.cumprod.default, (torch.randn(4, 6), -2)),
        (aten.amax.default, (torch.randn(()),)),
        (aten.lgamma.default, (torch.linspace(-4.3, 9.2, 60),)),
        (aten.digamma.default, (torch.linspace(-4.3, 9.2, 60),)),
        (aten.polygamma.default, (1, torch.linspace(-4.3, 9.2, 60))),
        (aten.erfinv.default, (torch.linspace(-1, 1, 81),)),
        (aten.copysign.Tensor, (torch.randn(6), torch.randn(6))),
        (aten.copysign.Scalar, (torch.randn(6), -2.0)),
        (aten.signbit.default, (torch.randn(6),)),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_math(operator: Any, args: tuple[Any, ...]) -> None:
    ours, theirs = tensors_of(decompositions()[operator](*args)), tensors_of(operator(*args))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-4)


MATRIX = torch.randn(2, 3, 4)


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (aten.squeeze.default, (torch.randn(1, 3, 1),)),
        (aten.squeeze.default, (torch.randn(2, 3),)),
        (aten.squeeze.dims, (torch.randn(1, 3, 1, 1), [0, 1, -1])),
        (aten.copy.default, (torch.randn(2, 3), torch.randn(3).double())),
        *((aten.diagonal_scatter.default, (MATRIX, torch.randn(2, n), k, 1, 2)) for k, n in ((0, 3), (2, 2), (-1, 2))),
        (aten.diagonal_scatter.default, (MATRIX, torch.randn(3, 2), 0, 0, 2)),
        (aten.diagonal_backward.default, (torch.randn(2, 3), [2, 3, 4], 1, 1, 2)),
        (aten.as_strided.default, (torch.randn(4, 6), [3, 2], [2, 7], 1)),
        (aten.as_strided.default, (torch.randn(4, 6).T, [3, 2], [2, 7], 1)),
        (aten.as_strided_scatter.default, (torch.randn(4, 6).T, torch.randn(3, 2), [3, 2], [2, 7], 1)),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_views(operator: Any, args: tuple[Any, ...]) -> None:
    torch.testing.assert_close(decompositions()[operator](*args), operator(*args))
