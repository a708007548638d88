"""Operators compute the same of tensors that are laid out differently in memory, as PyTorch's functions do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTModule
from ort_trainer.engine.programs.program import find_operator

IMAGES, GRADIENT = torch.rand(2, 4, 3, 5), torch.rand(2, 4, 3, 5)
STATISTICS = [torch.rand(2, 2), torch.rand(2, 2) + 1]
HEADS = [torch.rand(2, 2, 6, 8) for _ in range(3)]
INDICES, OFFSETS, TABLE = torch.tensor([1, 4, 2, 4, 3, 0]), torch.tensor([0, 2, 5]), torch.rand(5, 3)
BATCH_NORM = [torch.rand(4), None, None, IMAGES.mean((0, 2, 3)), IMAGES.var((0, 2, 3)), True, 1e-5, [True] * 3]
CASES: dict[str, list[Any]] = {
    "aten.native_group_norm.default": [IMAGES, torch.rand(4), torch.rand(4), 2, 4, 15, 2, 1e-5],
    "aten.native_group_norm_backward.default": [GRADIENT, IMAGES, *STATISTICS, torch.rand(4), 2, 4, 15, 2, [True] * 3],
    "aten.native_batch_norm_backward.default": [GRADIENT[:1], IMAGES[:1], *BATCH_NORM],
    "aten._scaled_dot_product_flash_attention_for_cpu.default": HEADS,
    "aten._embedding_bag.default": [TABLE, INDICES, OFFSETS],
    "aten._pdist_forward.default": [IMAGES[0, 0]],
    "aten.nll_loss2d_backward.default": [
        *(torch.ones(()), IMAGES, torch.ones(2, 3, 5, dtype=torch.long), None, 1, -100, torch.tensor(30.0))
    ],
}


def with_gaps(value: torch.Tensor) -> torch.Tensor:
    return value.repeat_interleave(2, -1)[..., ::2]


def channels_last(value: torch.Tensor) -> torch.Tensor:
    """Of one sample, whose stride means nothing, another one than PyTorch's: then kernels guess another order."""
    order = value.movedim(1, -1).contiguous().movedim(-1, 1) if value.dim() == 4 else value
    return order if len(value) > 1 else order.as_strided(order.shape, (1, *order.stride()[1:]))


@pytest.mark.parametrize("arrange", [with_gaps, channels_last])
@pytest.mark.parametrize("target", CASES)
def test_strides_do_not_change_results(target: str, arrange: Any) -> None:
    operator, args = find_operator(target), CASES[target]
    results = operator(*args)
    expected = results if isinstance(results, tuple) else (results,)
    for place, value in enumerate(args):
        if isinstance(value, torch.Tensor) and value.dim():
            results = operator(*args[:place], arrange(value), *args[place + 1 :])
            found = results if isinstance(results, tuple) else (results,)
            for one, other in zip(found, expected, strict=True):
                if isinstance(one, torch.Tensor):
                    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("place", range(7))
def test_strides_do_not_change_an_lstm_of_onednn(place: int) -> None:
    """The fourth result is memory for the backward pass, some of which nothing writes."""
    operator = find_operator("aten.mkldnn_rnn_layer.default")
    weights = [torch.rand(24, 4), torch.rand(24, 6), torch.rand(24), torch.rand(24)]
    values = [torch.rand(3, 2, 4), *weights, torch.rand(1, 2, 6), torch.rand(1, 2, 6)]
    settings = (False, [], 2, 6, 1, True, False, False, True)  # 2 is oneDNN's code for an LSTM, 6 its hidden size
    *expected, _ = operator(*values, *settings)
    values[place] = with_gaps(values[place])
    *found, _ = operator(*values, *settings)
    torch.testing.assert_close(found, expected)


class NormAfterAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.group, self.batch = nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.BatchNorm2d(4, affine=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        images = self.linear(tokens).transpose(-1, -2).reshape(tokens.shape[0], 4, 3, 5)
        return self.group(images) + self.batch(images * 2)


@pytest.fixture(scope="module")
def model() -> ORTModule:
    return ORTModule(NormAfterAttention(), {"debug": {"verify_every": "off"}})  # which would prefer PyTorch's gradient


@pytest.mark.parametrize("count", [3, 1])
def test_norms_after_attention(count: int, model: ORTModule) -> None:
    """In fp64, as the gradient of PyTorch's own batch norm is wrong for one sample and this order of its gradient."""
    plain = NormAfterAttention()
    plain.load_state_dict(model.state_dict())
    tokens, weights = torch.rand(count, 15, 4), torch.rand(count, 4, 3, 5)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), plain(tokens))
    (model(tokens) * weights).sum().backward()
    parameters = {name: value.detach().double().requires_grad_() for name, value in plain.named_parameters()}
    doubled = F.linear(tokens.double(), parameters["linear.weight"], parameters["linear.bias"])
    images = doubled.transpose(-1, -2).reshape(count, 4, 3, 5).contiguous()
    normalized = F.group_norm(images, 2, parameters["group.weight"], parameters["group.bias"])
    ((normalized + F.batch_norm(images * 2, None, None, training=True)) * weights).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, parameters[name].grad.float(), rtol=1e-4, atol=1e-4)
    model.zero_grad()
