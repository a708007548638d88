"""Operators that are replaced before PyTorch differentiates, and those that stay whole: one graph for all sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ort_trainer.fx.operator_table import composites
from ort_trainer.kernels.kinds import PROGRAMS
from ort_trainer.operators.whole import RESIZING

from ..export.captures import captured

aten = torch.ops.aten


def square(x: torch.Tensor) -> torch.Tensor:
    return x[:, 0, :4, :4] @ x[:, 0, :4, :4].mT + torch.eye(4)


def index(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 0, 0, 0] > 0).long()


def matrix(x: torch.Tensor) -> torch.Tensor:
    return x[:, 0, 0, :4]


def resized(name: str) -> Callable[[torch.Tensor], tuple[Any, ...]]:
    dims = int(name[-2])
    corners = [False] * ("nearest" not in name)
    return lambda x: ((x.flatten(2), x, x.unsqueeze(2))[dims - 1], None, *corners, [2.0] * dims)


# Operator -> arguments of calls, of images (batch, 4, height, width), which have rows for values to select.
CALLS: dict[Any, list[Callable[[torch.Tensor], tuple[Any, ...]]]] = {
    **{
        operator: [lambda x: (x,)]
        for operator in (
            *(aten.aminmax.default, aten.erf.default, aten.erfc.default, aten.special_ndtr.default),
            *(aten.hardshrink.default, aten.softshrink.default, aten.median.default, aten.nanmedian.default),
            aten.log_sigmoid.default,
        )
    },
    **{
        operator: [lambda x: (x, 2)]
        for operator in (aten.cummax.default, aten.cummin.default, aten.median.dim, aten.nanmedian.dim)
    },
    **{
        operator: [lambda x: (square(x),)]
        for operator in (aten.linalg_inv.default, aten.inverse.default, aten.linalg_cholesky.default)
    },
    **{packet.vec: [resized(packet.__name__)] for packet in RESIZING},
    aten._weight_norm.default: [lambda x: (x, x[:, :1, :1, :1], 0)],
    aten.adaptive_avg_pool1d.default: [lambda x: (x.flatten(2), [1]), lambda x: (x.flatten(2), [3])],
    aten.adaptive_avg_pool2d.default: [lambda x: (x, [1, 1]), lambda x: (x, [3, 2])],
    aten.adaptive_avg_pool3d.default: [lambda x: (x.unsqueeze(1), [2, 3, 2])],
    aten.adaptive_max_pool1d.default: [lambda x: (x.flatten(2), [3])],
    aten.adaptive_max_pool2d.default: [lambda x: (x, [3, 2])],
    aten.adaptive_max_pool3d.default: [lambda x: (x.unsqueeze(1), [2, 3, 2])],
    aten.affine_grid_generator.default: [lambda x: (x[:, 0, :2, :3], [x.shape[0], 1, *x.shape[2:]], True)],
    aten.amax.default: [lambda x: (x, [-1])],
    aten.amin.default: [lambda x: (x, [])],
    aten.batch_norm.default: [lambda x: (x, None, None, None, None, True, 0.1, 1e-5, False)],
    aten.bilinear.default: [lambda x: (matrix(x), matrix(x) + 1, torch.ones(2, 4, 4))],
    aten.cdist.default: [lambda x, p=p: (x.flatten(2), x.flatten(2) + 1, p) for p in (1.0, 2.0)],
    aten.embedding_bag.default: [
        lambda x, mode=mode: (matrix(x), index(x), torch.arange(2), False, mode) for mode in (0, 2)
    ],
    aten.embedding_bag.padding_idx: [
        lambda x: (x[0, :, 0, :3], index(x), torch.arange(2), False, 1, False, None, False, 3)
    ],
    aten.grid_sampler.default: [
        lambda x, mode=mode: (x, x[:, :2].movedim(1, -1).tanh(), mode, 0, False) for mode in (0, 2)
    ],
    aten.index_reduce.default: [
        lambda x, reduce=reduce: (x, 0, index(x), x.square(), reduce) for reduce in ("mean", "amax")
    ],
    aten.kthvalue.default: [lambda x: (x, 2, -1)],
    aten.linalg_solve.default: [lambda x: (square(x), x[:, 0, :4, :4])],
    aten.masked_scatter.default: [lambda x: (x, x > 0, x.square()), lambda x: (x, x[:, :1] > 0, x.square())],
    aten.masked_select.default: [lambda x: (x, x > 0), lambda x: (x, x[:, :1] > 0), lambda x: (x[:1], x > 0)],
    aten.multi_margin_loss.default: [lambda x: (matrix(x), index(x))],
    aten.multilabel_margin_loss.default: [lambda x: (matrix(x), (matrix(x) > 0).long() - 1)],
    aten.pad.default: [
        *(lambda x, mode=mode: (x, [1, 2, 0, 1], mode) for mode in ("constant", "replicate", "reflect", "circular")),
        lambda x: (x.flatten(2), [1, 2], "replicate"),
    ],
    aten.pdist.default: [lambda x: (x.flatten(1), 2.0)],
    aten.put.default: [lambda x: (x, index(x), x[:, 0, 0, 0], True)],
    aten.scatter_reduce.two: [
        lambda x, reduce=reduce: (x, 1, (x > 0).long(), x.square(), reduce)
        for reduce in ("mean", "amax")
    ],
    aten.take.default: [lambda x: (x, index(x))],
    torch.ops.ort_trainer.ctc_losses.default: [
        lambda x: (x[:, :, 0].movedim(2, 0).log_softmax(-1), index(x)[:, None] + 1, index(x) + 5, index(x), 0, False)
    ],
}  # fmt: skip
# PyTorch's descriptions of these, or of their gradients, compare sizes with others.
OF_KNOWN_SIZES = (
    *(aten.batch_norm.default, aten.bilinear.default, aten.cdist.default, aten.cummax.default, aten.cummin.default),
    *(aten.linalg_cholesky.default, aten.linalg_solve.default, aten.log_sigmoid.default, aten.take.default),
)


class Called(nn.Module):
    """Calls operators on images of its own making, so that there is a gradient."""

    def __init__(self, operators: Collection[Any], selects: bool) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.operators, self.selects = operators, selects

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.factor * (x[x[:, 0, 0, 0].abs() > 0.1] if self.selects else x)
        results = [operator(*arguments(x)) for operator in self.operators for arguments in CALLS[operator]]
        return torch.stack([pytree.tree_leaves(result)[0].square().mean() for result in results]).sum()


def fixed(operators: Collection[Any], selects: bool) -> dict[str, int]:
    """Returns the sizes for which alone a graph of calls for PyTorch's kernels would be."""
    shapes = {"x": ("batch", 4, "height", "width")}
    graph = captured(Called(operators, selects), shapes, torch.randn(6, 4, 7, 8), kernels=PROGRAMS, answered=selects)
    return dict(graph.symbols.fixed)


@pytest.mark.parametrize("selects", [False, True], ids=["of batches", "of selected rows"])
def test_one_graph_computes_all_sizes(selects: bool) -> None:
    operators = [operator for operator in CALLS if not (selects and operator in OF_KNOWN_SIZES)]
    if fixed(operators, selects):
        pytest.fail(f"every size is an export: {[str(name) for name in operators if fixed([name], selects)]}")


def test_no_operator_is_forgotten() -> None:
    """Operators of other libraries, by name, have tests of their own."""
    operators = {operator for operator in composites() | composites(for_onnx=False) if not isinstance(operator, str)}
    assert operators == CALLS.keys()
