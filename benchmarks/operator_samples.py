"""PyTorch's test samples of its operators, and the same samples with some elements replaced by edge values."""

from __future__ import annotations

import re
import sys
import types
import unittest
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.export.against_pytorch import Call  # noqa: E402

if "expecttest" not in sys.modules:
    # PyTorch's test utilities import it, but the samples do not use it.
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    with mock.patch.object(torch.backends, "disable_global_flags"):  # of the whole process, for PyTorch's own tests
        from torch.testing._internal.common_methods_invocations import op_db

__all__ = ["EDGES", "OPEN", "RANDOM", "edge_values", "open_question", "operators", "samples"]

# Operators whose results are random or uninitialized memory.
RANDOM = {
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "randperm", "uniform", "empty", "empty_like", "empty_permuted",
    "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_", "svd_lowrank", "pca_lowrank",
    "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d", "nn.functional.alpha_dropout",
    "nn.functional.feature_alpha_dropout", "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d", "nn.functional.rrelu",
}  # fmt: skip

_TIES = [-2.0, -1.5, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 1.5, 2.0]
EDGES: Mapping[str, list[float]] = {
    "ties and zeros": _TIES,
    "infinities": [*_TIES, float("inf"), float("-inf")],
    "NaN": [*_TIES, float("nan")],
    "negative": [-0.25, -0.75, -1.25, -3.0],
}
"""Name of an edge case -> the values that replace half of the elements, or all of them in the first case."""

_CONVOLUTION = r"nn\.functional\.conv.*"
OPEN: Sequence[tuple[str, Collection[str], bool, str]] = (
    (r"sort|msort|argsort|topk|kthvalue|mode", EDGES, True, "which of equal elements comes first"),
    (r"nn\.functional\.(adaptive_)?max_pool.*", {"NaN"}, True, "which of several NaNs in a window is the maximum"),
    (r"max_pool2d_with_indices_backward", {"NaN"}, False, "which of several NaNs in a window is the maximum"),
    (r"(var|std)_mean.*|.*(batch|layer|group|instance)_norm.*", {"infinities"}, False,
     "PyTorch's mean of infinities is NaN or infinite, depending on the order of the elements"),
    (r"nn\.functional\.gelu", {"infinities"}, False,
     "PyTorch's GELU of infinity is NaN or infinity, depending on the kernel"),
    (r"nn\.functional\.(hardswish|softshrink)|logit", {"NaN"}, False,
     "PyTorch's gradient is NaN, zero or neither, depending on the position of the element"),
    (r"nn\.functional\.(interpolate|upsample).*linear.*", {"infinities"}, False,
     "PyTorch skips products of zero and infinity, in some of its kernels"),
    (_CONVOLUTION, {"infinities"}, False, "PyTorch skips products of zero and infinity, in some of its kernels"),
    (r"nn\.functional\.scaled_dot_product_attention", {"infinities", "NaN"}, False,
     "PyTorch's kernels differ in what NaN under the mask does"),
    (r"nn\.functional\.ctc_loss", {"infinities", "NaN"}, True,
     "PyTorch's gradient is NaN in places that the loss does not see"),
    (r"mvlgamma.*", EDGES, True, "the sign of an infinity at a pole, which depends on the sign of a rounded zero"),
    (r"nn\.functional\.embedding_bag", {"infinities"}, True, "PyTorch skips products of zero and infinity"),
    (r"(nn\.functional\.)?grid_samp.*", {"infinities", "NaN"}, False,
     "at a position that is not finite, PyTorch gives NaN, zero or the border; here it is NaN"),
    (r"nn\.functional\.embedding_bag", {"NaN"}, False,
     "whether NaN is the maximum of a bag depends on its position in PyTorch"),
    (r"digamma|special\.polygamma.*|polygamma.*|lgamma", EDGES, True,
     "PyTorch's derivatives at poles are rounding errors"),
    (r"(nn\.functional\.pdist|cdist)", {"infinities", "NaN"}, False,
     "PyTorch has several formulas, depending on the size"),
    (r"prod|masked\.prod", {"infinities", "NaN"}, True,
     "PyTorch has two formulas for the gradient, depending on the values"),
)  # fmt: skip
"""What PyTorch leaves undefined: operators, edge cases, whether the values are compared anyway, and why."""


def open_question(name: str, edge: str) -> tuple[bool, str] | None:
    """Returns whether an edge case of an operator has values to compare, and what is undefined; None if nothing is."""
    for operator, edges, with_values, why in OPEN:
        if edge in edges and re.fullmatch(operator, name):
            return with_values, why
    return None


def operators() -> dict[str, Any]:
    """Returns PyTorch's descriptions of its operators that take fp32, by name and variant."""
    return {
        op.name + (f" ({op.variant_test_name})" if op.variant_test_name else ""): op
        for op in op_db
        if torch.float32 in op.dtypes
    }


def samples(op: Any, limit: int) -> Iterator[tuple[int, Call]]:
    """Yields at most ``limit`` samples, evenly spread, each with its number."""
    torch.manual_seed(0)
    found = list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))
    if op.name == "nn.functional.multi_head_attention_forward":  # its dropout has no name in the samples
        found = [sample for sample in found if not (sample.kwargs.get("training", True) and sample.args[9])]
    found = [sample for sample in found if not sample.kwargs.get("dropout_p")]
    assert found, "all samples have dropout"
    chosen = list(range(len(found)))
    if len(found) > limit:
        chosen = sorted({round(place * (len(found) - 1) / (limit - 1)) for place in range(limit)})
    for number in chosen:
        sample = found[number]
        yield number, Call(op.op, (sample.input, *sample.args), sample.kwargs, sample.output_process_fn_grad)


def edge_values(value: torch.Tensor, edge: str, draw: torch.Generator) -> torch.Tensor:
    """Returns a tensor of the same shape with edge values."""
    chosen = torch.tensor(EDGES[edge], dtype=value.dtype)
    drawn = chosen[torch.randint(len(chosen), value.shape, generator=draw)]
    if edge == "ties and zeros":
        return drawn
    return torch.where(torch.rand(value.shape, generator=draw) < 0.5, drawn, value.detach())
