"""Operators whose translation is ours or known to be wrong: gradients of a few layers against PyTorch's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, optim

from ..helpers import assert_close

pytestmark = pytest.mark.engine


class Functional(nn.Module):
    """Puts a learned scale before a function, so that its backward operator runs."""

    def __init__(self, function, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.scale)


CASES = {
    "max_pool_overlapping": (lambda x: F.max_pool2d(x, 3, 2, 1), (3, 7, 8)),
    "max_pool_ceil": (lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True), (3, 7, 9)),
    "max_pool_dilated": (lambda x: F.max_pool2d(x, 2, 1, dilation=2), (3, 7, 8)),
    "max_pool_1d": (lambda x: F.max_pool1d(x, 2), (3, 9)),
    "max_pool_3d": (lambda x: F.max_pool3d(x, 2), (2, 4, 5, 6)),
    "avg_pool": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), (3, 7, 8)),
    "avg_pool_ceil": (lambda x: F.avg_pool2d(x, 2, ceil_mode=True), (3, 7, 9)),
    "avg_pool_ceil_padded": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), (3, 6, 8)),
    "avg_pool_divisor": (lambda x: F.avg_pool2d(x, 2, divisor_override=3), (3, 6, 8)),
    "avg_pool_1d_ceil": (lambda x: F.avg_pool1d(x, 4, ceil_mode=True), (3, 9)),
    "adaptive_avg_pool_3": (lambda x: F.adaptive_avg_pool2d(x, (3, 4)), (3, 9, 7)),
    "one_hot": (lambda x: x * F.one_hot(torch.arange(x.shape[0]) % 5, 5)[:, None].float(), (3, 5)),
    "avg_pool_1d": (lambda x: F.avg_pool1d(x, 3, 2), (3, 9)),
    "adaptive_avg_pool": (lambda x: F.adaptive_avg_pool2d(x, 1), (3, 6, 6)),
    "group_norm": (lambda x: F.group_norm(x, 2), (4, 5, 5)),
    "instance_norm": (lambda x: F.instance_norm(x), (3, 5, 5)),
    "rms_norm": (lambda x: F.rms_norm(x, (5,)), (3, 5)),
    "batch_norm_without_statistics": (lambda x: F.batch_norm(x, None, None, training=True), (3, 5, 5)),
    "gelu": (lambda x: F.gelu(x) + F.gelu(x, approximate="tanh"), (3, 5)),
    "silu_mish": (lambda x: F.silu(x) + F.mish(x), (3, 5)),
    "softmax": (lambda x: F.softmax(x, -1) * F.log_softmax(x, 1), (3, 5)),
    "gather": (lambda x: x.gather(2, torch.arange(4).expand(x.shape[0], 3, 4) % 2), (3, 5)),
    "index": (lambda x: x[:, [0, 0, 2]] * x[:, 1:2], (3, 5)),
    "short_index": (lambda x: x[:, torch.tensor([2, 0, 2], dtype=torch.int32)], (3, 5)),
    "roll_flip_cat": (lambda x: torch.cat([x.roll(1, 2), x.flip(1)], 1), (3, 5)),
    "einsum": (lambda x: torch.einsum("bci,bcj->bij", x, x), (3, 5)),
    "cumsum": (lambda x: x.cumsum(-1), (3, 5)),
    "where_masked": (lambda x: x.masked_fill(x > 1, 0.0) + torch.where(x > 0, x.clamp(min=1e-3).log(), 0.0), (3, 5)),
    "select": (lambda x: x[:, 0] * x[:, -1] + x.select(2, 3).sum(1, keepdim=True), (3, 5)),
    "attention_with_masked_rows": (
        lambda x: F.scaled_dot_product_attention(
            x, x, x, attn_mask=torch.tensor([[False] * 3, [True] * 3, [True] * 3])
        ),
        (2, 3, 4),
    ),
    "slices": (lambda x: x[:, 1:, ::2] + x[:, :-1, 1:4], (3, 6)),
    "norms": (lambda x: x.norm(dim=-1) + x.abs().amax(-1) + x.std(-1), (3, 5)),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 1)) + F.pad(x, (1, 2, 1, 0), mode="reflect"), (3, 5, 5)),
}


@pytest.mark.parametrize("case", CASES)
def test_gradient(case: str) -> None:
    function, shape = CASES[case]
    module = Functional(function, shape)
    reference = copy.deepcopy(module)
    desc = {"inputs": [("x", ["batch", *shape]), ("weight", ["batch"])], "outputs": [("loss", [], True)]}

    def loss_fn(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        terms = torch.cos(torch.arange(y[0].numel(), dtype=y.dtype)).view(1, *y.shape[1:])
        return (y * terms * weight.view(-1, *[1] * (y.dim() - 1))).sum()

    trainer = ORTTrainer(module, desc, optim.SGDConfig(lr=0.0), loss_fn=loss_fn)
    for size in (3, 2):
        x, weight = torch.randn(size, *shape), torch.rand(size)
        trainer.prepare((x, weight))
        trainer.session.lazy_reset_grad()
        (loss,) = trainer.session.train_step([x, weight])
        reference.zero_grad()
        expected = loss_fn(reference(x), weight)
        expected.backward()
        assert_close(loss, expected.detach(), 1e-4, "loss")
        assert_close(trainer.session.gradients["scale"], reference.scale.grad, 1e-4, "gradient")
