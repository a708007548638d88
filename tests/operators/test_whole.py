"""PyTorch's kernels in graphs for which PyTorch or the package would otherwise take an operator apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode

from ort_trainer import ORTModule
from ort_trainer.fx.operator_table import composites
from ort_trainer.operators.whole import RESIZING

from ..module.pairs import assert_same_gradients, close, pair

aten = torch.ops.aten
IDS = torch.tensor([[0, 1, 1], [2, 0, 3]])


class Applied(nn.Module):
    """Functions of a convolution's images."""

    def __init__(self, function: Callable[[torch.Tensor], list[torch.Tensor]], dims: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](4, 4, 1)
        self.function = function

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self.function(self.convolution(x))


def programs(module: ORTModule) -> str:
    """Returns the text of a module's forward passes."""
    graphs = [graphs for candidates in module._graphs._by_kind.values() for graphs in candidates]
    return "".join("".join(each.passes.step.programs.programs.values()) for each in graphs)  # type: ignore[union-attr]


def assert_kernels(function: Callable[[torch.Tensor], list[torch.Tensor]], *kernels: str, dims: int = 2) -> None:
    """Compares results and gradients for several sizes, and looks for kernels in the graph."""
    eager, ours = pair(Applied(function, dims))
    for size in (6, 8):
        torch.manual_seed(size)
        x = torch.randn(size, 4, *[size] * dims)
        close(ours(x), eager(x))
        assert_same_gradients(
            eager, ours, lambda module, x=x: sum(value.square().sum() for value in module(x)).backward()
        )
    text = programs(ours)
    assert [kernel for kernel in kernels if f'"aten.{kernel}.' not in text] == []


@pytest.mark.parametrize(
    ("modes", "dims"),
    [
        (["linear", "nearest", "nearest-exact"], 1),
        (["bilinear", "bicubic", "nearest", "nearest-exact"], 2),
        (["trilinear", "nearest", "nearest-exact"], 3),
    ],
)
def test_images_are_resized_by_kernels(modes: list[str], dims: int) -> None:
    """To a size, by whole and other factors, and to the size of another tensor; of any sizes."""

    def resize(x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for mode in modes:
            results += [F.interpolate(x, scale_factor=factor, mode=mode) for factor in (2, 1.5)]
            results += [F.interpolate(x, [7] * dims, mode=mode), F.interpolate(x[..., :5], x.shape[2:], mode=mode)]
        return results

    names = {"nearest": "upsample_nearest{}d", "nearest-exact": "_upsample_nearest_exact{}d"}
    assert_kernels(resize, *(names.get(mode, f"upsample_{mode}{{}}d").format(dims) for mode in modes), dims=dims)


SEQUENCE, IMAGE = torch.randn(6, 4, 2).permute(2, 1, 0), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("operator", "value", "args"),
    [
        *((packet.vec, SEQUENCE, (None, [2.0])) for packet in RESIZING[::3][:2]),
        (aten.upsample_linear1d.vec, SEQUENCE, (None, False, [2.0])),
        (aten.upsample_bilinear2d.vec, IMAGE, (None, False, [2.0, 2.0])),
        (aten.upsample_bicubic2d.vec, IMAGE, (None, False, [2.0, 2.0])),
        (aten.pad.default, IMAGE, ([1, 1, 1, 1], "replicate")),
        (aten._weight_norm.default, SEQUENCE, (torch.ones(2, 1, 1),)),
    ],
)
def test_results_and_gradients_have_the_order_in_memory_that_is_described(
    operator: Any, value: torch.Tensor, args: tuple[Any, ...]
) -> None:
    """Loops would read another one at wrong places."""

    def strides(value: torch.Tensor) -> list[tuple[int, ...]]:
        result = composites(for_onnx=False)[operator](value, *args)  # type: ignore[misc]
        (gradient,) = torch.autograd.grad(result, value, torch.ones_like(result))
        return [result.stride(), gradient.stride()]

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, enable_python_dispatcher():
        described = strides(mode.from_tensor(value).requires_grad_())
    assert strides(value.detach().requires_grad_()) == described


def test_what_onnx_lacks_stays_whole() -> None:
    def apply(x: torch.Tensor) -> list[torch.Tensor]:
        rows = x.flatten(1)
        return [
            F.adaptive_max_pool2d(x, 3),
            F.grid_sample(x, x[:, :2].movedim(1, -1).tanh(), align_corners=False),
            F.pad(x, (1, 2, 0, 1), mode="replicate"),
            torch.cdist(rows, rows + 1),
            x.cummax(-1)[0] + x.cummin(2)[0],
            x.median(1)[0] + x.kthvalue(2, 1)[0],
            F.softshrink(x) + F.hardshrink(x),
            F.embedding_bag(IDS, x[0, 0]),
        ]

    assert_kernels(
        apply,
        *("adaptive_max_pool2d", "grid_sampler_2d", "replication_pad2d", "_cdist_forward", "cummax", "cummin"),
        *("median", "kthvalue", "softshrink", "hardshrink", "_embedding_bag"),
    )


def test_matrices_are_checked_as_pytorch_checks_them() -> None:
    def apply(x: torch.Tensor) -> list[torch.Tensor]:
        square = x[:, 0, :4, :4]
        positive = square @ square.mT + torch.eye(4)
        return [
            torch.linalg.inv(positive) + positive.inverse(),
            torch.linalg.cholesky(positive) + torch.linalg.cholesky(positive, upper=True),
            torch.linalg.solve(positive, square) + torch.linalg.solve(positive, square, left=False),
        ]

    assert_kernels(apply, "linalg_inv_ex", "linalg_cholesky_ex", "_linalg_solve_ex")


@pytest.mark.parametrize("function", [torch.linalg.inv, torch.linalg.cholesky, lambda x: torch.linalg.solve(x, x)])
def test_a_matrix_without_a_result_is_pytorch_s_error(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    eager, ours = pair(Applied(lambda x: [function(x[:, :, :4])], dims=1))
    x = torch.diag_embed(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    nn.init.dirac_(eager.convolution.weight)  # type: ignore[arg-type]
    nn.init.zeros_(eager.convolution.bias)  # type: ignore[arg-type]
    ours.load_state_dict(eager.state_dict())
    close(ours(x), eager(x))
    assert "checked_matrix" in programs(ours)
    with pytest.raises(torch.linalg.LinAlgError) as theirs:
        eager(x * 0)
    with pytest.raises(torch.linalg.LinAlgError) as mine:
        ours(x * 0)
    assert str(mine.value) == str(theirs.value)


def test_a_user_s_composite_is_for_pytorch_s_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from ort_trainer.fx import operator_table as registry

    monkeypatch.setitem(registry._composites.user, aten.softshrink.default, torch.relu)
    assert composites(for_onnx=False)[aten.softshrink.default] is torch.relu
    assert aten.cdist.default in composites() and aten.cdist.default not in composites(for_onnx=False)
