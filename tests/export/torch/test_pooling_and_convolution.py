"""Our decompositions of backward operators against PyTorch's own kernels, on real tensors."""

from __future__ import annotations

import itertools

import pytest
import torch

from ort_trainer.export.torch.operators.registry import decompositions

aten = torch.ops.aten


def compare(operator, *args) -> None:
    ours = decompositions()[operator](*args)
    theirs = operator(*args)
    for a, b in zip(*(((x,) if isinstance(x, torch.Tensor) else x) for x in (ours, theirs)), strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


CONVOLUTIONS = [
    # input, weight, stride, padding, dilation, transposed, output_padding, groups
    *(
        ((2, 4, 9, 8), (6, 4 // groups, *kernel), stride, padding, dilation, False, [0, 0], groups)
        for kernel, stride, padding, dilation, groups in itertools.product(
            [(3, 3), (1, 2), (5, 4)], [[1, 1], [2, 3]], [[0, 0], [1, 1]], [[1, 1], [2, 2]], [1, 2]
        )
    ),
    ((2, 4, 7, 7), (8, 1, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 4),
    ((3, 4, 10), (5, 4, 3), [2], [1], [1], False, [0], 1),
    ((2, 2, 5, 6, 7), (4, 2, 2, 3, 2), [1, 2, 2], [0, 1, 1], [1, 1, 1], False, [0, 0, 0], 1),
    ((2, 4, 5, 5), (4, 6, 3, 3), [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
    ((2, 4, 5, 5), (4, 3, 2, 2), [2, 2], [0, 0], [1, 1], True, [0, 0], 2),
    ((2, 4, 5, 5), (4, 3, 2, 3), [1, 2], [0, 1], [3, 1], True, [2, 1], 1),
    ((2, 4, 5, 5), (4, 3, 2, 4), [1, 2], [0, 1], [3, 3], True, [2, 2], 1),
]


@pytest.mark.parametrize("mask", [[True, True, True], [False, True, False]])
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolution(case: tuple, mask: list[bool]) -> None:
    shape, kernel, *rest = case
    value, weight = torch.randn(shape), torch.randn(kernel)
    bias = kernel[1] * rest[-1] if rest[3] else kernel[0]
    output = aten.convolution.default(value, weight, None, *rest)
    compare(aten.convolution_backward.default, torch.randn_like(output), value, weight, [bias], *rest, mask)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "ceil"),
    [([2, 2], [2, 2], [0, 0], False), ([3, 3], [2, 2], [1, 1], False), ([3, 2], [1, 2], [1, 0], True)],
)
def test_max_pool(kernel: list[int], stride: list[int], padding: list[int], ceil: bool) -> None:
    value = torch.randn(2, 3, 7, 8)
    output, indices = aten.max_pool2d_with_indices.default(value, kernel, stride, padding, [1, 1], ceil)
    grad = torch.randn_like(output)
    compare(aten.max_pool2d_with_indices_backward.default, grad, value, kernel, stride, padding, [1, 1], ceil, indices)


def test_max_pool_3d() -> None:
    value = torch.randn(2, 3, 4, 6, 5)
    args = ([2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False)
    output, indices = aten.max_pool3d_with_indices.default(value, *args)
    compare(aten.max_pool3d_with_indices_backward.default, torch.randn_like(output), value, *args, indices)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("ceil", [True, False])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "divisor"),
    [
        ([2, 2], [], [0, 0], None),
        ([3, 3], [2, 2], [1, 1], None),
        ([3, 2], [2, 1], [1, 0], None),
        ([2, 2], [3, 3], [0, 0], None),
        ([2, 2], [2, 2], [0, 0], 3),
    ],
)
def test_avg_pool(kernel, stride, padding, divisor, include: bool, ceil: bool) -> None:
    value = torch.randn(2, 3, 8, 9)
    output = aten.avg_pool2d.default(value, kernel, stride, padding, ceil, include, divisor)
    grad = torch.randn_like(output)
    compare(aten.avg_pool2d_backward.default, grad, value, kernel, stride, padding, ceil, include, divisor)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(("ceil", "divisor"), [(False, None), (True, None), (False, 3)])
def test_avg_pool_3d(ceil: bool, divisor: int | None, include: bool) -> None:
    value = torch.randn(2, 3, 5, 6, 7)
    args = ([3, 2, 2], [2, 2, 1], [1, 0, 1], ceil, include, divisor)
    output = aten.avg_pool3d.default(value, *args)
    if ceil or divisor:
        compare(aten.avg_pool3d.default, value, *args)
    compare(aten.avg_pool3d_backward.default, torch.randn_like(output), value, *args)
