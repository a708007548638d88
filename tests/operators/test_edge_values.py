"""Operators at NaN, infinities, zeros of either sign, ties, no elements and no dimensions, against PyTorch.

Every case was wrong once; benchmarks/operators.py found them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ort_trainer import ORTTrainer, optim
from ort_trainer.core.errors import ExportError

from ..export.against_pytorch import Call, Comparison, difference
from ..helpers import TORCH

pytestmark = pytest.mark.engine

INF, NAN = math.inf, math.nan
EDGES = torch.tensor([INF, -INF, NAN, 0.0, -0.0, 1.0, -1.0, 2.0, 2.0, -2.5])
# The first row has no NaN; in the second, all elements are the lowest.
ROWS = torch.tensor([[1.0, 3.0, 3.0, -INF, 2.0], [-INF] * 5, [1.0, NAN, INF, -1.0, NAN], [INF, 4.0, INF, 0.0, -0.0]])
IMAGE = torch.tensor(
    [[[[1.0, -INF, -INF, 3.0], [NAN, -INF, -INF, 2.0], [5.0, 5.0, INF, 1.0], [0.0, -0.0, 7.0, INF]]]] * 2
)
NUMBER = torch.tensor(1.5)
MARGINS = torch.tensor([[0.5, 1.5, -0.5], [1.0, 0.0, 2.0]])
CLASSES = torch.tensor([1, 0])

Function = Callable[..., Any]
FAMILIES: dict[str, list[tuple[Function, tuple[torch.Tensor, ...]]]] = {
    "signs": [
        (torch.sign, (EDGES,)),
        (torch.abs, (EDGES,)),
        (torch.signbit, (EDGES[3:],)),
        (lambda x: torch.copysign(x, -x.detach()), (EDGES[3:],)),
        (lambda x: torch.copysign(x, -0.0), (EDGES[5:],)),
        (torch.angle, (EDGES,)),
        (lambda x, y: torch.atan2(x, y), (EDGES, EDGES[:, None])),
    ],
    "roots": [
        (torch.sqrt, (EDGES,)),
        (torch.rsqrt, (EDGES,)),
        (lambda x: F.normalize(x, p=2.0, dim=-1), (EDGES,)),
        (lambda x: F.normalize(x, p=0.5, dim=0), (EDGES[None],)),
        (lambda x: [torch.linalg.vector_norm(x, p, dim=0, keepdim=True) for p in (0, 1, 2, 3, -2, 0.5)], (EDGES[5:],)),
        (lambda x: torch.linalg.vector_norm(x, -2, keepdim=True), (EDGES[5:],)),
        (torch.acosh, (EDGES,)),
        (torch.asinh, (EDGES,)),
        (torch.hypot, (EDGES, EDGES[:, None])),
    ],
    "special functions": [
        (torch.erf, (EDGES,)),
        (torch.erfc, (EDGES,)),
        (torch.special.ndtr, (EDGES,)),
        (torch.lgamma, (EDGES,)),
        (lambda x: x.logcumsumexp(1), (ROWS,)),
        (lambda x: torch.special.digamma(x.detach()), (EDGES,)),
    ],
    "clamps": [
        (lambda x: x.clamp(min=0.5), (EDGES,)),
        (lambda x: x.clamp(max=0.5), (EDGES,)),
        (lambda x: x.clamp(-1.0, 2.0), (EDGES,)),
        (lambda x: x.clamp(2.0, -1.0), (EDGES,)),
        (lambda x: x.clamp_min(-1), (EDGES,)),
    ],
    "maxima": [
        (lambda x: [x.amax(1), x.amin(1), x.amax(), x.amin((0, 1), keepdim=True)], (ROWS,)),
        (lambda x: [*x.max(1), *x.min(1, keepdim=True), x.max(), x.min()], (ROWS,)),
        (lambda x: [x.argmax(1), x.argmin(1), x.argmax(), x.argmin(0, keepdim=True)], (ROWS,)),
        (lambda x: [*x.cummax(1), *x.cummin(1)], (ROWS,)),
        (lambda x: torch.linalg.vector_norm(x, INF, dim=1), (ROWS,)),
        *[(lambda x: torch.aminmax(x, dim=1), (ROWS,))] * (TORCH >= (2, 12)),  # it had no derivative before
        (lambda x: (x > 0).max(1), (ROWS,)),
        (lambda x: x.new_zeros(3, 5).scatter_reduce(0, torch.tensor([[0] * 5, [1] * 5, [0] * 5, [2] * 5]), x, "amax"),
         (ROWS,)),
        (lambda x: x.index_reduce(0, torch.tensor([0, 0, 2]), x[1:], "amin"), (ROWS,)),
        (lambda x: x.index_reduce(0, torch.tensor([0, 0, 1]), x + 0, "amax", include_self=False),
         (torch.tensor([[2.0, 1.0, 1.0], [1.0, 2.0, 2.0], [3.0, 0.0, 2.0]]),)),
        (lambda x: x.scatter_reduce(0, torch.tensor([[0] * 5, [2] * 5]), x[1:3], "amax", include_self=False), (ROWS,)),
    ],
    "orders": [
        (lambda x: x.sort(dim=1, stable=True), (ROWS,)),
        (lambda x: x.sort(dim=1, stable=True, descending=True)[0], (ROWS,)),
        (lambda x: [x.detach().topk(3, 1)[0], x.detach().topk(2, 1, largest=False)[0]], (ROWS,)),
        (lambda x: x.detach().kthvalue(2, 1)[0], (ROWS,)),
        (lambda x: [x.detach().median(1)[0], x.detach().nanmedian(1)[0]], (ROWS,)),
        (lambda x: x.median(), (torch.tensor([3.0, 1.0, 2.0, 2.0, 5.0]),)),
        (lambda x: x.nanmedian(), (torch.tensor([3.0, NAN, 2.0, 2.0, 5.0]),)),
    ],
    "pooling": [
        (lambda x: F.max_pool2d(x, 2, 1), (IMAGE,)),
        (lambda x: F.max_pool2d(x, 2, 2, 1), (IMAGE,)),
        (lambda x: F.max_pool2d(x[0], 2, 1), (IMAGE,)),
        (lambda x: F.adaptive_max_pool2d(x, 2), (IMAGE,)),
        (lambda x: F.adaptive_avg_pool3d(x, (2, 1, 3)), (IMAGE,)),
        (lambda x: F.interpolate(x[None], (2, 3, 3), mode="area"), (IMAGE,)),
        (lambda x: F.max_pool3d(x, 2, (2, 2, 3), 1, ceil_mode=True, return_indices=True), (torch.rand(1, 2, 5, 6, 4),)),
        (lambda x: F.max_pool3d(x, 3, (2, 1, 2), (0, 1, 1), (1, 2, 1), ceil_mode=True), (torch.rand(2, 6, 6, 6),)),
    ],
    "diagonals": [
        (lambda x: [x.diagonal(), x.diagonal(1), x.diagonal(-2)], (ROWS,)),
        (lambda x: x.diagonal(0, 3, 2), (IMAGE,)),
    ],
    "distances": [
        (lambda x, y: [torch.cdist(x, y, p) for p in (0.0, 1.0)], (ROWS[2:, :2], ROWS[:, :2])),
        (lambda x, y: torch.cdist(x, y, INF), (torch.eye(3), torch.zeros(2, 3))),
    ],
    "ties": [
        (lambda x: F.multi_margin_loss(x, CLASSES, reduction="none"), (MARGINS,)),
        (lambda x: F.multi_margin_loss(x, CLASSES, p=2, weight=torch.tensor([1.0, 2.0, 3.0])), (MARGINS,)),
        (lambda x: F.multi_margin_loss(x[0], CLASSES[0]), (MARGINS,)),
        (lambda x: F.multilabel_margin_loss(x, torch.tensor([[1, -1, 0], [0, 2, -1]])), (MARGINS,)),
    ],
    "losses that overflow": [
        (lambda x: F.soft_margin_loss(x, torch.ones_like(x)), (torch.tensor([1.0, -INF, INF]),)),
        # An infinite gradient reaches no frame behind the last one of a sequence.
        (lambda x: INF * F.ctc_loss(x, torch.tensor([[1, 2], [1, 1]]), torch.tensor([5, 3]), torch.tensor([2, 2]),
                                    reduction="none"), (torch.rand(5, 2, 4),)),
    ],
    "attention of NaN": [
        (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), (torch.tensor([[[[NAN], [1.0], [2.0]]]]),)),
    ],
    "much output padding": [
        (lambda x, w: F.conv_transpose2d(x, w, torch.ones(2), (3, 2), (1, 2), (2, 3), 1, (4, 4)),
         (torch.rand(2, 2, 4, 4), torch.rand(2, 2, 4, 5))),
        (lambda x, w: F.conv_transpose1d(x, w, None, 1, 0, 2, 1, 3), (torch.rand(2, 4, 5), torch.rand(4, 3, 2))),
        (lambda x, w: F.conv_transpose1d(x, w, None, 1, 3, 1, 1, 2), (torch.rand(2, 4, 5), torch.rand(4, 3, 3))),
    ],
    "almost nothing": [
        (lambda x: [(x + 1e-8).log(), x + 1e-12, (x - 1e-10).sign(), 1e-9 + x, x.clamp_min(1e-12).log()],
         (torch.zeros(3),)),
        (lambda x: [(x * 1.000005 - x) * 1e5, (x / 0.999995 - x) * 1e5, x * 1 + 0 - x / 1], (torch.ones(3),)),
    ],
    "bags": [
        (lambda x: [F.embedding_bag(torch.tensor([[1, 2, 3], [4, 4, 0]]), x[:5], mode=m, padding_idx=-1)
                    for m in ("sum", "mean", "max")], (torch.rand(5, 3),)),
        (lambda x: F.embedding_bag(torch.tensor([[0, 1, 2], [3, 1, 0]]), x, mode="max"), (torch.ones(4, 2),)),
        (lambda x: F.embedding_bag(torch.tensor([[0, 1], [2, 3]]), x, mode="mean", padding_idx=2),
         (torch.tensor([[1.0], [2.0], [INF], [4.0]]),)),
    ],
    "double precision": [
        (lambda x: [x.double().log_softmax(1), x.double().softmax(1)], (ROWS,)),
        (lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), reduction="none"), (ROWS,)),
    ],
    "no elements": [
        (lambda x, y: [x @ y, x[0] @ y, torch.addmm(x.sum() + torch.ones(4), x, y), torch.bmm(x[None], y[None])],
         (torch.ones(3, 0), torch.ones(0, 4))),
    ],
    "no dimensions": [
        (lambda x: [x.softmax(0), x.cumsum(0), x.cumprod(0), x.sum(0), x.mean(-1), x.logsumexp(0)], (NUMBER,)),
        (lambda x: [*x.max(0), *x.sort(0), *x.topk(1, 0), x.std(0, correction=0), x.norm(dim=0)], (NUMBER,)),
        (lambda x: x.gather(0, torch.tensor(0)) * x.index_select(0, torch.tensor([0])), (NUMBER,)),
        (lambda x: x.scatter(0, torch.tensor(0), 2 * x) + x.scatter_add(0, torch.tensor(0), x), (NUMBER,)),
        (lambda x: F.cosine_similarity(x, 2 * x, dim=0) + F.normalize(x, dim=0), (NUMBER,)),
    ],
    "shapes of a product": [
        (lambda x: [torch.mv(x, x[0]), torch.mv(x.T, x[1]), torch.dot(x[0], x[1]), torch.addr(x, x[0], x[1])],
         (torch.rand(3, 3),)),
        (lambda x: [torch.addmm(x[0, :1], x, x), torch.addmm(x[:, :1], x, x, beta=2), torch.addmm(x[0, 0], x, x)],
         (torch.rand(3, 3),)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str) -> None:
    calls = [Call(f, [x.clone().requires_grad_() for x in args]) for f, args in FAMILIES[family]]
    comparison = Comparison(calls)
    for number, ours in enumerate(comparison.ours()):
        what = difference(ours, comparison.theirs(number))
        assert what is None, f"case {number}: {what}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64, torch.int32])
def test_orders_of_other_types(dtype: torch.dtype) -> None:
    x = torch.tensor([[3, 1, 2, 3], [0, -5, 7, 7]])

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.to(dtype)
        return [
            x.sort(dim=1, stable=True)[0],
            x.topk(2, 1)[0],
            *x.max(1),
            x.argmin(1),
            x.amax(1),
            x.clamp(min=1),
            x.max(),
        ]

    comparison = Comparison([Call(function, [x])])
    assert difference(comparison.ours()[0], comparison.theirs(0)) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_edges_of_other_types(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.to(dtype)
        pair = [x.clamp(min=0.5), x.clamp(-1, 2), x.sign(), x.abs(), torch.maximum(x, x.flip(0)), x.copysign(-x)]
        return [*pair, x.sqrt(), x.amax(), x.argmax(), x.sort(stable=True)[0], F.max_pool2d(x.view(1, 1, 2, 5), 2)]

    comparison = Comparison([Call(function, [EDGES])])
    ours, theirs = comparison.ours()[0], comparison.theirs(0)
    for number, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)):
        assert a.dtype == b.dtype, number
        torch.testing.assert_close(a, b, rtol=1e-2 if dtype != torch.float64 else 1e-7, atol=0, equal_nan=True)


ACTIVATIONS = [
    *(
        F.relu,
        F.leaky_relu,
        F.relu6,
        F.elu,
        F.selu,
        F.celu,
        F.gelu,
        F.silu,
        F.mish,
        F.softplus,
        F.logsigmoid,
        F.softsign,
    ),
    *(F.hardtanh, F.hardswish, F.hardsigmoid, F.hardshrink, F.softshrink, F.tanhshrink, torch.sigmoid, torch.tanh),
    *(torch.exp, torch.expm1, torch.log, torch.log1p, torch.square, torch.reciprocal, torch.nan_to_num, torch.floor),
]


@pytest.mark.options(kernels="onnxruntime")
def test_results_of_activations_at_the_edges() -> None:
    """On ONNX Runtime's kernels, some gradients at NaN differ; docs/limits.md lists them."""
    # PyTorch's gelu of infinity is NaN on CPUs with AVX-512, and infinity on others.
    edges = [EDGES[1:] if function is F.gelu else EDGES for function in ACTIVATIONS]
    comparison = Comparison([Call(function, [x]) for function, x in zip(ACTIVATIONS, edges, strict=True)])
    for number, ours in enumerate(comparison.ours()):
        what = difference(ours, comparison.theirs(number), values_only=True)
        assert what is None, f"{ACTIVATIONS[number].__name__}: {what}"


@pytest.mark.options(kernels="onnxruntime")
def test_small_results_keep_their_digits() -> None:
    tail = torch.tensor([-12.0, -16.0, -17.5, -20.0, -30.0, -80.0])

    def logarithms(x: torch.Tensor) -> list[torch.Tensor]:
        probability, one = x.sigmoid(), torch.ones_like(x)
        entropy = F.binary_cross_entropy(probability, one, reduction="none")
        others = [F.logsigmoid(x), F.softplus(x).log(), torch.expm1(1e-4 * x).abs().log()]
        return [probability.log(), entropy, *others]

    comparison = Comparison([Call(logarithms, [x.requires_grad_()]) for x in (tail, tail.double())])
    for number, ours in enumerate(comparison.ours()):
        assert difference(ours, comparison.theirs(number)) is None


@pytest.mark.options(kernels="onnxruntime")
def test_layer_norm_far_from_zero() -> None:
    far = 100 + torch.arange(64).reshape(2, 4, 8) % 5 / 4
    calls = [
        Call(lambda x: F.layer_norm(x, (768,)), [torch.full((2, 768), 5.3, requires_grad=True)]),
        Call(lambda x, w: F.layer_norm(x, (8,), w, w, 1e-6), [far.requires_grad_(), torch.rand(8, requires_grad=True)]),
        Call(lambda x: F.layer_norm(x, (4, 8)), [far]),
    ]
    comparison = Comparison(calls)
    for number, ours in enumerate(comparison.ours()):
        what = difference(ours, comparison.theirs(number))
        assert what is None, f"case {number}: {what}"


class Failing(torch.nn.Module):
    """Needs the error function in double precision, which ONNX Runtime's CPU provider lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).double().erf().sum().float()


@pytest.mark.options(kernels="onnxruntime")
def test_what_can_not_be_loaded_is_named() -> None:
    trainer = ORTTrainer(
        Failing(), {"inputs": [("x", [2, 3])], "outputs": [("loss", [], True)]}, optim.SGDConfig(lr=0.1)
    )
    with pytest.raises(RuntimeError, match="Erf of double: File .* in forward"):
        trainer.train_step(torch.ones(2, 3))


@pytest.mark.options(kernels="onnxruntime")
def test_nodes_are_named_by_their_operators() -> None:
    """ONNX Runtime's errors identify a node only by its name."""
    comparison = Comparison([Call(lambda x: F.gelu(x).cos(), [torch.rand(3).requires_grad_()])])
    (graph,) = comparison.trainer.session.graphs(True)
    names = [node.name or "" for node in graph.model.graph]
    for operator in ("gelu", "gelu_backward", "cos", "sin"):
        assert any(name.startswith(f"aten.{operator}.default/") for name in names), operator


@pytest.mark.options(kernels="onnxruntime")
def test_complex_numbers_are_refused() -> None:
    with pytest.raises(ExportError, match=r"aten\.view_as_complex\.default.*complex"):
        Comparison([Call(lambda x: torch.view_as_complex(x).abs(), [torch.ones(3, 2).requires_grad_()])])
