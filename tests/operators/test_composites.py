"""Functions for operators against the operators, where PyTorch's own test samples have no such call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ort_trainer.capture.capture import exportable_functions
from ort_trainer.fx.operator_table import composites, decompositions, replacements

from .test_samples import compare, tensors_of

aten = torch.ops.aten


TOKENS, STARTS = torch.tensor([1, 4, 4, 0, 2, 1, 3]), torch.tensor([0, 2, 2, 5])
MASK = torch.rand(4, 6, generator=torch.Generator().manual_seed(3)) > 0.5

CASES = {
    "affine_grid": (aten.affine_grid_generator.default, (torch.randn(2, 2, 3), [2, 3, 4, 5], False)),
    "affine_grid, corners": (aten.affine_grid_generator.default, (torch.randn(2, 2, 3), [2, 3, 4, 5], True)),
    "weight_norm": (aten._weight_norm.default, (torch.randn(5, 3), torch.randn(5, 1), 0)),
    "weight_norm, last dimension": (aten._weight_norm.default, (torch.randn(5, 3), torch.randn(1, 3), 1)),
    "adaptive_avg_pool2d": (aten.adaptive_avg_pool2d.default, (torch.randn(2, 3, 7, 8), [1, 1])),
    "cummax, int": (aten.cummax.default, (torch.randint(-3, 3, (4, 6)), 1)),
    "cummax, -inf": (aten.cummax.default, (torch.tensor([[-float("inf"), -float("inf"), 1.0, -2.0]]), 1)),
    "masked_scatter, broadcast": (aten.masked_scatter.default, (torch.randn(3, 4, 6), MASK, torch.randn(72))),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_composites(name: str) -> None:
    operator, args = CASES[name]
    compare(composites()[operator], operator, *args)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("padding_idx", [None, 4])
@pytest.mark.parametrize("include_last", [False, True])
def test_embedding_bag(mode: int, padding_idx: int | None, include_last: bool) -> None:
    starts = torch.tensor([0, 2, 2, 7]) if include_last else STARTS
    weights = torch.randn(7) if mode == 0 else None
    args = (torch.randn(5, 3), TOKENS, starts, False, mode, False, weights, include_last, padding_idx)
    compare(composites()[aten.embedding_bag.padding_idx], aten.embedding_bag.padding_idx, *args, results=1)


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
        (aten.amax.default, (torch.randn(()),)),
        (aten.erfinv.default, (torch.linspace(-1, 1, 81),)),
        (aten.copysign.Scalar, (torch.randn(6), -2.0)),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_math(operator: Any, args: tuple[Any, ...]) -> None:
    ours, theirs = tensors_of(decompositions()[operator](*args)), tensors_of(operator(*args))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (aten.copy.default, (torch.randn(2, 3), torch.randn(3).double())),
        (aten.as_strided.default, (torch.randn(4, 6), [3, 2], [2, 7], 1)),
        (aten.as_strided.default, (torch.randn(4, 6).T, [3, 2], [2, 7], 1)),
        (aten.as_strided_scatter.default, (torch.randn(4, 6).T, torch.randn(3, 2), [3, 2], [2, 7], 1)),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_views(operator: Any, args: tuple[Any, ...]) -> None:
    torch.testing.assert_close(decompositions()[operator](*args), operator(*args))


CONVOLUTIONS = [
    # input, weight, stride, padding, dilation, transposed, output_padding, groups
    ((2, 4, 7, 7), (8, 1, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 4),
    ((3, 4, 10), (5, 4, 3), [2], [1], [1], False, [0], 1),
    ((2, 2, 5, 6, 7), (4, 2, 2, 3, 2), [1, 2, 2], [0, 1, 1], [1, 1, 1], False, [0, 0, 0], 1),
    ((2, 4, 5, 5), (4, 6, 3, 3), [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
    ((2, 4, 5, 5), (4, 3, 2, 2), [2, 2], [0, 0], [1, 1], True, [0, 0], 2),
    ((2, 4, 5, 5), (4, 3, 2, 3), [1, 2], [0, 1], [3, 1], True, [2, 1], 1),
    ((2, 4, 5, 5), (4, 3, 2, 4), [1, 2], [0, 1], [3, 3], True, [2, 2], 1),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_the_gradient_of_a_convolution_for_its_weight_alone(case: tuple[Any, ...]) -> None:
    shape, kernel, *rest = case
    value, weight = torch.randn(shape), torch.randn(kernel)
    bias = kernel[1] * rest[-1] if rest[3] else kernel[0]
    output = aten.convolution.default(value, weight, None, *rest)
    args = torch.randn_like(output), value, weight, [bias], *rest, [False, True, False]
    operator = aten.convolution_backward.default
    ours, theirs = decompositions()[operator](*args), operator(*args)
    assert ours[0] is ours[2] is None
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("ceil", "divisor", "is_replaced"), [(True, None, True), (False, 3, True), (False, None, False)]
)
@pytest.mark.parametrize("include", [True, False])
def test_which_average_pooling_is_replaced(ceil: bool, divisor: int | None, is_replaced: bool, include: bool) -> None:
    value, args = torch.randn(2, 3, 5, 6, 7), ([3, 2, 2], [2, 2, 1], [1, 0, 1], ceil, include, divisor)
    for operator in (aten.avg_pool3d.default, aten.avg_pool2d.default):
        if operator is aten.avg_pool2d.default:
            value, args = value[0], tuple(arg[1:] if isinstance(arg, list) else arg for arg in args)
        ours = decompositions()[operator](value, *args)
        assert (ours is not NotImplemented) is is_replaced
        if is_replaced:
            torch.testing.assert_close(ours, operator(value, *args))


def test_the_gradient_of_overlapping_maxima() -> None:
    value, args = torch.randn(2, 3, 7, 8), ([3, 3], [2, 2], [1, 1], [1, 1], False)
    output, indices = aten.max_pool2d_with_indices.default(value, *args)
    operator = aten.max_pool2d_with_indices_backward.default
    given = torch.randn_like(output), value, *args, indices
    torch.testing.assert_close(decompositions()[operator](*given), operator(*given))
