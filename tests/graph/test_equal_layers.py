"""Equal layers are differentiated once, and the graph is the one that all of them give."""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.export import builder
from ort_trainer.graph import equal_layers

WIDTH = 8


class Layer(nn.Module):
    """A layer that shares an input with the others."""

    def __init__(self, dropout: float = 0.1, batch_norm: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout, batch_first=True)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH) if batch_norm else None

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        if self.batch_norm is not None:
            x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.dropout(self.down(F.gelu(self.up(x) * x.shape[1] + bias)))


class Stack(nn.Module):
    def __init__(self, layers: list[Layer], recomputes: bool = False) -> None:
        super().__init__()
        self.first, self.layers, self.bias = nn.Linear(4, WIDTH), nn.ModuleList(layers), nn.Parameter(torch.randn(16))
        self._recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, self.bias, use_reentrant=False) if self._recomputes else layer(x, self.bias)
        return x.mean(1)


def train(model: nn.Module, kernels: str = "auto") -> tuple[list[float], dict[str, torch.Tensor], Counter[int]]:
    """Returns the losses of three steps, the weights after them, and how many operators each place in the model has."""
    desc = {"inputs": [("x", ["batch", "time", 4]), ("y", ["batch"])], "outputs": [("loss", [], True)]}
    options = ORTTrainerOptions({"utils": {"kernels": kernels, "cache_exports": False}})
    torch.manual_seed(3)
    model = copy.deepcopy(model)
    trainer = ORTTrainer(model, desc, optim.SGDConfig(lr=0.1), F.cross_entropy, options=options)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for size, length in ((3, 5), (4, 7), (2, 6)):
        x, y = torch.randn(size, length, 4, generator=generator), torch.randint(WIDTH, (size,), generator=generator)
        losses.append(trainer.train_step(x, y).item())
    places = json.loads(trainer.session.graphs(True)[0].origins)["nodes"].values()
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return losses, weights, Counter(number for several in places for number in several)


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the layers that are folded, by exports in this process."""
    found: list[str] = []
    fold = equal_layers.EqualLayers._fold

    def noted(self: Any, layer: Any, number: int) -> None:
        found.append(layer.path.removeprefix("model."))
        fold(self, layer, number)

    monkeypatch.setattr(builder, "can_isolate", lambda: False)
    monkeypatch.setattr(equal_layers.EqualLayers, "_fold", noted)
    return found


@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
def test_the_graph_is_the_one_that_all_layers_give(
    kernels: str, folded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Stack([Layer(), Layer(), Layer(dropout=0.3), Layer(dropout=0.3), Layer()])  # two kinds, one after the other
    losses, weights, places = train(model, kernels)
    assert folded == ["layers.0", "layers.1", "layers.4", "layers.2", "layers.3"]
    monkeypatch.setattr(equal_layers, "_ENOUGH", 10**6)
    separately, their_weights, their_places = train(model, kernels)
    assert len(folded) == 5
    if kernels == "auto":  # ONNX has nodes for sizes, which are read once instead of in each layer
        assert places == their_places
    # The gradient of the bias, which all layers have in common, is summed in another order.
    assert losses == pytest.approx(separately, rel=1e-6)
    torch.testing.assert_close(weights, their_weights)


@pytest.mark.parametrize(
    ("layers", "recomputes"),
    [
        ([Layer(batch_norm=True), Layer(batch_norm=True)], False),
        ([Layer(), Layer()], True),
        ([Layer(), Layer().requires_grad_(False)], False),
    ],
    ids=["buffers", "checkpoint", "frozen"],
)
def test_others_are_differentiated_one_by_one(layers: list[Layer], recomputes: bool, folded: list[str]) -> None:
    train(Stack(layers, recomputes))
    assert not folded
