"""Composites and decompositions against the operators that they replace, in the calls of PyTorch's own test samples.

``benchmarks/operators.py`` compares the whole way of all samples, with exports.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ort_trainer.fx.operator_table import composites, decompositions

aten = torch.ops.aten
# Of an operator; PyTorch has hundreds of some.
MOST_SAMPLES = 40
# Further results of these are of no use.
RESULTS = {aten.embedding_bag.padding_idx: 1}
# Their results have no values to compare.
WITHOUT_VALUES = (aten._efficientzerotensor.default, aten.empty_like.default, aten.empty_permuted.default)
# Names of PyTorch's descriptions of operators, in each of which some of the table occur; the first of nn.functional.
FUNCTIONAL = (
    "pad (circular)", "pad (constant)", "pad (reflect)", "pad (replicate)", "pad (replicate_negative)",
    "multi_margin_loss", "multilabel_margin_loss", "logsigmoid", "bilinear", "batch_norm", "embedding_bag",
    "grid_sample", "pdist", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "smooth_l1_loss",
    "soft_margin_loss", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
    "adaptive_max_pool2d", "adaptive_max_pool3d",
)  # fmt: skip
OTHERS = (
    "cdist", "cummax", "cummin", "kthvalue", "masked_scatter", "masked_select", "median", "nanmedian", "aminmax",
    "put", "take", "erf", "erfc", "amax", "amin", "special.ndtr", "cumprod", "lgamma", "digamma",
    "polygamma (polygamma_n_1)", "erfinv", "copysign", "signbit", "squeeze", "squeeze (multiple)", "diagonal",
    "diagonal_scatter", "diagonal_copy", "as_strided", "as_strided_scatter", "angle", "atan2", "floor_divide",
    "fmod", "remainder", "div (floor_rounding)", "div (trunc_rounding)", "logcumsumexp", "prod",
    "linalg.vector_norm", "select", "index_reduce (mean)", "index_reduce (amax)", "index_reduce (amin)",
    "index_reduce (prod)", "scatter_reduce (mean)", "scatter_reduce (amax)", "scatter_reduce (amin)",
    "scatter_reduce (prod)",
)  # fmt: skip


def compare(ours: Callable[..., Any], theirs: Callable[..., Any], *args: Any, results: int | None = None) -> None:
    """Compares the first ``results`` (default: all), and the gradients of all floating-point arguments."""
    found = []
    leaves, tree = pytree.tree_flatten(args)
    for function in (ours, theirs):
        fresh = [
            a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in leaves
        ]
        values = tensors_of(function(*pytree.tree_unflatten(fresh, tree)))[:results]
        differentiable = [v for v in values if v.is_floating_point() and v.requires_grad and v.numel()]
        torch.manual_seed(0)
        total = sum((v * torch.randn(v.shape)).sum() for v in differentiable)
        floats = [a for a in fresh if isinstance(a, torch.Tensor) and a.requires_grad]
        gradients = (
            torch.autograd.grad(total, floats, allow_unused=True, materialize_grads=True) if differentiable else ()
        )
        found.append((values, gradients))
    assert_close(found[0][0], found[1][0], 1e-4, 1e-5)
    assert_close(found[0][1], found[1][1], 1e-3, 1e-4)


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def assert_close(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], rtol: float, atol: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)


class Composites(torch.fx.Interpreter):
    """Runs a graph, and compares each operator in it that has a composite."""

    seen: Counter[Any]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        function = composites().get(target)
        if function is not None:
            self.seen[target] += 1
            of_results = RESULTS.get(target)
            compare(lambda *a: function(*a, **kwargs), lambda *a: target(*a, **kwargs), *args, results=of_results)
        return super().call_function(target, args, kwargs)


class Decompositions(TorchDispatchMode):
    """Compares each operator that runs and has a decomposition, those of the backward pass as well."""

    def __init__(self, seen: Counter[Any]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, target: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        theirs = target(*args, **kwargs)
        is_determined = target not in WITHOUT_VALUES and torch.Tag.nondeterministic_seeded not in target.tags
        function = decompositions().get(target) if is_determined else None
        ours = NotImplemented if function is None else function(*args, **kwargs)
        if ours is not NotImplemented:
            self.seen[target] += 1
            assert_close(tensors_of(ours), tensors_of(theirs), 2e-4, 1e-4)
        return theirs


def of_tensors(call: Any) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Returns a call as a function of its tensors alone, and these."""
    leaves, tree = pytree.tree_flatten((tuple(call.args), dict(call.kwargs)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> Any:
        given = dict(zip(places, tensors, strict=True))
        args, kwargs = pytree.tree_unflatten([given.get(place, leaf) for place, leaf in enumerate(leaves)], tree)
        return call.function(*args, **kwargs)

    return run, [leaves[place].detach().requires_grad_(leaves[place].requires_grad) for place in places]


def compare_samples(name: str) -> Counter[Any]:
    """Compares what occurs in the samples of an operator; returns how often."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from benchmarks.operator_samples import operators, samples
    seen: Counter[Any] = Counter()
    for _, call in samples(operators()[name], MOST_SAMPLES):
        run, tensors = of_tensors(call)
        floats = [tensor for tensor in tensors if tensor.requires_grad]
        graph = Composites(make_fx(run, pre_dispatch=True)(*tensors))
        graph.seen = seen
        graph.run(*tensors)
        with Decompositions(seen):
            results = [v for v in tensors_of(call.select(run(*tensors))) if v.is_floating_point() and v.requires_grad]
            if results:
                torch.autograd.grad([v.sum() for v in results], floats, allow_unused=True)
    return seen


@pytest.mark.parametrize("name", [*(f"nn.functional.{name}" for name in FUNCTIONAL), *OTHERS])
def test_samples_of_pytorch(name: str) -> None:
    assert compare_samples(name)
